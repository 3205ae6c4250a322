"""A replica's payloads from the broker, with prefetch, for a thread without a loop."""

import asyncio
import logging
from collections.abc import Sequence
from importlib.metadata import version as package_version

from slipstream.broker.client import BrokerClient
from slipstream.broker.images import ImageFetcher
from slipstream.learner.batches.prefetch import EarlyPlans, PayloadPrefetch
from slipstream.learner.config import LearnerSettings
from slipstream.wire.errors import ImageError, ProtocolError, SlipstreamError
from slipstream.wire.messages.broker import FetchPayloads, Payloads, Role
from slipstream.wire.messages.codec import Frame
from slipstream.wire.messages.trajectory import TrajectoryKey
from slipstream.wire.models.tokenizer_hash import tokenizer_hash
from slipstream.wire.process.background import BackgroundLoop

_log = logging.getLogger(__name__)
_CHECK_S = 0.05
_IMAGES_AT_ONCE = 8


class PayloadLink:
    """Fetches the payloads of a replica's trajectories."""

    _role: Role = "learner_part"

    def __init__(
        self,
        loop: BackgroundLoop,
        settings: LearnerSettings,
        name: str,
        *,
        replica: int,
        early: EarlyPlans | None,
    ) -> None:
        """Connect to the broker under a name that is stable over restarts.

        ``early`` announces coming batches between ranks; None if there is only one replica.

        Raises:
            PeerLostError: no broker answers.
            ConfigError: the broker does not want this client.
        """
        self._loop = loop
        self._replica = replica
        self._early = early
        self._prefetched = PayloadPrefetch(self._ask_payloads)
        self._search: asyncio.Task[None] | None = None
        outage_s = settings.run.outage_s
        if settings.learner.ranks > 1:  # the other ranks must not give up first
            outage_s = min(outage_s, 0.8 * settings.learner.timeout_s)
        self._client, _ = loop.run(
            BrokerClient.connect(
                settings.run.broker_endpoint,
                role=self._role,
                name=name,
                packages={
                    "torch": package_version("torch"),
                    "megatron-core": package_version("megatron-core"),
                },
                tokenizer=tokenizer_hash(settings.model),
                outage_s=outage_s,
                key_file=settings.run.key_file,
            )
        )
        self._images = ImageFetcher(self._client)

    def fetch(self, step: int, keys: Sequence[TrajectoryKey]) -> list[Frame]:
        """Return the payloads of delivered trajectories, in the requested order.

        Payloads prefetched for this step are used and the rest requested; payloads prefetched for
        another step are discarded.
        """
        return self._loop.run(self._fetched(step, keys))

    def fetch_images(self, digests: Sequence[str]) -> dict[str, bytes]:
        """Return the files of images of the run; without those that the broker cannot give."""
        return self._loop.run(self._fetched_images(digests))

    def begin_prefetch(self, step: int) -> None:
        """Find the batch of a coming step in the background, and fetch its payloads.

        At most one step is prefetched: an earlier one is discarded. Nothing depends on it.
        """
        self._loop.run(self._begin_search(step))

    def close(self) -> None:
        """Drop the connection."""
        self._loop.run(self._closed())

    async def _fetched(self, step: int, keys: Sequence[TrajectoryKey]) -> list[Frame]:
        self._end_search()
        found = await self._prefetched.take(step, keys)
        missing = tuple(key for key in keys if key not in found)
        if missing:
            found |= zip(missing, await self._ask_payloads(missing), strict=True)
        return [found[key] for key in keys]

    async def _fetched_images(self, digests: Sequence[str]) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        places = asyncio.Semaphore(_IMAGES_AT_ONCE)

        async def fetch(digest: str) -> None:
            try:
                async with places:
                    found[digest] = await self._images.fetch(digest)
            except ImageError as error:
                _log.warning("%s", error)

        await asyncio.gather(*map(fetch, digests))
        return found

    async def _ask_payloads(self, keys: tuple[TrajectoryKey, ...]) -> list[Frame]:
        answer, frames = await self._client.ask(FetchPayloads(keys=keys), Payloads)
        if answer.num_frames != len(keys) or len(frames) != len(keys):
            raise ProtocolError(f"asked for {len(keys)} payloads, got {len(frames)}")
        return frames

    async def _begin_search(self, step: int) -> None:
        self._end_search()
        self._prefetched.drop()
        self._search = asyncio.create_task(self._searching(step))

    def _end_search(self) -> None:
        """Stop the search; payloads already found are still fetched."""
        if self._search is not None:
            self._search.cancel()
        self._search = None

    async def _searching(self, step: int) -> None:
        try:
            await self._find(step)
        except (SlipstreamError, RuntimeError) as error:  # RuntimeError comes from a torch store
            _log.warning("cannot prefetch step %d: %s", step, error)

    async def _find(self, step: int) -> None:
        """Wait until rank 0 has posted this replica's keys, and start to fetch the payloads."""
        if self._early is None:
            return
        while (keys := self._early.read(step)) is None:  # noqa: ASYNC110 another process posts
            await asyncio.sleep(_CHECK_S)
        self._prefetched.begin(step, keys[self._replica])

    async def _closed(self) -> None:
        self._end_search()
        self._prefetched.drop()
        self._client.close()
        await asyncio.sleep(0)  # lets cancelled tasks see it

"""The learner's conversation with the broker and the weight bus, for a thread without a loop."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version as package_version

from broker.client import BrokerClient
from learner.background import BackgroundLoop
from learner.config import LearnerSettings
from weightbus.publisher import Publisher
from weightbus.snapshot import WeightSnapshot
from wire.bus import PublishRecord
from wire.codec import decode_payload
from wire.control import (
    BatchDelivered,
    BatchNotReady,
    Done,
    FetchPayloads,
    GetLedgerSnapshot,
    LedgerSnapshotAnswer,
    Payloads,
    PublishReport,
    RequestBatch,
    RoleReport,
    RunComplete,
    StepCommit,
    StepCommitted,
    TakeOver,
    TookOver,
)
from wire.errors import ProtocolError
from wire.phases import PhaseClock
from wire.tokenizer_hash import tokenizer_hash
from wire.trajectory import TrajectoryPayload
from wire.versions import PolicyVersion

_log = logging.getLogger(__name__)
_POLL_S = 1.0
_REPORT_S = 1.0
_SAY_WAITING_AFTER_S = 10.0


class PayloadLink:
    """What every rank needs: the payloads of its own trajectories."""

    publishes = True

    def __init__(self, loop: BackgroundLoop, settings: LearnerSettings, name: str) -> None:
        self._loop = loop
        self._client, _ = loop.run(
            BrokerClient.connect(
                settings.run.endpoint("broker"),
                role="learner",
                name=name,
                packages={
                    "torch": package_version("torch"),
                    "megatron-core": package_version("megatron-core"),
                },
                tokenizer=tokenizer_hash(settings.model),
            )
        )

    def fetch(self, keys: Sequence[tuple[int, int]]) -> list[TrajectoryPayload]:
        """Return the payloads of delivered trajectories, in the order asked."""
        request = FetchPayloads(keys=tuple(keys))
        answer, frames = self._loop.run(self._client.ask(request, Payloads))
        if answer.num_frames != len(keys) or len(frames) != len(keys):
            raise ProtocolError(f"asked for {len(keys)} payloads, got {len(frames)}")
        return [decode_payload(frame) for frame in frames]

    def close(self) -> None:
        """Drop the connection."""
        self._loop.run(self._closed())

    async def _closed(self) -> None:
        self._client.close()
        await asyncio.sleep(0)  # lets the receiver see that it was cancelled


class LeaderLink(PayloadLink):
    """What rank 0 needs besides: batches, commits, publishes, reports."""

    def __init__(
        self,
        loop: BackgroundLoop,
        settings: LearnerSettings,
        clock: PhaseClock,
        should_stop: Callable[[], bool],
    ) -> None:
        super().__init__(loop, settings, "learner")
        self._clock = clock
        self._should_stop = should_stop
        self._tokens = 0
        self._version: PolicyVersion | None = None
        self._last_step = settings.run.steps  # as the other ranks know it
        settings.run.make_socket_folder()
        self._publisher = loop.run(self._make_publisher(settings))
        loop.start(self._publisher.run(settings.run.endpoint("weightbus")))
        loop.start(self._reports())

    async def _make_publisher(self, settings: LearnerSettings) -> Publisher:
        return Publisher(settings.weightbus, on_record=self._report_publish)

    def take_over(self, step: int) -> PolicyVersion:
        """Become the run's learner; return the version of the weights held."""
        answer, _ = self._loop.run(self._client.ask(TakeOver(step=step), TookOver))
        self._version = answer.version
        return answer.version

    def next_batch(
        self, version: PolicyVersion, *, max_wait_s: float
    ) -> BatchDelivered | BatchNotReady | RunComplete:
        """Wait for the batch of the step that starts from ``version``, or until asked to stop."""
        since = time.monotonic()
        said = ""
        while True:
            self._loop.check()
            request = RequestBatch(version=version, wait_s=_POLL_S)
            answer, _ = self._loop.run(self._client.ask_any(request, extra_wait_s=_POLL_S))
            match answer:
                case BatchDelivered() | RunComplete():
                    return answer
                case BatchNotReady(reason=reason, last_step=last_step):
                    waited = time.monotonic() - since
                    is_news = last_step != self._last_step
                    self._last_step = last_step
                    if is_news or waited > max_wait_s or self._should_stop():
                        return answer
                    if waited > _SAY_WAITING_AFTER_S and reason != said:
                        _log.info("no batch for %.0f s: waiting for %s", waited, reason)
                        said = reason
                case _:
                    raise ProtocolError(f"RequestBatch was answered by {answer!r}")

    def commit(
        self, version: PolicyVersion, metrics: dict[str, float], num_tokens: int
    ) -> StepCommitted:
        """Tell the broker that the step is trained; returns when that is durable."""
        self._tokens += num_tokens
        request = StepCommit(version=version, metrics=metrics)
        answer, _ = self._loop.run(self._client.ask(request, StepCommitted))
        self._version = version
        self._last_step = answer.last_step
        return answer

    def ledger_snapshot(self, version: PolicyVersion) -> bytes:
        """Return the broker's ledger, for a checkpoint of ``version``."""
        request = GetLedgerSnapshot(version=version)
        answer, _ = self._loop.run(self._client.ask(request, LedgerSnapshotAnswer))
        return answer.data

    def publish(self, snapshot: WeightSnapshot) -> None:
        """Hand a version to the weight bus; returns at once."""
        snapshot.check_finite()
        self._loop.call(self._publisher.submit, snapshot)

    async def _report_publish(self, record: PublishRecord) -> None:
        for member, reason in record.failed.items():
            _log.warning("%s not adopted by %s: %s", record.version.label, member, reason)
        await self._client.ask(PublishReport(record=record), Done)

    async def _reports(self) -> None:
        while True:
            report = RoleReport(
                phase_seconds=self._clock.seconds(),
                counters={"tokens": float(self._tokens)},
                adopted=self._version,
            )
            await self._client.ask(report, Done)
            await asyncio.sleep(_REPORT_S)

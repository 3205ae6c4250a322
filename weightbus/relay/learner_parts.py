"""The head's side of the parts of a learner on several hosts: their reports, and its holds."""

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping
from typing import TypeVar

from slipstream.weightbus.version.engine_checksums import EngineLayout
from slipstream.weightbus.version.layout import names_by_part
from slipstream.weightbus.version.part_book import digest_of_keys
from slipstream.wire.errors import PublishError
from slipstream.wire.messages.manifest import WeightManifest
from slipstream.wire.messages.part_relays import (
    Hash,
    HashPart,
    HeadCommand,
    Hold,
    PartHashed,
    PartHeard,
    PartHeld,
    PartReport,
    PartState,
    Release,
)
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.messages.weightbus import BulkDoor

_log = logging.getLogger(__name__)
Send = Callable[[HeadCommand], None]
A = TypeVar("A", PartHeld, PartHashed)


class _Part:
    """One part at its last known connection."""

    def __init__(self, state: PartState, peer: bytes, send: Send) -> None:
        self.state = state
        self.peer = peer  # its connection
        self.send = send
        self.waiting: dict[int, tuple[Hold | Hash, asyncio.Future[PartHeld | PartHashed]]] = {}

    def moved(self, peer: bytes, send: Send) -> None:
        """Repeat requests whose answers may have been lost with the old connection."""
        self.peer, self.send = peer, send
        for command, _ in self.waiting.values():
            send(command)

    def gone(self, why: str) -> None:
        """Fail the requests that wait for this part."""
        for _, future in self.waiting.values():
            if not future.done():
                future.set_exception(PublishError(why))


class Parts:
    """The part relays that report to this head. Use it inside one event loop."""

    def __init__(self, *, relay: str, timeout_s: float, hash_timeout_s: float) -> None:
        """Start without parts; ``relay`` is the incarnation of this head.

        A part holds a version within ``timeout_s``, and hashes it within ``hash_timeout_s``.
        """
        self._hash_timeout_s = hash_timeout_s
        self.relay = relay
        self._timeout_s = timeout_s
        self._parts: dict[int, _Part] = {}
        self._numbers = itertools.count(1)
        self._held: set[PolicyVersion] = set()
        self._keys: Mapping[str, str] | None = None  # keys that may fetch
        self._keys_digest = ""
        self.expected = 0
        """Expected number of parts."""

    def take(
        self,
        part: int,
        report: PartReport,
        send: Send,
        *,
        peer: bytes,
        generator_keys: Mapping[str, str] | None,
        heard: Callable[[PartState], None],
    ) -> None:
        """Take the report of a part that has proved its key.

        ``peer`` is its connection. ``generator_keys`` may fetch from it; None if not known yet.
        ``heard`` is called with its state.
        """
        known = self._parts.get(part)
        if not isinstance(report, PartState):
            waiting = known.waiting.get(report.command_id) if known is not None else None
            if waiting is not None and not waiting[1].done():
                waiting[1].set_result(report)
            return
        if report.part != part:
            _log.warning("part %d reports as part %d: refused", part, report.part)
            return
        if known is not None and known.state.incarnation == report.incarnation:
            known.state = report
            if known.peer != peer:
                _log.info("part %d has connected again", part)
                known.moved(peer, send)
        else:
            if known is not None:
                known.gone(f"part {part} was restarted")
            _log.info("part %d of the learner is at %s", part, report.door.endpoint)
            known = self._parts[part] = _Part(report, peer, send)
        self._keep(generator_keys)
        self._tell(known, has_keys=report.keys_digest == self._keys_digest)
        for version in report.held:
            if version not in self._held:  # an earlier Release was lost
                known.send(Release(epoch=report.epoch, version=version))
        heard(report)

    def tell(self, generator_keys: Mapping[str, str] | None) -> None:
        """Tell the parts at once which keys may fetch, if these changed: an engine has joined."""
        if not self._keep(generator_keys):
            return
        for number, part in self._parts.items():
            try:
                self._tell(part, has_keys=False)
            except PublishError as error:
                _log.warning("part %d does not hear of new keys: %s", number, error)

    def _keep(self, generator_keys: Mapping[str, str] | None) -> bool:
        """Keep the keys that may fetch; True if they have changed."""
        if generator_keys is None or generator_keys == self._keys:
            return False
        self._keys = dict(generator_keys)
        self._keys_digest = digest_of_keys(self._keys)
        return True

    def _tell(self, part: _Part, *, has_keys: bool) -> None:
        """Answer a heartbeat, with the keys if the part has other ones."""
        keys = None if has_keys or self._keys is None else dict(self._keys)
        heard = PartHeard(relay=self.relay, keys_digest=self._keys_digest, generator_keys=keys)
        part.send(heard)

    def lost(self, part: int) -> None:
        """Forget a part that is silent."""
        if (known := self._parts.pop(part, None)) is not None:
            _log.warning("part %d of the learner is silent", part)
            known.gone(f"part {part} is silent")

    def doors(self) -> list[BulkDoor]:
        """Return the doors for the buckets of parts 1, 2, ...

        Raises:
            PublishError: a part is missing.
        """
        return [part.state.door for part in self._all()]

    def _all(self) -> list[_Part]:
        numbers = range(1, self.expected + 1)
        if missing := [number for number in numbers if number not in self._parts]:
            raise PublishError(f"parts {missing} of the learner are not there")
        return [self._parts[number] for number in numbers]

    async def hold(self, version: PolicyVersion, layout: WeightManifest) -> dict[str, str]:
        """Make every part keep a version; return the digests of their tensors.

        Raises:
            PublishError: a part does not have it, does not answer in time, or answers with digests
                of other tensors than its own in the ``layout``.
        """
        names, asked = names_by_part(layout), self._all()
        self._held.add(version)
        answers = await asyncio.gather(
            *(
                self._hold(number, part, version, names.get(number, frozenset()))
                for number, part in enumerate(asked, 1)
            ),
            return_exceptions=True,
        )
        digests: dict[str, str] = {}
        for answer in answers:
            if isinstance(answer, BaseException):
                self.release(version)
                raise answer
            digests |= answer
        return digests

    async def _hold(
        self, number: int, part: _Part, version: PolicyVersion, names: frozenset[str]
    ) -> dict[str, str]:
        hold = Hold(command_id=next(self._numbers), epoch=part.state.epoch, version=version)
        answer = await self._ask(number, part, hold, PartHeld)
        if strange := sorted(answer.digests.keys() ^ names):
            name = strange[0]
            what = "has no digest of its tensor" if name in names else "has a digest of"
            whose = "" if name in names else ", which is not one of its tensors"
            raise PublishError(f"part {number} of the learner {what} {name}{whose}")
        return answer.digests

    async def hashes(
        self, version: PolicyVersion, of: EngineLayout
    ) -> list[dict[str, tuple[HashPart, ...]]]:
        """Return each part's share in what engines on GPUs must hold of a held version.

        Raises:
            PublishError: a part does not have it, or does not answer in time.
        """

        async def hashed(number: int, part: _Part) -> dict[str, tuple[HashPart, ...]]:
            command = Hash(
                command_id=next(self._numbers),
                version=version,
                num_ranks=of.num_ranks,
                attention_groups=of.attention_groups,
                expert_groups=of.expert_groups,
            )
            return (await self._ask(number, part, command, PartHashed)).hashes

        return await asyncio.gather(*(hashed(*item) for item in enumerate(self._all(), 1)))

    async def _ask(self, number: int, part: _Part, command: Hold | Hash, answers: type[A]) -> A:
        limit_s = self._timeout_s if isinstance(command, Hold) else self._hash_timeout_s
        future: asyncio.Future[PartHeld | PartHashed] = asyncio.get_running_loop().create_future()
        part.waiting[command.command_id] = command, future
        try:
            part.send(command)
            async with asyncio.timeout(limit_s):
                answer = await future
        except TimeoutError as error:
            setting = "timeout_s" if isinstance(command, Hold) else "receive_timeout_s"
            raise PublishError(
                f"part {number} of the learner did not answer {type(command).__name__} in "
                f"{limit_s:g} s (weightbus.{setting})"
            ) from error
        finally:
            del part.waiting[command.command_id]
        if answer.error:
            raise PublishError(f"part {number} of the learner: {answer.error}")
        if not isinstance(answer, answers):
            raise PublishError(f"part {number} of the learner sent {type(answer).__name__}")
        return answer

    def release(self, version: PolicyVersion) -> None:
        """Let the parts drop a version."""
        self._held.discard(version)
        for number, part in list(self._parts.items()):
            try:
                part.send(Release(epoch=part.state.epoch, version=version))
            except PublishError as error:
                _log.warning("part %d does not hear of the end of a publish: %s", number, error)

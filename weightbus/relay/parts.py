"""The head's side of the parts of a learner on several hosts: their reports, and holds there."""

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping

from slipstream.wire.errors import PublishError
from slipstream.wire.messages.parts import (
    HeadCommand,
    Hold,
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


class _Part:
    """One part, where it was heard of last."""

    def __init__(self, state: PartState, send: Send) -> None:
        self.state = state
        self.send = send
        self.told: Mapping[str, str] | None = None  # who may fetch
        self.waiting: dict[int, asyncio.Future[PartHeld]] = {}

    def gone(self, why: str) -> None:
        """Fail what waits for it."""
        for future in self.waiting.values():
            if not future.done():
                future.set_exception(PublishError(why))


class Parts:
    """The part relays that report to this head. Use it inside one event loop."""

    def __init__(self, *, relay: str, timeout_s: float) -> None:
        """Start without parts.

        Args:
            relay: incarnation of this head.
            timeout_s: in which a part answers.
        """
        self.relay = relay
        self._timeout_s = timeout_s
        self._parts: dict[int, _Part] = {}
        self._numbers = itertools.count(1)
        self.expected = 0
        """How many there are to be."""

    def take(
        self,
        part: int,
        report: PartReport,
        send: Send,
        *,
        generator_keys: Mapping[str, str] | None,
        heard: Callable[[PartState], None],
    ) -> None:
        """Take the report of a part that has proved its key.

        Args:
            part: number of the part that the key is of.
            report: that it sent.
            send: sends it a command.
            generator_keys: who may fetch from it; None: not known yet.
            heard: is told of its state.
        """
        known = self._parts.get(part)
        if isinstance(report, PartHeld):
            future = known.waiting.get(report.command_id) if known is not None else None
            if future is not None and not future.done():
                future.set_result(report)
            return
        if report.part != part:
            _log.warning("part %d reports as part %d: refused", part, report.part)
            return
        if known is not None and known.state.incarnation == report.incarnation:
            known.state, known.send = report, send
        else:
            if known is not None:
                known.gone(f"part {part} was restarted")
            _log.info("part %d of the learner is at %s", part, report.door.endpoint)
            known = self._parts[part] = _Part(report, send)
        self._tell(known, generator_keys)
        heard(report)

    def tell(self, generator_keys: Mapping[str, str] | None) -> None:
        """Tell the parts at once who may fetch, where that has changed: an engine has joined."""
        for number, part in self._parts.items():
            if part.told is not generator_keys:
                try:
                    self._tell(part, generator_keys)
                except PublishError as error:
                    _log.warning("part %d does not hear of new keys: %s", number, error)

    def _tell(self, part: _Part, generator_keys: Mapping[str, str] | None) -> None:
        keys = None if generator_keys is None else dict(generator_keys)
        part.send(PartHeard(relay=self.relay, generator_keys=keys))
        part.told = generator_keys

    def lost(self, part: int) -> None:
        """Forget a part that is silent."""
        if (known := self._parts.pop(part, None)) is not None:
            _log.warning("part %d of the learner is silent", part)
            known.gone(f"part {part} is silent")

    def doors(self) -> list[BulkDoor]:
        """Return where the buckets of parts 1, 2, ... are fetched.

        Raises:
            PublishError: a part is not there.
        """
        return [part.state.door for part in self._all()]

    def _all(self) -> list[_Part]:
        numbers = range(1, self.expected + 1)
        if missing := [number for number in numbers if number not in self._parts]:
            raise PublishError(f"parts {missing} of the learner are not there")
        return [self._parts[number] for number in numbers]

    async def hold(self, version: PolicyVersion) -> dict[str, str]:
        """Have every part keep a version; return the digests of their tensors.

        Raises:
            PublishError: a part does not have it, or does not answer in time.
        """
        answers = await asyncio.gather(
            *(self._hold(number, part, version) for number, part in enumerate(self._all(), 1)),
            return_exceptions=True,
        )
        digests: dict[str, str] = {}
        for answer in answers:
            if isinstance(answer, BaseException):
                self.release(version)
                raise answer
            digests |= answer
        return digests

    async def _hold(self, number: int, part: _Part, version: PolicyVersion) -> dict[str, str]:
        command_id = next(self._numbers)
        future: asyncio.Future[PartHeld] = asyncio.get_running_loop().create_future()
        part.waiting[command_id] = future
        try:
            part.send(Hold(command_id=command_id, epoch=part.state.epoch, version=version))
            async with asyncio.timeout(self._timeout_s):
                answer = await future
        except TimeoutError as error:
            raise PublishError(
                f"part {number} of the learner did not answer Hold in {self._timeout_s:g} s "
                "(weightbus.timeout_s)"
            ) from error
        finally:
            del part.waiting[command_id]
        if answer.error:
            raise PublishError(f"part {number} of the learner: {answer.error}")
        return answer.digests

    def release(self, version: PolicyVersion) -> None:
        """Have the parts keep a version no longer."""
        for number, part in list(self._parts.items()):
            try:
                part.send(Release(epoch=part.state.epoch, version=version))
            except PublishError as error:
                _log.warning("part %d does not hear of the end of a publish: %s", number, error)

"""Interface of a transport within a transaction, and its members' failures."""

import asyncio
import importlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, TypeVar

from slipstream.weightbus.config import WeightBusSection
from slipstream.weightbus.net.compatibility import Libraries
from slipstream.weightbus.relay.member import Member
from slipstream.weightbus.relay.publication import Publication
from slipstream.weightbus.transports import TransportEntry
from slipstream.wire.errors import PublishError
from slipstream.wire.messages.weightbus import Join

T = TypeVar("T")


class MembersFailedError(PublishError):
    """The version did not reach some members, or all; ``reasons`` by member."""

    def __init__(self, reasons: Mapping[Member, str]) -> None:
        super().__init__("; ".join(f"{m.name}: {reason}" for m, reason in reasons.items()))
        self.reasons = dict(reasons)


class RelayState:
    """State of a transport in a relay, beyond transactions. Made once per relay; mostly empty."""

    async def run(self) -> None:
        """Do work outside of transactions; cancelled when the relay ends."""

    async def keep(self, wanted: Collection[Publication]) -> None:
        """Drop everything of other versions: no engine can need it."""

    async def close(self) -> None:
        """Drop everything: the relay ends."""


class Transport(ABC):
    """A way for the bytes of a version to reach engines.

    A transport that shares a group serves the same members again and again. Any other transport is
    made for one transaction with one member.
    """

    name: ClassVar[str]  # its key in TRANSPORTS
    needs_digests: ClassVar[bool] = True  # before the first byte; else computed while bytes move
    shares_group: ClassVar[bool] = False  # several engines receive the same bytes at once
    writes_live: ClassVar[bool] = False  # into paused engines; else agents receive, then adopt
    prepare_phase: ClassVar[str] = "receive"  # name in the record, one of PUBLISH_PHASES
    load_phase: ClassVar[str] = "load"

    def __init__(self, settings: WeightBusSection, state: RelayState) -> None:
        """Serve with the ``state`` that ``relay_state`` returned to this relay."""
        self.fetched_bytes: dict[str, int] = {}  # bytes by member, if agents fetch
        self._settings = settings
        self.load_timeout_s = settings.receive_timeout_s
        self.within_prepare: dict[str, float] = {}  # seconds by phase, of the slowest member
        del state  # subclasses may use it

    @classmethod
    def relay_state(cls, settings: WeightBusSection, folder: Path) -> RelayState:  # noqa: ARG003
        """Return this transport's state in a relay; its files go to ``folder``."""
        return RelayState()

    @classmethod
    def why_not(cls, join: Join, ours: Libraries) -> str:  # noqa: ARG003 for subclasses
        """Return why an engine cannot get versions this way; empty if it can."""
        return ""

    @abstractmethod
    async def prepare(self, publication: Publication, members: Sequence[Member]) -> None:
        """Do all work possible while the engines generate; again if a member was left out since.

        Raises:
            MembersFailedError: it failed for some of them.
        """

    async def load(self, publication: Publication, members: Sequence[Member]) -> None:
        """Bring the version into the paused engines; only for a transport that ``writes_live``.

        Raises:
            MembersFailedError: it failed for some; then no engine of ``members`` counts as whole.
        """
        raise NotImplementedError

    async def close(self) -> None:  # noqa: B027 most have nothing open
        """Release open resources, which also frees engines that wait for the relay."""

    def close_soon(self) -> None:  # noqa: B027
        """Release open resources in the background."""


def transport_class(entry: TransportEntry) -> type[Transport]:
    """Import the class of a transport."""
    module, _, name = entry.path.partition(":")
    found = getattr(importlib.import_module(module), name)
    if not (isinstance(found, type) and issubclass(found, Transport)):
        raise TypeError(f"{entry.path} is no transport")
    return found


def slowest(seconds: dict[str, float], of_member: Mapping[str, float]) -> None:
    """Add the phases of another member; the slowest member counts in each."""
    for phase, its_s in of_member.items():
        seconds[phase] = max(its_s, seconds.get(phase, 0.0))


async def each(
    members: Sequence[Member], work: Callable[[Member], Awaitable[T]]
) -> tuple[dict[Member, T], dict[Member, str]]:
    """Do ``work`` with all members at once; return results and errors by member."""
    if len(members) == 1:  # without a task
        try:
            return {members[0]: await work(members[0])}, {}
        except PublishError as error:
            return {}, {members[0]: str(error)}
    answers = await asyncio.gather(*(work(member) for member in members), return_exceptions=True)
    done: dict[Member, T] = {}
    failed: dict[Member, str] = {}
    for member, answer in zip(members, answers, strict=True):
        if isinstance(answer, PublishError):
            failed[member] = str(answer)
        elif isinstance(answer, BaseException):
            raise answer
        else:
            done[member] = answer
    return done, failed


async def all_of(
    members: Sequence[Member], work: Callable[[Member], Awaitable[T]]
) -> dict[Member, T]:
    """Do ``work`` with all members at once; return the results by member.

    Raises:
        MembersFailedError: it failed for some of them.
    """
    done, failed = await each(members, work)
    if failed:
        raise MembersFailedError(failed)
    return done

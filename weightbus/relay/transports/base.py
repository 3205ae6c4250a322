"""What a transport does within a transaction, and how members fail in it."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from slipstream.weightbus.relay.member import Member
from slipstream.weightbus.relay.publication import Publication
from slipstream.wire.errors import PublishError
from slipstream.wire.messages.weightbus import TransportName

T = TypeVar("T")


class MembersFailedError(PublishError):
    """Some members, or all, cannot get the version this time: why, by member."""

    def __init__(self, reasons: Mapping[Member, str]) -> None:
        super().__init__("; ".join(f"{m.name}: {why}" for m, why in reasons.items()))
        self.reasons = dict(reasons)


class Transport(Protocol):
    """One way in which the bytes of a version reach engines. Both methods raise MembersFailedError.

    If ``load`` fails for any member, none of the members given to it may be taken to be whole.
    """

    name: TransportName
    needs_digests: bool  # before the first byte; else they are computed while bytes move

    async def prepare(self, publication: Publication, members: Sequence[Member]) -> None:
        """Do what can be done while the engines generate; again if a member was left out since."""

    async def load(self, publication: Publication, members: Sequence[Member]) -> None:
        """Bring the version into the paused engines."""

    async def close(self) -> None:
        """Let go of what is open, which also frees engines that wait for us."""


async def each(
    members: Sequence[Member], work: Callable[[Member], Awaitable[T]]
) -> tuple[dict[Member, T], dict[Member, str]]:
    """Do the same with all members at once; return results, and why there is none, by member."""
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
    """Do the same with all members at once; return the results.

    Raises:
        MembersFailedError: it went wrong with some of them.
    """
    done, failed = await each(members, work)
    if failed:
        raise MembersFailedError(failed)
    return done

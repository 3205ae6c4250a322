"""Pure: the course of one publish to some members, whatever fails on the way."""

from collections.abc import Hashable, Mapping, Sequence
from enum import Enum, auto
from typing import Generic, TypeVar

M = TypeVar("M", bound=Hashable)


class Phase(Enum):
    """What all members that are still with us do together."""

    OFFER = auto()
    PREPARE = auto()  # while the engines generate
    PAUSE = auto()
    PREPARE_AGAIN = auto()  # for those that are left: a group is made anew
    LOAD = auto()  # from here on whoever fails may hold a mixture
    VERIFY = auto()
    COMMIT = auto()


_PHASES = tuple(Phase)
_REPEATED = {Phase.PREPARE, Phase.PREPARE_AGAIN}  # as often as somebody is lost in it
OTHER_FAILED = "another engine of its group failed"


class Course(Generic[M]):
    """Who is still with a publish, and what they do next.

    Whoever fails in a phase is in none that follows. Bytes move to all or to nobody for certain: if
    one fails while they move, nobody is taken to be whole.
    """

    def __init__(self, members: Sequence[M]) -> None:
        self.members = list(members)  # that are still with us
        self.failed: dict[M, str] = {}
        self._number = 0

    @property
    def phase(self) -> Phase | None:
        """Return what ``members`` do next; None once they have adopted the version."""
        return _PHASES[self._number] if self._number < len(_PHASES) else None

    def done(self, failed: Mapping[M, str]) -> None:
        """Go on after a phase.

        Args:
            failed: who could not do it, and why.
        """
        phase, reasons = self.phase, dict(failed)
        if phase is Phase.LOAD and failed:
            reasons = dict.fromkeys(self.members, OTHER_FAILED) | reasons
        self.failed |= reasons
        self.members = [member for member in self.members if member not in reasons]
        if not (phase in _REPEATED and reasons and self.members):
            self._number += 1


def is_check_due(every: int, num_publishes: int, *, is_repair: bool) -> bool:
    """Tell whether the engine's checksums are looked at before a member commits.

    Args:
        every: weightbus.engine_check_every.
        num_publishes: to this member, with this one.
        is_repair: its last publish failed; that is always looked at.
    """
    return is_repair or (every > 0 and (num_publishes - 1) % every == 0)

"""Pure: the course of one publish to some members, and of failures in it."""

from collections.abc import Hashable, Mapping, Sequence
from enum import Enum, auto
from typing import Generic, TypeVar

M = TypeVar("M", bound=Hashable)


class Phase(Enum):
    """Phase of a publish; all remaining members do it together."""

    OFFER = auto()
    PREPARE = auto()  # while the engines generate
    ADOPT = auto()  # agent alone: its engine runs the new version, the previous one, or nothing
    PAUSE = auto()
    PREPARE_AGAIN = auto()  # opens a group again for the remaining members
    LOAD = auto()  # a member that fails from here on may hold a mixture
    VERIFY = auto()
    COMMIT = auto()


STAGED = (Phase.PREPARE, Phase.ADOPT)  # agents have the bytes before an engine is paused
LIVE = (  # bytes go into paused engines
    *(Phase.OFFER, Phase.PREPARE, Phase.PAUSE, Phase.PREPARE_AGAIN),
    *(Phase.LOAD, Phase.VERIFY, Phase.COMMIT),
)
_REPEATED = {Phase.PREPARE, Phase.PREPARE_AGAIN}  # done again whenever a member is lost in it
OTHER_FAILED = "another engine of its group failed"


class PublishState(Generic[M]):
    """The remaining members of a publish and their next phase.

    A member that fails in a phase takes part in none that follows. If one fails while bytes move,
    no member is taken to be whole.
    """

    def __init__(self, members: Sequence[M], phases: Sequence[Phase]) -> None:
        self.members = list(members)  # remaining members
        self._phases = phases
        self.failed: dict[M, str] = {}
        self._number = 0

    @property
    def phase(self) -> Phase | None:
        """The phase that ``members`` do next; None once they have adopted the version."""
        return self._phases[self._number] if self._number < len(self._phases) else None

    def done(self, failed: Mapping[M, str]) -> None:
        """Move on after a phase; ``failed`` has the members that could not do it, and why."""
        phase, reasons = self.phase, dict(failed)
        if phase is Phase.LOAD and failed:
            reasons = dict.fromkeys(self.members, OTHER_FAILED) | reasons
        self.failed |= reasons
        self.members = [member for member in self.members if member not in reasons]
        if not (phase in _REPEATED and reasons and self.members):
            self._number += 1


def is_check_due(every: int, num_publishes: int, *, is_repair: bool) -> bool:
    """True if the engine's checksums are compared before a member commits.

    A member whose last publish failed is always checked. ``num_publishes`` includes this one.
    """
    return is_repair or (every > 0 and (num_publishes - 1) % every == 0)

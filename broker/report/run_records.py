"""Records of a run apart from the ledger."""

from collections.abc import Mapping, Sequence

from slipstream.broker.ledger.groups import Group
from slipstream.broker.store.base import StoredTrajectory
from slipstream.wire.messages.broker import DeadLetters
from slipstream.wire.messages.ledger_view import LedgerView
from slipstream.wire.messages.status import EvalPoint, RunStatus, StepPoint

Frames = Sequence[StoredTrajectory]


class RunRecords:
    """Receives the events of a run. This one keeps nothing."""

    @property
    def wants_batches(self) -> bool:
        """True if batches are recorded."""
        return False

    def packages(self, versions: Mapping[str, str]) -> None:
        """A role came up; these are all packages known so far."""

    def step(self, point: StepPoint, status: RunStatus, account: LedgerView) -> None:
        """A learner step was committed."""

    def evaluations(self, points: Sequence[EvalPoint]) -> None:
        """These are all evaluation rounds so far."""

    def eval_answers(self, group: Group, frames: Mapping[int, StoredTrajectory]) -> None:
        """All answers to one held-out problem have their rewards; frames by sibling."""

    async def batch(self, step: int, groups: Sequence[tuple[Group, Frames]]) -> None:
        """A learner step trained these groups."""

    def went_back(self, step: int) -> None:
        """A learner went back to this step: later steps are discarded."""

    def dead_letters(self, letters: DeadLetters) -> None:
        """These are all dead letters by now."""

    def close(self, status: RunStatus, account: LedgerView) -> None:
        """The broker ends."""

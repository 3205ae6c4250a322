"""Decisions that several commands share: how a group, an evaluation and the run end."""

from slipstream.broker.ledger.book import Book
from slipstream.broker.ledger.effects import apply
from slipstream.broker.ledger.events import (
    Dropped,
    DropReason,
    EvalRoundClosed,
    EvalRoundOpened,
    LedgerEvent,
    StopPlanned,
    Unbound,
)
from slipstream.broker.ledger.groups import NOBODY, Group
from slipstream.wire.messages.trajectory import TrajectoryKey


class GroupDecisions:
    """Records decisions as events, in the book and for the store."""

    def __init__(self, book: Book) -> None:
        self.book = book
        self._events: list[LedgerEvent] = []

    def record(self, event: LedgerEvent) -> None:
        """Change the book by an event, and keep it for the store."""
        apply(self.book, event)
        self._events.append(event)

    def drain(self) -> tuple[list[LedgerEvent], list[TrajectoryKey]]:
        """Return the events not stored yet, and the payloads that are no longer needed."""
        events, self._events = self._events, []
        released, self.book.released = self.book.released, []
        return events, released

    def drop(self, group: Group, reason: DropReason) -> None:
        """Drop a group; it may be the last one that an evaluation waits for."""
        self.record(Dropped(group_id=group.group_id, reason=reason))
        if group.item == "eval":
            self.close_eval_if_complete(group.eval_step)

    def drop_unbound(self, reason: DropReason) -> None:
        """Drop the training groups that are in no batch."""
        for group in list(self.book.groups.values()):
            if group.item == "train" and group.bound_to == NOBODY:
                self.drop(group, reason)

    def open_eval_if_due(self) -> None:
        """Open the evaluation that belongs to the learner's step."""
        book, plan = self.book, self.book.rules.eval_plan
        known = {*book.state.eval_rounds, *(point.step for point in book.state.eval_points)}
        if plan.is_due(book.step, last_step=book.state.last_step) and book.step not in known:
            self.record(EvalRoundOpened(step=book.step, num_problems=plan.num_problems))

    def close_eval_if_complete(self, step: int) -> None:
        """Close an evaluation that is answered, which may end the run."""
        eval_round, plan = self.book.state.eval_rounds[step], self.book.rules.eval_plan
        if eval_round.complete:
            self.record(EvalRoundClosed(step=step, point=plan.point(eval_round)))
            if reason := plan.verdict(self.book.state.eval_points):
                self.plan_stop(reason)

    def plan_stop(self, reason: str) -> bool:
        """End the run in order: a batch in the learner's hands is the last one.

        Returns False if nothing is left to end: the last step is trained or planned already.
        """
        if self.book.step >= self.book.state.last_step or self.book.state.stop_reason:
            return False
        self.stop_here(reason, "run_ended")
        return True

    def stop_here(self, reason: str, drop_as: DropReason) -> None:
        """Make the last step that has its batch the last of the run."""
        self.record(StopPlanned(last_step=self.book.free_step, reason=reason))
        for step in sorted(s for s in self.book.state.batches if s > self.book.free_step):
            self.record(Unbound(step=step))  # there is a gap before it
        self.drop_unbound(drop_as)
        if self.book.step == self.book.state.last_step:
            self.open_eval_if_due()

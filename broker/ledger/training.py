"""Decides the learner's requests about items: epochs, batches, commits, checkpoints."""

import logging
from collections.abc import Callable, Collection
from typing import TypeAlias

from slipstream.broker.ledger.admission import NotYet, choose_batch
from slipstream.broker.ledger.decisions import GroupDecisions
from slipstream.broker.ledger.events import (
    BatchesHeld,
    Delivered,
    DropReason,
    Evicted,
    HistoryCut,
    LearnerLeft,
    Requeued,
    Sealed,
    TakenOver,
    Trained,
    Unbound,
)
from slipstream.broker.ledger.groups import NOBODY, Group
from slipstream.broker.ledger.state import BookState, for_checkpoint
from slipstream.wire.errors import RefusedError
from slipstream.wire.messages.trajectory import Prompt
from slipstream.wire.messages.versions import PolicyVersion

_log = logging.getLogger(__name__)
Delivery: TypeAlias = list[Group] | NotYet | None  # None: the run is complete


class Training:
    """The learner's commands. All methods are immediate."""

    def __init__(self, decisions: GroupDecisions, prompt_at: Callable[[int], Prompt]) -> None:
        self._decisions = decisions
        self._book = decisions.book
        self._prompt_at = prompt_at

    # ---- epochs --------------------------------------------------------------

    def take_over(
        self,
        step: int,
        checkpoint: str = "",
        learner: str = "",
        held: PolicyVersion | None = None,
        *,
        remember: Callable[[int], None] = lambda _: None,
    ) -> PolicyVersion:
        """Grant a new epoch to a learner that holds the weights after ``step`` steps.

        A learner takes over once in its life: a repeated request returns its epoch.

        Args:
            step: Learner steps completed in its weights.
            checkpoint: Its checkpoint, for the record.
            learner: Its incarnation.
            held: Version of that checkpoint; None for the weights that the run started with.
            remember: Takes the epoch before anything changes.

        Raises:
            RefusedError: this run cannot resume from that step, or had other weights
                at it.
            Exception: what ``remember`` raised; nothing is granted then.
        """
        book, state = self._book, self._book.state
        if learner and learner == state.learner:
            epoch = book.version.epoch
            return PolicyVersion(epoch, state.forks[epoch])
        if not book.can_go_back_to(step):
            known = min(state.history, default=book.step)
            raise RefusedError(
                f"the learner holds step {step}, this run is at step {book.step} and knows "
                f"its batches from step {known} on; resume from a checkpoint of one of these steps "
                "(slipstream run --resume CHECKPOINT) or start a new run (run.name)"
            )
        if held is not None and not book.is_ancestor(held):
            raise RefusedError(
                f"the learner holds {held.label}, which {book.version.label} does not descend "
                "from: that checkpoint is of steps that were given up; resume from another one "
                "(slipstream run --resume CHECKPOINT)"
            )
        version = PolicyVersion(max(book.version.epoch, state.granted_epoch) + 1, step)
        remember(version.epoch)
        given = book.step in state.in_hand and book.step in state.batches
        cut_off = book.step if given else -1
        self._decisions.record(
            TakenOver(version=version, checkpoint=checkpoint, learner=learner, cut_off=cut_off)
        )
        self._holds()
        if book.controller is not None:
            book.controller.went_back(step)
        self._answer_again()
        self._set_aside()
        self._decisions.open_eval_if_due()
        return version

    def _set_aside(self) -> None:
        """Drop the batches that too many learners have not finished."""
        state, most = self._book.state, self._book.rules.max_batch_attempts
        for step in [step for step in state.batches if state.cut_off[step] >= most]:
            _log.warning(
                "%d learners ended while they trained step %d: its groups become dead letters "
                "(broker.max_batch_attempts = %d)",
                state.cut_off[step],
                step,
                most,
            )
            for group in self._unbind(step):
                self._decisions.drop(group, "unfinished")

    def _answer_again(self) -> None:
        """After a take-over, requeue prompts whose answers are gone, and drop the rest."""
        book, state = self._book, self._book.state
        for group_id, position in list(state.lost):
            self._decisions.record(
                Requeued(
                    group_id=state.next_group_id,
                    of=group_id,
                    position=position,
                    prompt=self._prompt_at(position),
                    size=book.rules.group_size,
                )
            )
        for step in sorted(s for s in state.batches if s >= state.last_step):
            for group in self._unbind(step):  # the run was made shorter
                self._decisions.drop(group, "run_ended")
        for group in list(book.groups.values()):
            orphaned = group.bound_to == NOBODY and not book.descends(group)
            if orphaned and group.item == "train":
                self._decisions.drop(group, "orphaned")

    def leave(self, *, is_stopped: bool = False) -> None:
        """Record that a learner has ended; one that was not stopped, only of a complete run."""
        self._holds()
        if not is_stopped and self._book.finished and not self._book.state.learner_left:
            self._decisions.record(LearnerLeft())

    # ---- batches -------------------------------------------------------------

    def deliver(self, version: PolicyVersion, step: int | None = None) -> Delivery:
        """Return the batch of a learner step, or the reason it waits, or None at the end.

        A repeated request for a step gets the same batch.

        The learner asks for its next step (None), or the one after it, with its own version.
        """
        book, state = self._book, self._book.state
        if version.next() == book.version and step == book.step:
            version = book.version  # requested ahead of a commit that came meanwhile
        self._require_current(version)
        step = version.step if step is None else step
        if not version.step <= step <= version.step + 1:
            raise RefusedError(f"batch of step {step} asked for by a learner at {version.label}")
        if book.finished:
            return None
        if step in state.batches:
            self._holds(*state.in_hand, step)
            return [book.groups[group_id] for group_id in state.batches[step]]
        if step >= state.last_step or step != book.free_step:
            return NotYet(book.rules.bound.groups_per_step)
        choice = choose_batch(
            book.rules.bound,
            learner_step=step,
            ready=book.index.ready,
            due=book.index.due,
            booked=state.batches,
            is_last=step == state.last_step - 1,
        )
        if not isinstance(choice, NotYet):
            return self._bind_batch(step, choice)
        counts = book.in_flight()
        if not book.out_of_prompts or any(counts[s] for s in ("issued", "leased", "generated")):
            return choice
        return self._deliver_the_rest(version, step)

    def _bind_batch(self, step: int, take: dict[int, int]) -> list[Group]:
        book, bound = self._book, self._book.rules.bound
        group_ids = book.index.nearest(take)
        self._decisions.record(Delivered(step=step, group_ids=group_ids))
        self._holds(*book.state.in_hand, step)
        batch = [book.groups[group_id] for group_id in group_ids]
        if book.free_step >= book.state.last_step:  # the run needs no more than that
            self._decisions.drop_unbound("run_ended")
        elif not bound.reserves and book.index.any_due_before(book.free_step):  # "drop" mode
            for group in list(book.groups.values()):
                if group.is_live and group.deadline(bound) < book.free_step:
                    self._decisions.drop(group, "stale")
        return batch

    def _deliver_the_rest(self, version: PolicyVersion, step: int) -> Delivery:
        """Make the last batch of the ready groups, if they are enough, and plan the end."""
        book, state = self._book, self._book.state
        if later := sorted(s for s in state.batches if s > step):
            for later_step in later:  # the run ends with the batch of this step
                for group in self._unbind(later_step):
                    self._put_back(group, later_step)
            return self.deliver(version, step)
        enough = book.in_flight()["ready"] >= book.rules.min_groups
        batch = self._bind_batch(step, dict(book.index.ready)) if enough else None
        used = f"run.epochs: all {state.cursor} prompts were used"
        self._decisions.stop_here(state.stop_reason or used, "end_of_data")
        return batch if batch is not None else self.deliver(version, step)

    def reject_batch(
        self, version: PolicyVersion, step: int, reason: DropReason, group_ids: Collection[int]
    ) -> None:
        """Drop groups of a batch that must not be trained; the others wait again."""
        self._require_current(version)
        if not set(group_ids) & set(self._book.state.batches.get(step, ())):
            return  # repeated request
        for group in self._unbind(step):
            if group.group_id in group_ids:
                self._decisions.drop(group, reason)
            else:
                self._put_back(group, step)

    def _unbind(self, step: int) -> list[Group]:
        """Take a batch apart; return its groups."""
        groups = [self._book.groups[group_id] for group_id in self._book.state.batches[step]]
        self._decisions.record(Unbound(step=step))
        return groups

    def _put_back(self, group: Group, step: int) -> None:
        """Have a group of a batch that was taken apart wait again, if it may still be trained."""
        if not self._book.descends(group):
            self._decisions.drop(group, "orphaned")
        elif group.deadline(self._book.rules.bound) < step:
            self._decisions.drop(group, "stale")  # delivered again under a smaller bound

    def waiting_for(self, not_yet: NotYet) -> tuple[int, ...]:
        """Name the groups that have to get ready (or end) before a batch can be delivered."""
        book, bound = self._book, self._book.rules.bound
        return tuple(
            group.group_id
            for group in book.groups.values()
            if (group.item == "eval" and book.step >= book.state.last_step)
            or (
                group.is_live
                and group.state != "ready"
                and (not_yet.overdue is None or group.deadline(bound) <= not_yet.overdue)
            )
        )

    # ---- commits and checkpoints ---------------------------------------------

    def commit(self, version: PolicyVersion, metrics: dict[str, float]) -> None:
        """Record that the learner trained the step that leads to ``version``."""
        book, state, rules = self._book, self._book.state, self._book.rules
        if version == book.version:
            return  # repeated request
        self._require_current(PolicyVersion(version.epoch, version.step - 1))
        if book.step not in state.batches:
            raise RefusedError(f"commit of step {book.step}, which was never delivered")
        self._decisions.record(Trained(version=version, metrics=metrics))
        if book.controller is not None:
            staleness = state.history[book.step - 1].staleness
            book.controller.observe(book.step, staleness, metrics)
        while state.replay_bytes > rules.replay_budget_bytes:  # the oldest go first
            self._decisions.record(Evicted(step=min(state.replay)))
        if not state.sealed_step and len(state.history) > rules.max_history:
            self._decisions.record(HistoryCut(step=book.step - rules.max_history))
        if book.step == state.last_step:
            self._decisions.drop_unbound("run_ended")  # only a resumed run has any
        self._decisions.open_eval_if_due()

    def seal(self, version: PolicyVersion, step: int, oldest_kept: int) -> None:
        """Record that a durable checkpoint holds every step before ``step``."""
        self._require_current(version)
        if step > self._book.step or oldest_kept > step:
            raise RefusedError(
                f"checkpoints of steps {oldest_kept} to {step} cannot be sealed at "
                f"{self._book.version.label}"
            )
        forgettable = any(s < min(step, oldest_kept) for s in self._book.state.history)
        if step > self._book.state.sealed_step or forgettable:
            self._decisions.record(Sealed(step=step, oldest_kept=oldest_kept))

    def snapshot(self, version: PolicyVersion) -> BookState:
        """Return the ledger's part of a checkpoint of the learner's current version."""
        self._require_current(version)
        return for_checkpoint(self._book.state)

    def _holds(self, *steps: int) -> None:
        """Record which batches the learner holds; the next broker of the run reads it too."""
        held = tuple(dict.fromkeys(steps))
        if held != self._book.state.in_hand:
            self._decisions.record(BatchesHeld(steps=held))

    def _require_current(self, version: PolicyVersion) -> None:
        if version != self._book.version:
            raise RefusedError(
                f"the learner is at {version.label}, the run at {self._book.version.label}"
            )

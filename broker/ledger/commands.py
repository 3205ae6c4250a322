"""What clients ask of the items, decided: each command checks, then records events.

A pure state machine: an event is the only thing that changes the state (broker/ledger/book.py), so
that replaying the stored events rebuilds it. Time comes in as ``now_s``. Deadlines of leases are
not stored: after a restart every lease gets one full term again.

At every moment, for groups: issued = trained + dropped + in flight. The same holds for
trajectories, counting a group as its ``group_size`` siblings.

    issued -> leased -> generated -> ready -> delivered -> trained -> sealed
       ^         |          |          |          |           |
       +- lapse -+          +----------+----------+-> dropped(reason)
       +------------------------- take-over, payload gone ----+
"""

from collections.abc import Callable, Collection, Iterable
from itertools import islice
from typing import TypeAlias

from slipstream.broker.ledger.admission import NotYet, choose_batch
from slipstream.broker.ledger.book import Book
from slipstream.broker.ledger.evaluation import EvalRound
from slipstream.broker.ledger.events import (
    Delivered,
    Dropped,
    DropReason,
    EvalRoundClosed,
    EvalRoundOpened,
    Evicted,
    Generated,
    HistoryCut,
    Issued,
    LearnerLeft,
    Leased,
    LeaseEnd,
    LeaseEnded,
    LedgerEvent,
    LetterDropped,
    Requeued,
    Retried,
    Scored,
    ScoringFailed,
    Sealed,
    StopPlanned,
    TakenOver,
    Trained,
    Unbound,
)
from slipstream.broker.ledger.groups import NOBODY, Group, Lease
from slipstream.broker.ledger.leases import LeaseTerms
from slipstream.broker.ledger.scores import clamped
from slipstream.broker.ledger.state import BookState, LedgerRules, for_checkpoint
from slipstream.wire.errors import RefusedError
from slipstream.wire.messages.broker import LeasedGroup
from slipstream.wire.messages.trajectory import Prompt, Score, TrajectoryHeader, TrajectoryKey
from slipstream.wire.messages.versions import PolicyVersion

Delivery: TypeAlias = list[Group] | NotYet | None  # None: the run is complete
_LAPSED_TO_LOOK_AT = 64  # a generator whose lanes fit none of them gets other work


class Ledger:
    """Accounts for every item. All methods are immediate."""

    def __init__(
        self,
        rules: LedgerRules,
        *,
        prompt_at: Callable[[int], Prompt],
        eval_prompt_at: Callable[[int], Prompt],
        state: BookState | None = None,
    ) -> None:
        self.book = Book(rules, state)
        self._prompt_at = prompt_at
        self._eval_prompt_at = eval_prompt_at
        self._events: list[LedgerEvent] = []
        self._terms = LeaseTerms(rules.lease_s, rules.max_lease_s)

    def _record(self, event: LedgerEvent) -> None:
        self.book.apply(event)
        self._events.append(event)

    def drain(self) -> tuple[list[LedgerEvent], list[TrajectoryKey]]:
        """Return the events not stored yet, and the payloads that are no longer needed."""
        events, self._events = self._events, []
        released, self.book.released = self.book.released, []
        return events, released

    def restarted(self, now_s: float) -> None:
        """Start after a replay: nothing is to be stored, every lease has a full term."""
        self.drain()
        self.renew_leases(now_s)

    def renew_leases(self, now_s: float) -> None:
        """Give every lease a full term: no heartbeat could have arrived."""
        self._terms.begin_all(self.book.leases, now_s)

    def postpone(self, for_s: float) -> None:
        """Extend every term by the seconds in which no heartbeat could arrive."""
        self._terms.postpone(for_s)

    # ---- generation ----------------------------------------------------------

    def permits(self, adopted: PolicyVersion) -> int:
        """Return how many more groups a generator that runs ``adopted`` may start."""
        rules, state = self.book.rules, self.book.state
        groups_per_step, live = rules.bound.groups_per_step, self.book.index.num_live
        allowed = rules.bound.permits(
            learner_step=self.book.free_step,
            adopted_step=adopted.step,
            live=live,
            booked=state.batches,
        )
        booked = sum(step < state.last_step for step in state.batches)
        remaining = (state.last_step - self.book.step - booked) * groups_per_step - live
        room = rules.max_in_flight - live
        if state.untrained_bytes > rules.high_water_bytes:
            room = min(room, groups_per_step - live)
        return max(0, min(allowed, remaining, room))

    def lease(
        self, holder: str, adopted: PolicyVersion, *, max_sequences: int, now_s: float
    ) -> list[LeasedGroup]:
        """Grant generation work: lapsed groups first, then evaluation, then new prompts."""
        if adopted.epoch != self.book.version.epoch or self.book.state.awaits_learner:
            return []
        if adopted.step > self.book.step:
            return []  # no learner has made these weights: a deadline that far would never come
        granted: list[LeasedGroup] = []
        room = max_sequences
        while room > 0:
            group = self._next_group(adopted, room)
            if group is None:
                break
            room -= len(group.missing)
            lease_id = self.book.state.next_lease_id
            self._record(
                Leased(
                    lease_id=lease_id,
                    group_id=group.group_id,
                    holder=holder,
                    adopted_step=adopted.step,
                )
            )
            self._terms.begin(lease_id, now_s)
            granted.append(
                LeasedGroup(
                    group_id=group.group_id,
                    lease_id=lease_id,
                    item=group.item,
                    position=group.position,
                    prompt=group.prompt,
                    siblings=group.missing,
                )
            )
        return granted

    def _next_group(self, adopted: PolicyVersion, room: int) -> Group | None:
        for group in islice(self.book.index.again.values(), _LAPSED_TO_LOOK_AT):
            if group.adopted_step > adopted.step:
                continue
            if len(group.missing) <= room:
                return group
            if group.item == "eval":
                return None  # smaller work would take the lanes that it waits for
        for step, eval_round in self.book.state.eval_rounds.items():
            if eval_round.unissued and adopted.step >= step and self._may_evaluate_more:
                samples = self.book.rules.eval_plan.section.samples
                return self._issue_eval(step, eval_round) if samples <= room else None
        if self.book.rules.group_size > room or self.permits(adopted) == 0:
            return None
        for group in self.book.index.fresh.values():
            return group  # of before a take-over: its prompt was taken long ago
        return None if self.book.out_of_prompts else self._issue()

    @property
    def _may_evaluate_more(self) -> bool:
        """True if held-out answers to come or to be scored leave memory for more.

        One problem at a time is always answered, so that an evaluation comes to its end.
        """
        rules, answers = self.book.rules, self.book.index.eval_open
        is_full = self.book.state.untrained_bytes > rules.high_water_bytes
        most = rules.max_in_flight * rules.group_size
        samples = rules.eval_plan.section.samples
        return not answers or (not is_full and answers + samples <= most)

    def _issue(self) -> Group:
        group_id, cursor = self.book.state.next_group_id, self.book.state.cursor
        prompt = self._prompt_at(cursor)
        size = self.book.rules.group_size
        self._record(
            Issued(group_id=group_id, item="train", prompt=prompt, cursor=cursor, size=size)
        )
        return self.book.groups[group_id]

    def _issue_eval(self, step: int, eval_round: EvalRound) -> Group:
        group_id = self.book.state.next_group_id
        cursor = eval_round.next_problem
        prompt = self._eval_prompt_at(cursor)
        self._record(
            Issued(
                group_id=group_id,
                item="eval",
                prompt=prompt,
                cursor=cursor,
                size=self.book.rules.eval_plan.section.samples,
                eval_step=step,
            )
        )
        return self.book.groups[group_id]

    def heartbeat(self, holder: str, lease_ids: Iterable[int], *, now_s: float) -> list[int]:
        """Extend leases; return those that the holder no longer has."""
        return self._terms.extend(self.book.leases, holder, lease_ids, now_s)

    def answered(self, holder: str, header: TrajectoryHeader) -> Group:
        """Return the group that a trajectory belongs to, whose sender must have leased it.

        Raises:
            RefusedError: its group has ended, or its lease never was the sender's.
        """
        group = self.book.groups.get(header.group_id)
        if group is None:
            raise RefusedError(f"group {header.group_id} has ended")
        if group.lessees.get(header.lease_id) != holder:
            raise RefusedError(
                f"group {header.group_id} was not leased to {holder} as lease {header.lease_id}"
            )
        return group

    def submit(self, holder: str, header: TrajectoryHeader, num_bytes: int = 0) -> bool:
        """Take one finished sibling; return False for one that is there already.

        A late answer from a lapsed lease is as good as any, as long as its sibling is missing
        and no token of it is older than the group's deadline allows.

        Raises:
            RefusedError: its group has ended, its lease never was the sender's, it is longer than
                the settings allow, or its tokens are of weights that it may not hold.
        """
        group = self.answered(holder, header)
        if not 0 <= header.sibling < group.size:
            raise RefusedError(f"sibling {header.sibling} of a group of {group.size}")
        if header.sibling in group.headers:
            return False
        self._check_lengths(group, header)
        self._check_versions(group, header)
        self._record(Generated(header=header, num_bytes=num_bytes))
        overlong = header.finish_reason == "length" and group.item == "train"
        if overlong and self.book.rules.drop_overlong:
            self._drop(group, "overlong_response")
        return True

    def _check_lengths(self, group: Group, header: TrajectoryHeader) -> None:
        """Refuse what is longer than this broker's settings allow."""
        longest = self.book.rules.max_response_tokens[group.item]
        if header.num_prompt_tokens > self.book.rules.max_prompt_tokens:
            raise RefusedError(
                f"a prompt of {header.num_prompt_tokens} tokens in group {group.group_id}; the "
                f"broker's sampling.max_prompt_tokens is {self.book.rules.max_prompt_tokens}"
            )
        if header.num_response_tokens > longest:
            section = "eval or sampling" if group.item == "eval" else "sampling"
            raise RefusedError(
                f"a response of {header.num_response_tokens} tokens in group {group.group_id}; the "
                f"broker's max_response_tokens ({section}) is {longest}"
            )

    def _check_versions(self, group: Group, header: TrajectoryHeader) -> None:
        oldest, version = header.oldest_version, self.book.version
        newest = max(run.version for run in header.version_runs)
        if newest > version:
            raise RefusedError(f"token of {newest.label}, the learner is at {version.label}")
        for run in header.version_runs:
            if not self.book.is_ancestor(run.version):
                lease = self.book.leases.get(group.lease_id)
                if lease is not None and lease.lease_id == header.lease_id:
                    self._end_lease(lease, "orphaned")
                raise RefusedError(
                    f"token chosen by {run.version.label}, which {version.label} does not "
                    "descend from: a learner has gone back to an earlier checkpoint"
                )
        if group.adopted_step < 0 or oldest.step < group.adopted_step:
            raise RefusedError(
                f"token chosen by {oldest.label}, group {group.group_id} was admitted at "
                f"v{version.epoch}.{group.adopted_step}"
            )

    def reject(self, holder: str, lease_id: int, reason: DropReason) -> None:
        """Drop a group that no generator could answer."""
        lease = self.book.leases.get(lease_id)
        if lease is not None and lease.holder == holder:
            self._drop(self.book.groups[lease.group_id], reason)

    def release(self, holder: str, lease_id: int, reason: LeaseEnd) -> None:
        """Take back a lease before its end."""
        lease = self.book.leases.get(lease_id)
        if lease is not None and lease.holder == holder:
            self._end_lease(lease, reason)

    def release_all(self, holder: str, reason: LeaseEnd, keep: Collection[int] = ()) -> None:
        """Take back what a generator held, because it started anew or left."""
        for lease_id in [i for i in self.book.by_holder.get(holder, ()) if i not in keep]:
            if lease_id in self.book.leases:  # the end of another may have ended the run
                self._end_lease(self.book.leases[lease_id], reason)

    def expire(self, now_s: float) -> int:
        """End the leases whose holder fell silent; return how many."""
        ended = 0
        for lease_id in self._terms.overdue(now_s):
            if lease_id in self.book.leases:  # the end of another may have ended the run
                self._end_lease(self.book.leases[lease_id], "lapsed")
                ended += 1
        return ended

    def _end_lease(self, lease: Lease, reason: LeaseEnd) -> None:
        self._record(LeaseEnded(lease_id=lease.lease_id, reason=reason))
        self._terms.end(lease.lease_id)
        group = self.book.groups[lease.group_id]
        if group.attempts >= self.book.rules.max_attempts:
            self._drop(group, "poison" if group.deaths == group.attempts else "lease_exhausted")

    # ---- scoring -------------------------------------------------------------

    def score(self, score: Score, by: str = "") -> None:
        """Take the outcome of one attempt to score a trajectory."""
        group = self.book.groups.get(score.group_id)
        if group is None or score.sibling not in group.headers or score.sibling in group.scores:
            return  # it ended, or was scored already
        score = clamped(score)
        if score.reward is None:
            self._record(
                ScoringFailed(
                    group_id=score.group_id,
                    sibling=score.sibling,
                    reason=score.unavailable,
                    by=by,
                    function=score.function,
                    version=score.version,
                    excerpt=score.excerpt,
                )
            )
            if group.failed_scorings[score.sibling] >= self.book.rules.max_attempts:
                self._drop(group, "reward_unavailable")
            return
        self._record(Scored(score=score))
        if group.item == "eval":
            self._close_eval_if_complete(group.eval_step)
        elif group.state == "ready" and self.book.rules.drop_zero_variance:
            values = group.values_of(self.book.rules.zero_variance_of)
            if max(values) == min(values):
                self._drop(group, "zero_variance")

    def _drop(self, group: Group, reason: DropReason) -> None:
        self._record(Dropped(group_id=group.group_id, reason=reason))
        if group.item == "eval":
            self._close_eval_if_complete(group.eval_step)

    def _close_eval_if_complete(self, step: int) -> None:
        eval_round = self.book.state.eval_rounds[step]
        if eval_round.complete:
            self._record(
                EvalRoundClosed(step=step, point=self.book.rules.eval_plan.point(eval_round))
            )
            if reason := self.book.rules.eval_plan.verdict(self.book.state.eval_points):
                self.plan_stop(reason)

    # ---- dead letters --------------------------------------------------------

    def retry(self, group_ids: Iterable[int]) -> tuple[dict[int, int], dict[int, str]]:
        """Issue the prompts of dead letters again; return new groups, and why others were not."""
        done: dict[int, int] = {}
        refused: dict[int, str] = {}
        for group_id in group_ids:
            letter = self.book.state.dead_letters.get(group_id)
            if letter is None:
                refused[group_id] = "no such dead letter"
            elif letter.item == "eval":
                refused[group_id] = "it belongs to an evaluation that is over"
            elif self.book.state.stop_reason or self.book.step >= self.book.state.last_step:
                refused[group_id] = "the run takes no more prompts"
            else:
                new = self.book.state.next_group_id
                self._record(Retried(group_id=new, of=group_id, size=self.book.rules.group_size))
                done[group_id] = new
        return done, refused

    def drop_letters(self, group_ids: Iterable[int]) -> tuple[dict[int, int], dict[int, str]]:
        """Forget dead letters; return those that there were, and why others were not."""
        done: dict[int, int] = {}
        refused: dict[int, str] = {}
        for group_id in group_ids:
            if group_id in self.book.state.dead_letters:
                self._record(LetterDropped(group_id=group_id))
                done[group_id] = NOBODY
            else:
                refused[group_id] = "no such dead letter"
        return done, refused

    # ---- the end -------------------------------------------------------------

    def discard_answers_of(self, key: str, *, takes_over: bool = False) -> tuple[int, int]:
        """Drop what holds an answer that was delivered with a key.

        Args:
            key: its name.
            takes_over: a learner has just taken over and has no batch yet. Else batches stay, for
                they are in its hands.

        Returns:
            groups dropped, and groups that are being trained already.
        """
        own = [group for group in self.book.groups.values() if _is_from(group, f"{key}/")]
        bound: dict[int, list[int]] = {}
        for group in own:
            if group.bound_to != NOBODY:
                bound.setdefault(group.bound_to, []).append(group.group_id)
            elif group.group_id in self.book.groups:  # the end of another may have ended the run
                self._drop(group, "revoked")
        if takes_over:
            for step, group_ids in bound.items():
                self.reject_batch(self.book.version, step, "revoked", group_ids)
            bound = {}
        left = sum(map(len, bound.values()))
        return len(own) - left, left

    def plan_stop(self, reason: str, drop_as: DropReason = "run_ended") -> bool:
        """End the run in order: a batch in the learner's hands is the last one.

        Returns False if nothing is left to end: the last step is trained or planned already.
        """
        if self.book.step >= self.book.state.last_step or self.book.state.stop_reason:
            return False
        self._stop_here(reason, drop_as)
        return True

    def _stop_here(self, reason: str, drop_as: DropReason) -> None:
        """Make the last step that has its batch the last of the run."""
        self._record(StopPlanned(last_step=self.book.free_step, reason=reason))
        for step in sorted(s for s in self.book.state.batches if s > self.book.free_step):
            self._record(Unbound(step=step))  # there is a gap before it
        self._drop_unbound(drop_as)
        if self.book.step == self.book.state.last_step:
            self._open_eval_if_due()

    def _drop_unbound(self, reason: DropReason) -> None:
        for group in list(self.book.groups.values()):
            if group.item == "train" and group.bound_to == NOBODY:
                self._drop(group, reason)

    def _open_eval_if_due(self) -> None:
        known = {
            *self.book.state.eval_rounds,
            *(point.step for point in self.book.state.eval_points),
        }
        due = self.book.rules.eval_plan.is_due(self.book.step, last_step=self.book.state.last_step)
        if due and self.book.step not in known:
            num_problems = self.book.rules.eval_plan.num_problems
            self._record(EvalRoundOpened(step=self.book.step, num_problems=num_problems))

    # ---- the learner ---------------------------------------------------------

    def take_over(
        self,
        step: int,
        checkpoint: str = "",
        learner: str = "",
        held: PolicyVersion | None = None,
    ) -> PolicyVersion:
        """Grant a new epoch to a learner that holds the weights after ``step`` steps.

        A learner takes over once in its life: asked again, it gets the epoch that it has.

        Args:
            step: learner steps completed in its weights.
            checkpoint: that it holds, for the record.
            learner: its incarnation.
            held: the version of that checkpoint; None for the weights that the run started with.

        Raises:
            RefusedError: this run cannot resume from that step, or these are other weights than
                those that this run had at it.
        """
        if learner and learner == self.book.state.learner:
            epoch = self.book.version.epoch
            return PolicyVersion(epoch, self.book.state.forks[epoch])
        if not self.book.can_go_back_to(step):
            known = min(self.book.state.history, default=self.book.step)
            raise RefusedError(
                f"the learner holds step {step}, this run is at step {self.book.step} and knows "
                f"its batches from step {known} on; resume from a checkpoint of one of these steps "
                "(slipstream run --resume CHECKPOINT) or start a new run (run.name)"
            )
        if held is not None and not self.book.is_ancestor(held):
            raise RefusedError(
                f"the learner holds {held.label}, which {self.book.version.label} does not descend "
                "from: that checkpoint is of steps that were given up; resume from another one "
                "(slipstream run --resume CHECKPOINT)"
            )
        epoch = max(self.book.version.epoch, self.book.state.granted_epoch) + 1
        version = PolicyVersion(epoch, step)
        self._record(TakenOver(version=version, checkpoint=checkpoint, learner=learner))
        for group_id, position in list(self.book.state.lost):
            self._requeue(group_id, position)
        self._drop_past_the_end()
        for group in list(self.book.groups.values()):
            orphaned = group.bound_to == NOBODY and not self.book.descends(group)
            if orphaned and group.item == "train":
                self._drop(group, "orphaned")
        self._open_eval_if_due()
        return version

    def _requeue(self, group_id: int, position: int) -> None:
        """Have a prompt of a lost step answered again: what was answered is gone."""
        self._record(
            Requeued(
                group_id=self.book.state.next_group_id,
                of=group_id,
                position=position,
                prompt=self._prompt_at(position),
                size=self.book.rules.group_size,
            )
        )

    def _drop_past_the_end(self) -> None:
        """Unbind batches that the run, which was made shorter, no longer reaches."""
        for step in sorted(s for s in self.book.state.batches if s >= self.book.state.last_step):
            groups = [self.book.groups[group_id] for group_id in self.book.state.batches[step]]
            self._record(Unbound(step=step))
            for group in groups:
                self._drop(group, "run_ended")

    def learner_leaves(self) -> None:
        """Record that the learner of a run that is complete has nothing left to do."""
        if self.book.finished and not self.book.state.learner_left:
            self._record(LearnerLeft())

    def deliver(self, version: PolicyVersion, step: int | None = None) -> Delivery:
        """Return the batch of a learner step, or what it waits for, or None at the end.

        The same step asked again gets the same batch.

        Args:
            version: the learner's own.
            step: its next step, or the one after it; None is the next.
        """
        if version.next() == self.book.version and step == self.book.step:
            version = (
                self.book.version
            )  # asked ahead, and the commit came meanwhile: it is that step
        self._require_current(version)
        step = version.step if step is None else step
        if not version.step <= step <= version.step + 1:
            raise RefusedError(f"batch of step {step} asked for by a learner at {version.label}")
        if self.book.finished:
            return None
        if step in self.book.state.batches:
            return [self.book.groups[group_id] for group_id in self.book.state.batches[step]]
        if step >= self.book.state.last_step or step != self.book.free_step:
            return NotYet(self.book.rules.bound.groups_per_step)
        choice = choose_batch(
            self.book.rules.bound,
            learner_step=step,
            ready=self.book.index.ready,
            due=self.book.index.due,
            booked=self.book.state.batches,
        )
        if isinstance(choice, NotYet):
            if not self._is_end_of_data():
                return choice
            return self._deliver_the_rest(version, step)
        return self._bind_batch(step, choice)

    def _bind_batch(self, step: int, take: dict[int, int]) -> list[Group]:
        group_ids = self.book.index.nearest(take)
        self._record(Delivered(step=step, group_ids=group_ids))
        batch = [self.book.groups[group_id] for group_id in group_ids]
        self._drop_stale()
        return batch

    def _drop_stale(self) -> None:
        """In drop mode, drop what no later step may train."""
        if self.book.rules.bound.reserves or not self.book.index.any_due_before(
            self.book.free_step
        ):
            return
        for group in list(self.book.groups.values()):
            if (
                group.is_live
                and self.book.rules.bound.deadline(group.adopted_step) < self.book.free_step
            ):
                self._drop(group, "stale")

    def _is_end_of_data(self) -> bool:
        """True if nothing more will come than is ready."""
        counts = self.book.index.in_flight()
        return self.book.out_of_prompts and not any(
            counts[state] for state in ("issued", "leased", "generated")
        )

    def _deliver_the_rest(self, version: PolicyVersion, step: int) -> Delivery:
        """Make the last batch of what is ready, if that is enough, and plan the end."""
        if later := [s for s in self.book.state.batches if s > step]:
            self._take_apart(later)  # the run ends with the batch of this step
            return self.deliver(version, step)
        enough = self.book.index.in_flight()["ready"] >= self.book.rules.min_groups
        batch = self._bind_batch(step, dict(self.book.index.ready)) if enough else None
        used = f"run.epochs: all {self.book.state.cursor} prompts were used"
        self._stop_here(self.book.state.stop_reason or used, "end_of_data")
        return batch if batch is not None else self.deliver(version, step)

    def _take_apart(self, steps: Iterable[int]) -> None:
        """Have the groups of some batches wait again, if they may be trained before their step."""
        for step in sorted(steps):
            groups = [self.book.groups[group_id] for group_id in self.book.state.batches[step]]
            self._record(Unbound(step=step))
            for group in groups:
                self._put_back(group, step)

    def _put_back(self, group: Group, step: int) -> None:
        """Have a group of a batch that was taken apart wait again, if it may still be trained."""
        if not self.book.descends(group):
            self._drop(group, "orphaned")
        elif self.book.rules.bound.deadline(group.adopted_step) < step:
            self._drop(group, "stale")  # delivered again under a smaller bound

    def reject_batch(
        self, version: PolicyVersion, step: int, reason: DropReason, group_ids: Collection[int]
    ) -> None:
        """Drop groups of a batch that must not be trained; the others wait again."""
        self._require_current(version)
        batch = self.book.state.batches.get(step)
        if batch is None or not set(group_ids) & set(batch):
            return  # asked twice
        groups = [self.book.groups[group_id] for group_id in batch]
        self._record(Unbound(step=step))
        for group in groups:
            if group.group_id in group_ids:
                self._drop(group, reason)
            else:
                self._put_back(group, step)

    def commit(self, version: PolicyVersion, metrics: dict[str, float]) -> None:
        """Record that the learner trained the step that leads to ``version``."""
        if version == self.book.version:
            return  # asked twice
        self._require_current(PolicyVersion(version.epoch, version.step - 1))
        if self.book.step not in self.book.state.batches:
            raise RefusedError(f"commit of step {self.book.step}, which was never delivered")
        self._record(Trained(version=version, metrics=metrics))
        self._evict()
        if (
            not self.book.state.sealed_step
            and len(self.book.state.history) > self.book.rules.max_history
        ):
            self._record(HistoryCut(step=self.book.step - self.book.rules.max_history))
        if self.book.step == self.book.state.last_step:
            self._drop_unbound("run_ended")  # only a resumed run has any
        self._open_eval_if_due()

    def _evict(self) -> None:
        """Keep payloads of trained steps within their budget; the oldest go first."""
        while self.book.state.replay_bytes > self.book.rules.replay_budget_bytes:
            self._record(Evicted(step=min(self.book.state.replay)))

    def seal(self, version: PolicyVersion, step: int, oldest_kept: int) -> None:
        """Record that a durable checkpoint holds every step before ``step``."""
        self._require_current(version)
        if step > self.book.step or oldest_kept > step:
            raise RefusedError(
                f"checkpoints of steps {oldest_kept} to {step} cannot be sealed at "
                f"{self.book.version.label}"
            )
        forgettable = any(s < min(step, oldest_kept) for s in self.book.state.history)
        if step > self.book.state.sealed_step or forgettable:
            self._record(Sealed(step=step, oldest_kept=oldest_kept))

    def _require_current(self, version: PolicyVersion) -> None:
        if version != self.book.version:
            raise RefusedError(
                f"the learner is at {version.label}, the run at {self.book.version.label}"
            )

    # ---- views of the state -------------------------------------------

    def snapshot(self, version: PolicyVersion) -> BookState:
        """Return what a checkpoint of the learner's present version keeps."""
        self._require_current(version)
        return for_checkpoint(self.book.state)

    def waiting_for(self, not_yet: NotYet) -> tuple[int, ...]:
        """Name the groups that have to get ready (or end) before a batch can be delivered."""
        deadline = self.book.rules.bound.deadline
        return tuple(
            group.group_id
            for group in self.book.groups.values()
            if (group.item == "eval" and self.book.step >= self.book.state.last_step)
            or (
                group.is_live
                and group.state != "ready"
                and (not_yet.overdue is None or deadline(group.adopted_step) <= not_yet.overdue)
            )
        )


def _is_from(group: Group, prefix: str) -> bool:
    """True if an answer of a group came from a holder with this prefix."""
    return any(
        group.lessees.get(header.lease_id, "").startswith(prefix)
        for header in group.headers.values()
    )

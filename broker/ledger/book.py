"""How each event changes the state of the items, and views of it. Nothing is decided here.

The state is the sum of the events in order: a broker that starts again reads the newest snapshot
and applies the events after it.
"""

from bisect import insort
from collections import Counter

from slipstream.broker.ledger.evaluation import EvalAnswer, EvalRound
from slipstream.broker.ledger.events import (
    DEATHS,
    FAULTS,
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
from slipstream.broker.ledger.index import GroupIndex
from slipstream.broker.ledger.leases import Holdings
from slipstream.broker.ledger.state import MAX_DEAD_LETTERS, BookState, LedgerRules, TrainedStep
from slipstream.broker.ledger.survivorship import TRAINED, bucket_of
from slipstream.wire.messages.dead_letters import DeadLetter, DeadReason, Failure, is_dead
from slipstream.wire.messages.trajectory import Score, TrajectoryKey
from slipstream.wire.messages.versions import PolicyVersion, staleness_steps


class Book:
    """The state, the views of it, and what each event does to them."""

    def __init__(self, rules: LedgerRules, state: BookState | None = None) -> None:
        self.rules = rules
        self.state = state or BookState(
            prompts=rules.prompts_fingerprint,
            problems=rules.problems_fingerprint,
            group_size=rules.group_size,
            bound=rules.bound,
            last_step=rules.total_steps,
        )
        self.index = GroupIndex(rules.bound, self.state.groups.values())
        self.by_holder = Holdings()
        for lease in self.state.leases.values():
            self.by_holder.add(lease.holder, lease.lease_id)
        self.released: list[TrajectoryKey] = []  # payloads that are no longer needed
        self._look_for_free_step()
        self._newest_step = self._newest_steps()

    # ---- what is true now ----------------------------------------------------

    @property
    def version(self) -> PolicyVersion:
        """Version of the learner."""
        return self.state.version

    @property
    def step(self) -> int:
        """Number of learner steps completed."""
        return self.state.version.step

    @property
    def groups(self) -> dict[int, Group]:
        """Groups that are neither trained (or evaluated) nor dropped."""
        return self.state.groups

    @property
    def leases(self) -> dict[int, Lease]:
        """Leases of generation."""
        return self.state.leases

    @property
    def finished(self) -> bool:
        """True once all steps are trained and all evaluations answered."""
        state = self.state
        done = self.step >= state.last_step and not state.eval_rounds
        return done and not state.awaits_learner

    @property
    def over(self) -> bool:
        """True once the learner, too, is done: no further request will come."""
        return self.finished and self.state.learner_left

    @property
    def out_of_prompts(self) -> bool:
        """True at the end of the prompt source."""
        return self.rules.max_prompts is not None and self.state.cursor >= self.rules.max_prompts

    def in_flight(self) -> dict[str, int]:
        """Number of groups for training in each state."""
        return self.index.in_flight()

    def trajectories(self) -> dict[str, int]:
        """Return the equation of groups for trajectories."""
        state, size = self.state, self.rules.group_size
        return {
            "issued": state.issued * size,
            "trained": state.trained * size,
            "dropped": state.dropped.total() * size,
            "in_flight": self.index.num_siblings,
        }

    def unaccounted(self) -> int:
        """Return issued - trained - dropped - in flight, which must be 0."""
        state = self.state
        in_flight = sum(self.in_flight().values())
        return state.issued - state.trained - state.dropped.total() - in_flight

    def sampled_reward(self) -> float | None:
        """Return the mean reward of all training answers scored since the last step.

        Unlike what is trained it holds the groups that a filter drops.
        """
        state = self.state
        return state.sampled_reward / state.sampled_count if state.sampled_count else None

    def is_ancestor(self, version: PolicyVersion) -> bool:
        """True if the learner's present weights are these or descend from them."""
        return version.step <= self._newest_step.get(version.epoch, -1)

    def can_go_back_to(self, step: int) -> bool:
        """True if a learner may take over at this step."""
        return min(self.state.history, default=self.step) <= step <= self.step

    def _newest_steps(self) -> dict[int, int]:
        """Return by epoch the last step whose weights are in the present lineage."""
        newest: dict[int, int] = {}
        limit = self.step
        forks = self.state.forks
        for epoch in range(self.version.epoch, -1, -1):
            if epoch in forks or epoch in {0, self.version.epoch}:  # else of an abandoned life
                newest[epoch] = limit
                limit = min(limit, forks.get(epoch, limit))
        return newest

    def _look_for_free_step(self) -> None:
        step = self.step
        while step in self.state.batches:
            step += 1
        self.free_step = step  # the first that has no batch

    # ---- events --------------------------------------------------------------

    def apply(self, event: LedgerEvent) -> None:
        """Change the state; used by every command and by replay."""
        self.state.num_events += 1
        match event:
            case Issued() | Leased() | LeaseEnded() | Generated():
                self._apply_generation(event)
            case ScoringFailed():
                self._apply_scoring_failed(event)
            case Scored(score=score):
                self._apply_score(score)
            case Dropped(group_id=group_id, reason=reason):
                self._apply_drop(group_id, reason)
            case EvalRoundOpened(step=step, num_problems=num_problems):
                self.state.eval_rounds[step] = EvalRound(step, num_problems)
            case EvalRoundClosed(step=step, point=point):
                del self.state.eval_rounds[step]
                insort(self.state.eval_points, point, key=lambda one: one.step)
            case StopPlanned(last_step=step, reason=reason):
                self.state.last_step, self.state.stop_reason = step, reason
            case Retried() | LetterDropped():
                self._apply_letter(event)
            case _:
                self._apply_learner(event)

    def _apply_learner(
        self,
        event: TakenOver
        | Requeued
        | LearnerLeft
        | Delivered
        | Unbound
        | Trained
        | Evicted
        | HistoryCut
        | Sealed,
    ) -> None:
        match event:
            case TakenOver():
                self._apply_taken_over(event)
            case Requeued():
                self._apply_requeued(event)
            case LearnerLeft():
                self.state.learner_left = True
            case Delivered(step=step, group_ids=group_ids):
                self.state.batches[step] = group_ids
                for group_id in group_ids:
                    self._bind(self.groups[group_id], step)
            case Unbound(step=step):
                for group_id in self.state.batches.pop(step):
                    self._bind(self.groups[group_id], NOBODY)
            case Trained(version=version):
                self._apply_trained(version)
            case Evicted(step=step):
                self._release_replay(step)
            case HistoryCut(step=step):
                self._cut_history(step)
            case Sealed(step=step, oldest_kept=oldest_kept):
                self._apply_sealed(step, oldest_kept)
        self._look_for_free_step()
        if not isinstance(event, Delivered | Unbound):
            self._newest_step = self._newest_steps()

    def _apply_taken_over(self, event: TakenOver) -> None:
        state, version = self.state, event.version
        self._go_back(version.step)
        state.version = version
        state.learner = event.learner
        state.awaits_learner = state.learner_left = False
        state.forks[version.epoch] = version.step
        state.granted_epoch = max(state.granted_epoch, version.epoch)
        self._newest_step = self._newest_steps()
        for group in [g for g in self.groups.values() if g.item == "eval"]:
            if not self.descends(group):
                self.begin_anew(group)

    def descends(self, group: Group) -> bool:
        """True if every answer of a group is of ancestors of the learner's weights."""
        return group.adopted_step <= self.step and all(
            self.is_ancestor(run.version)
            for header in group.headers.values()
            for run in header.version_runs
        )

    def begin_anew(self, group: Group, size: int | None = None) -> None:
        """Forget all that was done about a group, and have it leased as if it were new."""
        self.forget(group)
        again = group.prompt_only()
        again.size = group.size if size is None else size
        self.groups[group.group_id] = again
        self.index.enter(again)

    def _bind(self, group: Group, step: int) -> None:
        self.index.leave(group)
        group.bound_to = step
        self.index.enter(group)

    def _apply_generation(self, event: Issued | Leased | LeaseEnded | Generated) -> None:
        state = self.state
        match event:
            case Issued():
                self._apply_issued(event)
            case Leased(lease_id=lease_id, group_id=group_id, holder=holder):
                group = self.groups[group_id]
                self.index.leave(group)
                if group.adopted_step < 0:
                    group.adopted_step = event.adopted_step
                group.lease_to(lease_id, holder)
                self.index.enter(group)
                state.leases[lease_id] = Lease(lease_id, group_id, holder)
                self.by_holder.add(holder, lease_id)
                state.next_lease_id = lease_id + 1
            case LeaseEnded(lease_id=lease_id, reason=reason):
                lease = state.leases[lease_id]
                group = self.groups[lease.group_id]
                self.index.leave(group)
                self._forget_lease(group)
                self.index.enter(group)
                group.attempts += reason in FAULTS
                group.deaths += reason in DEATHS
                if reason in FAULTS:
                    group.note(Failure(by=lease.holder, reason=f"its lease of generation {reason}"))
                state.ended_leases[reason] += 1
            case Generated(header=header, num_bytes=num_bytes):
                group = self.groups[header.group_id]
                is_last = len(group.headers) + 1 == group.size
                if is_last:
                    self.index.leave(group)
                group.headers[header.sibling] = header
                group.num_bytes += num_bytes
                state.untrained_bytes += num_bytes
                if is_last:
                    self._forget_lease(group)
                    self.index.enter(group)
                else:
                    self.index.sibling_came(group, generated=1)

    def _apply_issued(self, event: Issued) -> None:
        state = self.state
        group = Group(
            group_id=event.group_id,
            item=event.item,
            prompt=event.prompt,
            size=event.size,
            position=event.cursor,
            eval_step=event.eval_step,
        )
        if event.item == "train":
            state.cursor = event.cursor + 1
            state.issued += 1
        else:
            state.eval_rounds[event.eval_step].next_problem = event.cursor + 1
        self._add(group)

    def _add(self, group: Group) -> None:
        self.state.groups[group.group_id] = group
        self.state.next_group_id = group.group_id + 1
        self.index.enter(group)

    def _forget_lease(self, group: Group) -> None:
        if group.lease_id == NOBODY:
            return
        lease = self.state.leases.pop(group.lease_id)
        self.by_holder.remove(lease.holder, lease.lease_id)
        group.lease_id = NOBODY

    def _apply_score(self, score: Score) -> None:
        state = self.state
        group = self.groups[score.group_id]
        is_last = len(group.scores) + 1 == group.size
        if is_last:
            self.index.leave(group)
        group.scores[score.sibling] = score
        if is_last:
            self.index.enter(group)
        else:
            self.index.sibling_came(group, scored=1)
        if group.item == "eval":
            if is_last:
                self._apply_eval_answers(group)
        elif score.reward is not None:
            state.sampled_reward += score.reward
            state.sampled_count += 1
            if is_last and len(set(group.values_of(self.rules.zero_variance_of))) > 1:
                state.drops_in_a_row = 0

    def _apply_eval_answers(self, group: Group) -> None:
        eval_round = self.state.eval_rounds[group.eval_step]
        headers = [group.headers[sibling] for sibling in range(group.size)]
        eval_round.answers[group.position] = [
            EvalAnswer(reward, header.num_response_tokens, header.finish_reason == "length")
            for reward, header in zip(group.rewards, headers, strict=True)
        ]
        for header in headers:
            eval_round.versions.update(run.version for run in header.version_runs)
        self.forget(group)

    def _apply_scoring_failed(self, event: ScoringFailed) -> None:
        group = self.groups[event.group_id]
        failed = group.failed_scorings
        failed[event.sibling] = failed.get(event.sibling, 0) + 1
        group.note(
            Failure(
                sibling=event.sibling,
                by=event.by,
                reason=event.reason,
                function=event.function,
                version=event.version,
                excerpt=event.excerpt,
            )
        )

    # ---- dead letters --------------------------------------------------------

    def _add_dead_letter(self, group: Group, reason: DeadReason) -> None:
        """Keep an abandoned group for inspection and retry."""
        letters = self.state.dead_letters
        letters[group.group_id] = DeadLetter(
            group_id=group.group_id,
            item=group.item,
            position=group.position,
            prompt=group.prompt,
            reason=reason,
            step=self.step,
            failures=tuple(group.failures),
            retry_of=group.retry_of,
        )
        if len(letters) > MAX_DEAD_LETTERS:
            del letters[next(iter(letters))]
            self.state.letters_forgotten += 1

    def _apply_letter(self, event: Retried | LetterDropped) -> None:
        state = self.state
        if isinstance(event, LetterDropped):
            del state.dead_letters[event.group_id]
            return
        letter = state.dead_letters.pop(event.of)
        group = Group(
            group_id=event.group_id,
            item="train",
            prompt=letter.prompt,
            size=event.size,
            position=letter.position,
            retry_of=event.of,
        )
        state.issued += 1
        state.retried += 1
        self._add(group)

    # ---- drops ---------------------------------------------------------------

    def _apply_drop(self, group_id: int, reason: DropReason) -> None:
        group = self.groups[group_id]
        if is_dead(reason):
            self._add_dead_letter(group, reason)
        if group.item == "eval":
            if (eval_round := self.state.eval_rounds.get(group.eval_step)) is not None:
                eval_round.dropped.add(group.position)
        else:
            self.state.dropped[reason] += 1
            self.state.drops_in_a_row += 1
            self._measure(group, reason)
        self.forget(group)

    def _measure(self, group: Group, fate: str) -> None:
        """Count answers by length and by what became of them."""
        counts = self.state.lengths.setdefault(fate, {})
        for header in group.headers.values():
            bucket = bucket_of(header.num_response_tokens)
            counts[bucket] = counts.get(bucket, 0) + 1
        if group.lease_id != NOBODY:
            self.state.cancelled[fate] += group.size - len(group.headers)

    def forget(self, group: Group) -> None:
        """Remove a group that ended, and release its payloads."""
        self._take_out(group)
        self.released += group.trajectory_keys()

    def _take_out(self, group: Group) -> None:
        self.index.leave(group)
        self._forget_lease(group)
        del self.state.groups[group.group_id]
        self.state.untrained_bytes -= group.num_bytes

    # ---- learner steps -------------------------------------------------------

    def _apply_trained(self, version: PolicyVersion) -> None:
        state = self.state
        step = version.step - 1
        groups = [self.groups[group_id] for group_id in state.batches.pop(step)]
        staleness: Counter[int] = Counter()
        for group in groups:
            for header in group.headers.values():
                for behavior, num_tokens in header.tokens_by_version():
                    lag = staleness_steps(learner_step=step, behavior=behavior)
                    staleness[lag] += num_tokens
            self._measure(group, TRAINED)
            self._take_out(group)
            state.replay_bytes += group.num_bytes
        state.replay[step] = groups
        state.history[step] = TrainedStep(
            tuple((group.group_id, group.position) for group in groups), dict(staleness)
        )
        state.staleness += staleness
        state.trained += len(groups)
        state.version = version
        state.sampled_reward, state.sampled_count = 0.0, 0

    def _release_replay(self, step: int) -> None:
        for group in self.state.replay.pop(step, ()):
            self.state.replay_bytes -= group.num_bytes
            self.released += group.trajectory_keys()

    def _apply_sealed(self, step: int, oldest_kept: int) -> None:
        state = self.state
        for trained_step in [s for s in state.replay if s < step]:
            self._release_replay(trained_step)
        for trained_step in range(state.sealed_step, step):
            if trained_step in state.history:
                state.sealed += len(state.history[trained_step].groups)
        state.sealed_step = max(step, state.sealed_step)
        self._cut_history(min(step, oldest_kept))

    def _cut_history(self, step: int) -> None:
        for trained_step in [s for s in self.state.history if s < step]:
            del self.state.history[trained_step]

    def _go_back(self, step: int) -> None:
        """Undo the learner steps from ``step`` on: bind their batches again, or requeue them."""
        state = self.state
        for lost in sorted(s for s in state.history if s >= step):
            record = state.history.pop(lost)
            state.trained -= len(record.groups)
            state.staleness -= Counter(record.staleness)
            if lost < state.sealed_step:
                state.sealed -= len(record.groups)
            kept = state.replay.pop(lost, None)
            if kept is not None:
                self._bind_again(lost, kept)
            else:
                state.lost += record.groups
        state.sealed_step = min(state.sealed_step, step)
        state.eval_points = [point for point in state.eval_points if point.step <= step]
        for eval_step in [s for s in state.eval_rounds if s > step]:
            del state.eval_rounds[eval_step]
            for group in [g for g in self.groups.values() if g.eval_step == eval_step]:
                self.forget(group)

    def _bind_again(self, step: int, groups: list[Group]) -> None:
        for group in groups:
            group.bound_to = step
            self.state.groups[group.group_id] = group
            self.index.enter(group)
            self.state.replay_bytes -= group.num_bytes
            self.state.untrained_bytes += group.num_bytes
        self.state.batches[step] = tuple(group.group_id for group in groups)
        self.state.redelivered_steps += 1

    def _apply_requeued(self, event: Requeued) -> None:
        state = self.state
        state.lost.remove((event.of, event.position))
        group = Group(
            group_id=event.group_id,
            item="train",
            prompt=event.prompt,
            size=event.size,
            position=event.position,
        )
        state.requeued += 1
        self._add(group)

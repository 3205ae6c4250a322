"""The life of every item, from the prompt to the learner step that trained it.

A pure state machine. Commands check and then record events; an event is the only thing that
changes the state, so that replaying the stored events rebuilds it. Deadlines of leases are not
part of it: after a replay every lease gets one full term again.

At every moment, for groups: issued = trained + dropped + in flight. The same holds for
trajectories, counting a group as its ``group_size`` siblings.

    issued -> leased -> generated -> ready -> delivered -> trained
       ^         |          |          |
       +- lapse -+          +----------+-> dropped(reason)
"""

from bisect import insort
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from broker.admission import Batch, LiveGroup, NotYet, StalenessBound, choose_batch
from broker.evaluation import EvalAnswer, EvalPlan, EvalRound
from broker.events import (
    Delivered,
    Dropped,
    DropReason,
    EvalRoundClosed,
    EvalRoundOpened,
    Generated,
    Issued,
    Leased,
    LeaseEnded,
    LedgerEvent,
    LedgerSnapshot,
    Restored,
    Scored,
    ScoringFailed,
    StopPlanned,
    TakenOver,
    Trained,
    WaitingGroup,
)
from broker.groups import STATES, Group, Lease
from broker.leases import extend
from wire.control import LeasedGroup
from wire.errors import RefusedError
from wire.status import EvalPoint
from wire.trajectory import Prompt, Score, TrajectoryHeader
from wire.versions import PolicyVersion, staleness_steps

TrajectoryKey = tuple[int, int]  # group_id, sibling


@dataclass(frozen=True, slots=True)
class LedgerRules:
    """The settings that the ledger obeys."""

    bound: StalenessBound
    group_size: int
    total_steps: int
    max_attempts: int
    max_in_flight: int
    drop_zero_variance: bool
    lease_s: float
    eval_plan: EvalPlan
    max_prompts: int | None = None  # the end of the data; None goes through it again and again
    drop_overlong: bool = False  # a group with an answer that was cut off
    prompts_fingerprint: str = ""  # what the training prompts are, and their order
    problems_fingerprint: str = ""  # what the held-out problems are


class Ledger:
    """Accounts for every item. All methods are immediate; time comes in as ``now_s``."""

    def __init__(
        self,
        rules: LedgerRules,
        *,
        prompt_at: Callable[[int], Prompt],
        eval_prompt_at: Callable[[int], Prompt],
    ) -> None:
        self.rules = rules
        self._prompt_at = prompt_at
        self._eval_prompt_at = eval_prompt_at
        self._events: list[LedgerEvent] = []
        self._released: list[TrajectoryKey] = []
        self.groups: dict[int, Group] = {}
        self.leases: dict[int, Lease] = {}
        self.deliveries: dict[int, tuple[int, ...]] = {}  # step -> group ids, until trained
        self.version = PolicyVersion(0, 0)  # of the learner; epoch 0 is nobody
        self.delivered_steps = 0
        self.cursor = 0
        self.next_group_id = 0
        self.next_lease_id = 0
        self.issued = 0
        self.trained = 0
        self.dropped: Counter[DropReason] = Counter()
        self.lapsed_leases: Counter[str] = Counter()
        self.staleness: Counter[int] = Counter()  # staleness in steps -> trained tokens
        self._sampled_reward = 0.0  # of all groups scored since the last step
        self._sampled_count = 0
        self.eval_rounds: dict[int, EvalRound] = {}
        self.eval_points: list[EvalPoint] = []  # by step
        self.last_step = rules.total_steps
        self.stop_reason = ""
        self.drops_in_a_row = 0  # groups dropped since the last one became ready

    # ---- what is true now ----------------------------------------------------

    @property
    def step(self) -> int:
        """Return the number of learner steps completed."""
        return self.version.step

    @property
    def finished(self) -> bool:
        """Tell whether all steps are trained and all evaluations answered."""
        return self.step >= self.last_step and not self.eval_rounds

    @property
    def live(self) -> list[Group]:
        """Return the groups that took a permit, wait to be trained and are in no batch yet."""
        return [g for g in self._untrained if g.adopted_step >= 0 and not g.delivered]

    @property
    def _untrained(self) -> list[Group]:
        return [g for g in self.groups.values() if g.item == "train"]

    @property
    def out_of_prompts(self) -> bool:
        """Tell whether the prompt source has reached its end."""
        return self.rules.max_prompts is not None and self.cursor >= self.rules.max_prompts

    def in_flight(self) -> dict[str, int]:
        """Return how many groups to be trained stand in each state."""
        states = Counter(g.state for g in self._untrained)
        return {state: states[state] for state in STATES}

    def unaccounted(self) -> int:
        """Return issued - trained - dropped - in flight, which must be 0."""
        in_flight = sum(self.in_flight().values())
        return self.issued - self.trained - self.dropped.total() - in_flight

    def sampled_reward(self) -> float | None:
        """Return the mean reward of all training answers scored since the last step.

        Unlike what is trained it holds the groups that a filter drops.
        """
        return self._sampled_reward / self._sampled_count if self._sampled_count else None

    def permits(self, adopted: PolicyVersion) -> int:
        """Return how many more groups a generator that runs ``adopted`` may start."""
        live = len(self.live)
        rules = self.rules
        remaining = (self.last_step - self.delivered_steps) * rules.bound.groups_per_step
        allowed = rules.bound.permits(
            learner_step=self.delivered_steps, adopted_step=adopted.step, live=live
        )
        return max(0, min(allowed, remaining - live, rules.max_in_flight - live))

    def drain(self) -> tuple[list[LedgerEvent], list[TrajectoryKey]]:
        """Return the events not stored yet, and the payloads that nobody needs any more."""
        events, self._events = self._events, []
        released, self._released = self._released, []
        return events, released

    # ---- generation ----------------------------------------------------------

    def lease(
        self, holder: str, adopted: PolicyVersion, *, max_sequences: int, now_s: float
    ) -> list[LeasedGroup]:
        """Grant generation work: lapsed groups first, then evaluation, then new prompts."""
        if adopted.epoch != self.version.epoch:
            return []
        granted: list[LeasedGroup] = []
        room = max_sequences
        while room > 0:
            group = self._next_group(adopted, room)
            if group is None:
                break
            room -= len(group.missing)
            self._record(
                Leased(
                    lease_id=self.next_lease_id,
                    group_id=group.group_id,
                    holder=holder,
                    adopted_step=adopted.step,
                )
            )
            lease_id = self.next_lease_id - 1
            self.leases[lease_id].expires_s = now_s + self.rules.lease_s
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
        for group in self.groups.values():
            lapsed = group.state == "issued" and group.attempts > 0
            if not lapsed or group.adopted_step > adopted.step:
                continue
            if len(group.missing) <= room:
                return group
            if group.item == "eval":
                return None  # smaller work would take the lanes that it waits for
        samples = self.rules.eval_plan.section.samples
        for step, eval_round in self.eval_rounds.items():
            if eval_round.unissued and adopted.step >= step:
                return self._issue_eval(step, eval_round) if samples <= room else None
        if self.rules.group_size > room or self.permits(adopted) == 0:
            return None
        for group in self.groups.values():
            if group.attempts == 0:  # restored from a checkpoint: it needs a permit again
                return group
        return None if self.out_of_prompts else self._issue()

    def _issue(self) -> Group:
        group_id = self.next_group_id
        prompt = self._prompt_at(self.cursor)
        self._record(Issued(group_id=group_id, item="train", prompt=prompt, cursor=self.cursor))
        return self.groups[group_id]

    def _issue_eval(self, step: int, eval_round: EvalRound) -> Group:
        group_id = self.next_group_id
        cursor = eval_round.next_problem
        prompt = self._eval_prompt_at(cursor)
        self._record(
            Issued(group_id=group_id, item="eval", prompt=prompt, cursor=cursor, eval_step=step)
        )
        return self.groups[group_id]

    def heartbeat(self, holder: str, lease_ids: tuple[int, ...], *, now_s: float) -> list[int]:
        """Extend leases; return those that the holder no longer has."""
        return extend(self.leases, holder, lease_ids, expires_s=now_s + self.rules.lease_s)

    def submit(self, header: TrajectoryHeader) -> bool:
        """Take one finished sibling; return False for one that is there already.

        A late answer from a lapsed lease is as good as any, as long as its sibling is missing
        and no token of it is older than the group's deadline allows.
        """
        group = self.groups.get(header.group_id)
        if group is None:
            raise RefusedError(f"group {header.group_id} has ended")
        if not 0 <= header.sibling < group.size:
            raise RefusedError(f"sibling {header.sibling} of a group of {group.size}")
        if header.sibling in group.headers:
            return False
        oldest = header.oldest_version
        if oldest.epoch != self.version.epoch or oldest.step < group.adopted_step:
            raise RefusedError(
                f"token chosen by {oldest.label}, group {group.group_id} was admitted at "
                f"v{self.version.epoch}.{group.adopted_step}"
            )
        newest = max(run.version for run in header.version_runs)
        if newest > self.version:
            raise RefusedError(f"token of {newest.label}, the learner is at {self.version.label}")
        self._record(Generated(header=header))
        overlong = header.finish_reason == "length" and group.item == "train"
        if overlong and self.rules.drop_overlong:
            self._drop(group, "overlong_response")
        return True

    def reject(self, holder: str, lease_id: int, reason: DropReason) -> None:
        """Drop a group that no generator could answer."""
        lease = self.leases.get(lease_id)
        if lease is not None and lease.holder == holder:
            self._drop(self.groups[lease.group_id], reason)

    def release(self, holder: str, lease_id: int, reason: str) -> None:
        """Take back a lease before its end."""
        lease = self.leases.get(lease_id)
        if lease is not None and lease.holder == holder:
            self._end_lease(lease, reason)

    def release_all(self, holder: str, reason: str) -> None:
        """Take back everything that a generator held, because it started anew or left."""
        self._end_leases([one for one in self.leases.values() if one.holder == holder], reason)

    def expire(self, now_s: float) -> int:
        """End the leases whose holder fell silent; return how many."""
        overdue = [lease for lease in self.leases.values() if lease.expires_s < now_s]
        self._end_leases(overdue, "lapsed")
        return len(overdue)

    def _end_leases(self, leases: list[Lease], reason: str) -> None:
        for lease in leases:
            if lease.lease_id in self.leases:  # the end of another may have ended the run
                self._end_lease(lease, reason)

    def _end_lease(self, lease: Lease, reason: str) -> None:
        self._record(LeaseEnded(lease_id=lease.lease_id, reason=reason))
        group = self.groups[lease.group_id]
        if group.attempts >= self.rules.max_attempts:
            self._drop(group, "lease_exhausted")

    # ---- scoring -------------------------------------------------------------

    def score(self, score: Score) -> None:
        """Take the outcome of one attempt to score a trajectory."""
        group = self.groups.get(score.group_id)
        if group is None or score.sibling not in group.headers or score.sibling in group.scores:
            return  # it ended, or was scored already
        if score.reward is None:
            self._record(
                ScoringFailed(
                    group_id=score.group_id, sibling=score.sibling, reason=score.unavailable
                )
            )
            if group.failed_scorings[score.sibling] >= self.rules.max_attempts:
                self._drop(group, "reward_unavailable")
            return
        self._record(Scored(score=score))
        if group.item == "eval":
            self._close_eval_if_complete(group.eval_step)
        elif (
            group.state == "ready"
            and self.rules.drop_zero_variance
            and max(group.rewards) == min(group.rewards)
        ):
            self._drop(group, "zero_variance")

    def _drop(self, group: Group, reason: DropReason) -> None:
        self._record(Dropped(group_id=group.group_id, reason=reason))
        if group.item == "eval":
            self._close_eval_if_complete(group.eval_step)

    def _close_eval_if_complete(self, step: int) -> None:
        if self.eval_rounds[step].complete:
            self._record(EvalRoundClosed(step=step))
            if reason := self.rules.eval_plan.verdict(self.eval_points):
                self.plan_stop(reason)

    # ---- the end -------------------------------------------------------------

    def plan_stop(self, reason: str, drop_as: DropReason = "run_ended") -> bool:
        """End the run in order: a batch in the learner's hands is the last one.

        Returns False if nothing is left to end: the last step is trained or planned already.
        """
        if self.step >= self.last_step or self.stop_reason:
            return False
        self._record(StopPlanned(last_step=self.delivered_steps, reason=reason))
        self._drop_live(drop_as)
        if self.step == self.last_step:
            self._open_eval_if_due()
        return True

    def _drop_live(self, reason: DropReason) -> None:
        for group in self._untrained:
            if not group.delivered:
                self._drop(group, reason)

    def _open_eval_if_due(self) -> None:
        known = self.step in self.eval_rounds or any(p.step == self.step for p in self.eval_points)
        if not known and self.rules.eval_plan.is_due(self.step, last_step=self.last_step):
            self._record(EvalRoundOpened(step=self.step))

    # ---- the learner ---------------------------------------------------------

    def take_over(self, step: int) -> PolicyVersion:
        """Grant a new epoch to a learner that holds the weights after ``step`` steps."""
        if step != self.step:
            raise RefusedError(
                f"the learner holds step {step}, this run stands at step {self.step}; "
                "start a new run (run.name) or bring the weights of that step"
            )
        version = PolicyVersion(self.version.epoch + 1, step)
        self._record(TakenOver(version=version))
        if step == 0 or step == self.last_step:
            self._open_eval_if_due()
        return version

    def deliver(self, version: PolicyVersion) -> list[Group] | NotYet | None:
        """Return the batch of the learner's next step, or what it waits for, or None at the end.

        The same step asked again gets the same batch.
        """
        self._require_current(version)
        if self.finished:
            return None
        if version.step in self.deliveries:
            return [self.groups[group_id] for group_id in self.deliveries[version.step]]
        if version.step >= self.last_step:
            return NotYet(tuple(g.group_id for g in self.groups.values()))
        choice = choose_batch(
            self.rules.bound,
            learner_step=version.step,
            live=[
                LiveGroup(
                    g.group_id,
                    self.rules.bound.deadline(g.adopted_step),
                    ready=g.state == "ready",
                )
                for g in self.live
            ],
        )
        match choice:
            case Batch(group_ids):
                self._record(Delivered(step=version.step, group_ids=group_ids))
                return [self.groups[group_id] for group_id in group_ids]
            case NotYet():
                if self.out_of_prompts and all(g.state == "ready" for g in self._untrained):
                    self.plan_stop(
                        f"run.epochs: all {self.cursor} prompts were used", "end_of_data"
                    )
                    return self.deliver(version)
                return choice

    def commit(self, version: PolicyVersion, metrics: dict[str, float]) -> None:
        """Record that the learner trained the step that leads to ``version``."""
        if version == self.version:
            return  # said twice
        self._require_current(PolicyVersion(version.epoch, version.step - 1))
        if self.step not in self.deliveries:
            raise RefusedError(f"commit of step {self.step}, which was never delivered")
        self._record(Trained(version=version, metrics=metrics))
        if self.step == self.last_step:
            self._drop_live("run_ended")  # only a resumed run has any
        self._open_eval_if_due()

    def _require_current(self, version: PolicyVersion) -> None:
        if version != self.version:
            raise RefusedError(
                f"the learner speaks for {version.label}, the run stands at {self.version.label}"
            )

    # ---- checkpoints ---------------------------------------------------------

    def snapshot(self, version: PolicyVersion) -> LedgerSnapshot:
        """Return what a run needs to go on from the learner's present version."""
        self._require_current(version)
        return LedgerSnapshot(
            prompts=self.rules.prompts_fingerprint,
            problems=self.rules.problems_fingerprint,
            version=self.version,
            cursor=self.cursor,
            next_group_id=self.next_group_id,
            next_lease_id=self.next_lease_id,
            issued=self.issued,
            trained=self.trained,
            dropped={str(reason): count for reason, count in self.dropped.items()},
            lapsed_leases=dict(self.lapsed_leases),
            staleness=dict(self.staleness),
            eval_points=tuple(self.eval_points),
            open_rounds=tuple(self.eval_rounds),
            waiting=tuple(
                WaitingGroup(group_id=g.group_id, position=g.position, prompt=g.prompt)
                for g in self._untrained
            ),
        )

    def restore(self, snapshot: LedgerSnapshot) -> None:
        """Go on from a checkpoint; call it once, before anything else.

        Prompts that were in flight are asked again: none is skipped, none is asked twice.
        """
        if self.next_group_id or self.version.epoch:
            raise RefusedError("this run has begun already: a checkpoint can no longer be restored")
        self._record(Restored(snapshot=snapshot))

    # ---- events --------------------------------------------------------------

    def _record(self, event: LedgerEvent) -> None:
        self.apply(event)
        self._events.append(event)

    def apply(self, event: LedgerEvent) -> None:
        """Change the state; used by every command and by replay."""
        match event:
            case Issued() | Leased() | LeaseEnded() | Generated():
                self._apply_generation(event)
            case ScoringFailed(group_id=group_id, sibling=sibling):
                failed = self.groups[group_id].failed_scorings
                failed[sibling] = failed.get(sibling, 0) + 1
            case Scored(score=score):
                self._apply_score(score)
            case Dropped(group_id=group_id, reason=reason):
                self._apply_drop(group_id, reason)
            case EvalRoundOpened(step=step):
                self.eval_rounds[step] = EvalRound(step, self.rules.eval_plan.num_problems)
            case EvalRoundClosed(step=step):
                point = self.rules.eval_plan.point(self.eval_rounds.pop(step))
                insort(self.eval_points, point, key=lambda one: one.step)
            case StopPlanned(last_step=step, reason=reason):
                self.last_step, self.stop_reason = step, reason
            case Restored(snapshot=snapshot):
                self._apply_restored(snapshot)
            case TakenOver(version=version):
                self.version = version
            case Delivered(step=step, group_ids=group_ids):
                self.deliveries[step] = group_ids
                self.delivered_steps = step + 1
                for group_id in group_ids:
                    self.groups[group_id].delivered = True
            case Trained(version=version):
                self._apply_trained(version)

    def _apply_generation(self, event: Issued | Leased | LeaseEnded | Generated) -> None:
        match event:
            case Issued(group_id=group_id, item=item, prompt=prompt, eval_step=eval_step):
                samples = self.rules.eval_plan.section.samples
                size = self.rules.group_size if item == "train" else samples
                self.groups[group_id] = Group(
                    group_id, item, prompt, size, position=event.cursor, eval_step=eval_step
                )
                self.next_group_id = group_id + 1
                if item == "train":
                    self.cursor = event.cursor + 1
                    self.issued += 1
                else:
                    self.eval_rounds[eval_step].next_problem = event.cursor + 1
            case Leased(lease_id=lease_id, group_id=group_id, holder=holder):
                group = self.groups[group_id]
                if group.adopted_step < 0:
                    group.adopted_step = event.adopted_step
                group.attempts += 1
                group.lease_id = lease_id
                self.leases[lease_id] = Lease(lease_id, group_id, holder, expires_s=float("inf"))
                self.next_lease_id = lease_id + 1
            case LeaseEnded(lease_id=lease_id, reason=reason):
                lease = self.leases.pop(lease_id)
                self.groups[lease.group_id].lease_id = None
                self.lapsed_leases[reason] += 1
            case Generated(header=header):
                group = self.groups[header.group_id]
                group.headers[header.sibling] = header
                if not group.missing and group.lease_id is not None:
                    del self.leases[group.lease_id]
                    group.lease_id = None

    def _apply_score(self, score: Score) -> None:
        group = self.groups[score.group_id]
        group.scores[score.sibling] = score
        if group.item == "eval":
            if group.state == "ready":
                self._apply_eval_answers(group)
        elif score.reward is not None:
            self._sampled_reward += score.reward
            self._sampled_count += 1
            if group.state == "ready" and len(set(group.rewards)) > 1:
                self.drops_in_a_row = 0

    def _apply_eval_answers(self, group: Group) -> None:
        eval_round = self.eval_rounds[group.eval_step]
        headers = [group.headers[sibling] for sibling in range(group.size)]
        eval_round.answers[group.position] = [
            EvalAnswer(reward, header.num_response_tokens, header.finish_reason == "length")
            for reward, header in zip(group.rewards, headers, strict=True)
        ]
        for header in headers:
            eval_round.versions.update(run.version for run in header.version_runs)
        self._forget(group)

    def _apply_restored(self, snapshot: LedgerSnapshot) -> None:
        self.version = snapshot.version
        self.delivered_steps = snapshot.version.step
        self.cursor = snapshot.cursor
        self.next_group_id = snapshot.next_group_id
        self.next_lease_id = snapshot.next_lease_id
        self.issued = snapshot.issued
        self.trained = snapshot.trained
        self.dropped = Counter(snapshot.dropped)  # type: ignore[arg-type]  # reasons as text
        self.lapsed_leases = Counter(snapshot.lapsed_leases)
        self.staleness = Counter(snapshot.staleness)
        self.eval_points = list(snapshot.eval_points)
        for step in snapshot.open_rounds:
            self.eval_rounds[step] = EvalRound(step, self.rules.eval_plan.num_problems)
        for one in snapshot.waiting:
            self.groups[one.group_id] = Group(
                one.group_id, "train", one.prompt, self.rules.group_size, position=one.position
            )

    def _apply_drop(self, group_id: int, reason: DropReason) -> None:
        group = self.groups[group_id]
        if group.item == "eval":
            self.eval_rounds[group.eval_step].dropped.add(group.position)
        else:
            self.dropped[reason] += 1
            self.drops_in_a_row += 1
        self._forget(group)

    def _apply_trained(self, version: PolicyVersion) -> None:
        for group_id in self.deliveries.pop(version.step - 1):
            group = self.groups[group_id]
            for header in group.headers.values():
                for behavior, num_tokens in header.tokens_by_version():
                    lag = staleness_steps(learner_step=version.step - 1, behavior=behavior)
                    self.staleness[lag] += num_tokens
            self.trained += 1
            self._forget(group)
        self.version = version
        self._sampled_reward, self._sampled_count = 0.0, 0

    def _forget(self, group: Group) -> None:
        del self.groups[group.group_id]
        if group.lease_id is not None:
            del self.leases[group.lease_id]
        self._released.extend((group.group_id, sibling) for sibling in group.headers)

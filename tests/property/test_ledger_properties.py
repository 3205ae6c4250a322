"""No schedule of leases, answers, faults and deliveries breaks what the ledger promises.

Time is a number that rules move. Learners die and are replaced, generators adopt late, answers
come twice or after their lease; with the faults stopped, the run ends.
"""

from collections import Counter

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from broker.events import (
    Delivered,
    Issued,
    TakenOver,
    Trained,
    decode_event,
    decode_snapshot,
    encode_event,
    encode_snapshot,
)
from broker.groups import Lease
from broker.ledger import Ledger
from tests.unit.broker.ledger_driver import (
    eval_plan,
    header,
    make_ledger,
    make_rules,
    state_of,
)
from wire.control import LeasedGroup
from wire.errors import RefusedError
from wire.trajectory import Score
from wire.versions import PolicyVersion

PROFILE = settings(
    max_examples=100,
    stateful_step_count=60,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
GENERATORS = ("generator-0", "generator-1")
MAX_ATTEMPTS = 3


class Run(RuleBasedStateMachine):
    """A broker's ledger, two generators, a reward worker and a learner, at the mercy of rules."""

    @initialize(
        staleness=st.integers(0, 3),
        groups_per_step=st.integers(1, 3),
        group_size=st.integers(2, 3),
        total_steps=st.integers(1, 6),
        held_out=st.integers(0, 2),
        every_steps=st.integers(0, 2),
        samples=st.integers(1, 5),
        max_in_flight=st.sampled_from([100, 100, 0]),
        max_prompts=st.sampled_from([None, None, None, 9]),
    )
    def begin(
        self,
        staleness: int,
        groups_per_step: int,
        group_size: int,
        total_steps: int,
        held_out: int,
        every_steps: int,
        samples: int,
        max_in_flight: int,
        max_prompts: int | None,
    ) -> None:
        self.rules_of_run = make_rules(
            max_staleness_steps=staleness,
            groups_per_step=groups_per_step,
            group_size=group_size,
            total_steps=total_steps,
            max_attempts=MAX_ATTEMPTS,
            max_in_flight=max_in_flight or groups_per_step,
            plan=eval_plan(held_out, every_steps=every_steps, samples=samples),
            max_prompts=max_prompts,
        )
        self.ledger: Ledger = make_ledger(self.rules_of_run)
        self.now_s = 0.0
        self.adopted = dict.fromkeys(GENERATORS, PolicyVersion(0, 0))
        self.work: list[tuple[LeasedGroup, PolicyVersion]] = []  # granted, ended or not
        self.log: list[bytes] = []
        self.trained: Counter[int] = Counter()
        self.last_version = PolicyVersion(0, 0)
        self.take_over()
        self.adopted = dict.fromkeys(GENERATORS, self.ledger.version)

    # ---- what the roles do ---------------------------------------------------

    def take_over(self) -> None:
        self.ledger.take_over(self.ledger.step)
        # as generators do: nothing sampled under the old epoch will be accepted
        for holder in GENERATORS:
            self.ledger.release_all(holder, "weights of another epoch")

    @rule()
    def learner_dies_and_is_replaced(self) -> None:
        self.take_over()

    @rule(holder=st.sampled_from(GENERATORS))
    def adopt_newest(self, holder: str) -> None:
        self.adopted[holder] = self.ledger.version

    @rule(holder=st.sampled_from(GENERATORS), room=st.integers(1, 12))
    def lease(self, holder: str, room: int) -> None:
        adopted = self.adopted[holder]
        granted = self.ledger.lease(holder, adopted, max_sequences=room, now_s=self.now_s)
        assert sum(len(group.siblings) for group in granted) <= room
        self.work.extend((group, adopted) for group in granted)

    @precondition(lambda self: self.work)
    @rule(data=st.data(), newest_too=st.booleans())
    def submit(self, data: st.DataObject, newest_too: bool) -> None:
        group, adopted = data.draw(st.sampled_from(self.work))
        sibling = data.draw(st.sampled_from(group.siblings))
        self._submit(group, sibling, adopted, newest_too=newest_too)

    @precondition(lambda self: self.work)
    @rule(data=st.data())
    def submit_twice(self, data: st.DataObject) -> None:
        group, adopted = data.draw(st.sampled_from(self.work))
        self._submit(group, group.siblings[0], adopted, newest_too=False)
        before = state_of(self.ledger)
        self._submit(group, group.siblings[0], adopted, newest_too=False)
        assert state_of(self.ledger) == before

    def _submit(
        self, group: LeasedGroup, sibling: int, adopted: PolicyVersion, *, newest_too: bool
    ) -> None:
        versions = [adopted]
        if newest_too and self.ledger.version > adopted:
            versions.append(self.ledger.version)
        try:
            self.ledger.submit(header(group.group_id, sibling, *versions, lease_id=group.lease_id))
        except RefusedError:
            return  # it ended, or belongs to an older learner

    @rule(data=st.data(), reward=st.sampled_from([0.0, 0.0, 1.0, None]))
    def score(self, data: st.DataObject, reward: float | None) -> None:
        waiting = self._unscored()
        if not waiting:
            return
        group_id, sibling = data.draw(st.sampled_from(waiting))
        why = "raised" if reward is None else ""
        score = Score(
            group_id=group_id, sibling=sibling, lease_id=0, reward=reward, unavailable=why
        )
        self.ledger.score(score)
        self.ledger.score(score)

    def _unscored(self) -> list[tuple[int, int]]:
        return [
            (group.group_id, sibling)
            for group in self.ledger.groups.values()
            for sibling in sorted(group.headers)
            if sibling not in group.scores
        ]

    @rule(seconds=st.floats(0.0, 30.0))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        self.ledger.expire(self.now_s)

    @rule(stragglers=st.integers(0, 2), newest_too=st.booleans())
    def all_but_the_oldest_work_is_done(self, stragglers: int, newest_too: bool) -> None:
        for group, adopted in self.work[stragglers:]:
            for sibling in group.siblings:
                self._submit(group, sibling, adopted, newest_too=newest_too)
        self.work = self.work[:stragglers]
        self._score_all()

    @rule(stragglers=st.integers(0, 2), adopts=st.booleans())
    def the_pipeline_turns_once(self, stragglers: int, adopts: bool) -> None:
        if adopts:
            self.adopt_newest(GENERATORS[0])
        self.lease(GENERATORS[0], 100)
        self.all_but_the_oldest_work_is_done(stragglers, newest_too=True)
        self._deliver(commits=1)

    @rule()
    def everything_is_scored(self) -> None:
        self._score_all()

    def _score_all(self) -> None:
        for group_id, sibling in self._unscored():
            value = group_id * 10.0 + sibling
            self.ledger.score(Score(group_id=group_id, sibling=sibling, lease_id=0, reward=value))

    @rule(holder=st.sampled_from(GENERATORS))
    def generator_restarts(self, holder: str) -> None:
        self.ledger.release_all(holder, "restarted")

    @precondition(lambda self: self.ledger.leases)
    @rule(data=st.data())
    def reject(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(sorted(self.ledger.leases.values(), key=_lease_id)))
        self.ledger.reject(lease.holder, lease.lease_id, "overlong_prompt")

    @precondition(lambda self: self.ledger.step >= 2)
    @rule()
    def somebody_ends_the_run(self) -> None:
        self.ledger.plan_stop("enough")

    @rule()
    def goes_on_from_a_checkpoint(self) -> None:
        """Everybody dies; a new broker has what a checkpoint of this moment keeps."""
        before = self.ledger
        restored = make_ledger(self.rules_of_run)
        self.stored_events_tell_one_story()
        snapshot = decode_snapshot(encode_snapshot(before.snapshot(before.version)))
        restored.restore(snapshot)
        assert restored.unaccounted() == 0
        kept = (restored.issued, restored.trained, restored.dropped, restored.cursor)
        assert kept == (before.issued, before.trained, before.dropped, before.cursor)
        self.ledger, self.work, self.log, self.delivered = restored, [], [], {}
        self.take_over()
        self.adopted = dict.fromkeys(GENERATORS, self.ledger.version)

    @rule(commits=st.sampled_from([0, 1, 1, 2]))
    def deliver_and_commit(self, commits: int) -> None:
        self._deliver(commits)

    def _deliver(self, commits: int) -> None:
        version = self.ledger.version
        batch = self.ledger.deliver(version)
        if not isinstance(batch, list):
            return
        ids = [group.group_id for group in batch]
        again = self.ledger.deliver(version)
        assert isinstance(again, list)
        assert [group.group_id for group in again] == ids
        assert len(ids) == self.rules_of_run.bound.groups_per_step
        for _ in range(commits):
            self.ledger.commit(version.next(), {})

    # ---- what holds at every moment ------------------------------------------

    @invariant()
    def every_group_is_accounted_for(self) -> None:
        assert self.ledger.unaccounted() == 0
        live = [group for group in self.ledger.groups.values() if group.item == "train"]
        assert len(live) <= self.rules_of_run.max_in_flight

    @invariant()
    def no_trained_token_is_older_than_the_bound(self) -> None:
        bound = self.rules_of_run.bound.max_staleness_steps
        assert all(0 <= lag <= bound for lag in self.ledger.staleness)

    @invariant()
    def what_waits_can_still_be_trained_in_time(self) -> None:
        bound = self.rules_of_run.bound
        due = [bound.deadline(group.adopted_step) for group in self.ledger.live]
        step = self.ledger.delivered_steps
        assert all(deadline >= step for deadline in due)
        for last in range(step, step + bound.max_staleness_steps + 1):
            fits = (last - step + 1) * bound.groups_per_step
            assert sum(deadline <= last for deadline in due) <= fits

    @invariant()
    def stored_events_tell_one_story(self) -> None:
        events, _ = self.ledger.drain()
        delivered: dict[int, tuple[int, ...]] = getattr(self, "delivered", {})
        for event in events:
            match event:
                case TakenOver(version=version) | Trained(version=version):
                    assert version > self.last_version
                    self.last_version = version
                    self.trained.update(delivered.pop(version.step - 1, ()))
                case Delivered(step=step, group_ids=group_ids):
                    assert step not in delivered
                    delivered[step] = group_ids
                case Issued(cursor=cursor, item="train"):
                    assert cursor == self.ledger_cursor
                    self.ledger_cursor = cursor + 1
        self.delivered = delivered
        self.log.extend(encode_event(event) for event in events)
        assert all(count == 1 for count in self.trained.values())
        assert sum(self.trained.values()) == self.ledger.trained

    ledger_cursor = 0

    # ---- and at the end ------------------------------------------------------

    def teardown(self) -> None:
        if not hasattr(self, "ledger"):
            return
        self._finish_without_faults()
        self.stored_events_tell_one_story()
        self.every_group_is_accounted_for()
        self.no_trained_token_is_older_than_the_bound()
        assert self.ledger.finished
        rules = self.rules_of_run
        assert self.ledger.trained == self.ledger.step * rules.bound.groups_per_step
        assert self.ledger.step == rules.total_steps or self.ledger.stop_reason
        assert self.ledger.groups == {}
        rebuilt = make_ledger(rules)
        for stored in self.log:
            rebuilt.apply(decode_event(stored))
        assert state_of(rebuilt) == state_of(self.ledger)

    def _finish_without_faults(self) -> None:
        """One generator works, everything is scored, the learner trains: it has to end."""
        for _ in range(200):
            if self.ledger.finished:
                return
            self.now_s += 1_000.0  # whoever fell silent lets go
            self.ledger.expire(self.now_s)
            holder = GENERATORS[0]
            adopted = self.ledger.version
            for group in self.ledger.lease(holder, adopted, max_sequences=100, now_s=self.now_s):
                for sibling in group.siblings:
                    self.ledger.submit(header(group.group_id, sibling, adopted))
            self._score_all()
            self._deliver(commits=1)


def _lease_id(lease: Lease) -> int:
    return lease.lease_id


TestRun = Run.TestCase
TestRun.settings = PROFILE

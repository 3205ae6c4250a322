"""No schedule of leases, answers, faults and deliveries breaks what the ledger promises.

Time is a number that rules move. Learners die and go back to a checkpoint, the broker dies and
reads its snapshot and events, generators adopt late and are stopped, answers come twice, late and
out of order, batches are fetched ahead and rejected; with the faults stopped, the run ends.
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

from broker.book import LedgerRules, decode_state, encode_state
from broker.events import (
    Delivered,
    Evicted,
    Issued,
    Requeued,
    Retried,
    TakenOver,
    Trained,
    Unbound,
    decode_event,
    encode_event,
)
from broker.groups import Lease
from broker.index import GroupIndex
from broker.ledger import Ledger
from tests.unit.broker.ledger_driver import (
    eval_plan,
    header,
    make_ledger,
    make_rules,
    state_of,
    submit,
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
        min_groups=st.integers(1, 3),
        reserves=st.sampled_from([True, True, True, False]),
        replay_budget=st.sampled_from([1_000_000, 1_000_000, 100, 0]),
        high_water=st.sampled_from([1_000_000, 50]),
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
        min_groups: int,
        reserves: bool,
        replay_budget: int,
        high_water: int,
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
            min_groups=min(min_groups, groups_per_step),
            reserves=reserves,
            replay_budget_bytes=replay_budget,
            high_water_bytes=high_water,
        )
        self.ledger: Ledger = make_ledger(self.rules_of_run)
        self.now_s = 0.0
        self.adopted = dict.fromkeys(GENERATORS, PolicyVersion(0, 0))
        self.work: list[tuple[LeasedGroup, PolicyVersion]] = []  # granted, ended or not
        self.snapshot = encode_state(self.ledger.state)
        self.log: list[bytes] = []  # events after the snapshot
        self.stored: set[tuple[int, int]] = set()  # payloads
        self.put: set[tuple[int, int]] = set()  # payloads that go with the events not stored yet
        self.lineage: dict[int, tuple[int, ...]] = {}  # step -> groups in the weights
        self.batches: dict[int, tuple[int, ...]] = {}
        self.checkpoints = [0]  # steps; the first is the model that the run begins with
        self.last_version = PolicyVersion(0, 0)
        self.ledger_cursor = 0
        self.position_of: dict[int, int] = {}  # group -> prompt
        self.take_over(0)
        self.adopted = dict.fromkeys(GENERATORS, self.ledger.version)

    # ---- what the roles do ---------------------------------------------------

    def take_over(self, step: int) -> None:
        self.ledger.take_over(step)
        self.checkpoints = [one for one in self.checkpoints if one <= step]

    @rule(back=st.integers(0, 2))
    def learner_dies_and_is_replaced(self, back: int) -> None:
        """It goes on from its newest checkpoint, or an older one if that is broken."""
        known = [step for step in self.checkpoints if self.ledger.can_go_back_to(step)]
        self.take_over(known[max(0, len(known) - 1 - back)])

    @rule()
    def learner_saves(self) -> None:
        """And keeps two checkpoints."""
        step = self.ledger.step
        if step in self.checkpoints:
            return
        self.checkpoints = [*self.checkpoints, step][-2:]
        for _ in range(2):
            self.ledger.seal(self.ledger.version, step, min(self.checkpoints))

    @rule(cuts_log=st.booleans())
    def broker_dies_and_is_replaced(self, cuts_log: bool) -> None:
        """What it had acknowledged is in its store; whoever asked meanwhile asks again."""
        self.stored_events_tell_one_story()
        if cuts_log:
            self.snapshot, self.log = encode_state(self.ledger.state), []
        rebuilt = self._rebuilt()
        assert state_of(rebuilt) == state_of(self.ledger)
        rebuilt.restarted(self.now_s)
        assert rebuilt.drain() == ([], [])
        assert rebuilt.expire(self.now_s) == 0, "every lease has a full term again"
        self.ledger = rebuilt

    def _rebuilt(self, rules: LedgerRules | None = None) -> Ledger:
        rebuilt = make_ledger(rules or self.rules_of_run, decode_state(self.snapshot))
        for stored in self.log:
            rebuilt.apply(decode_event(stored))
        return rebuilt

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
            one = header(group.group_id, sibling, *versions, lease_id=group.lease_id)
            if submit(self.ledger, one, num_bytes=20):
                self.put.add((group.group_id, sibling))
        except RefusedError:
            return  # it ended, or an abandoned learner's weights chose a token of it

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
    @rule(drops=st.booleans())
    def somebody_looks_at_the_dead_letters(self, drops: bool) -> None:
        letters = list(self.ledger.state.dead_letters)[:3]
        if drops:
            self.ledger.drop_letters(letters)
        else:
            done, _ = self.ledger.retry(letters)
            assert not set(done) & set(self.ledger.state.dead_letters)

    @rule()
    def somebody_ends_the_run(self) -> None:
        self.ledger.plan_stop("enough")

    @rule()
    def goes_on_from_a_checkpoint(self) -> None:
        """Everybody dies; a new broker has what a checkpoint of this moment keeps, and no more."""
        before = self.ledger
        self.stored_events_tell_one_story()
        self.snapshot = encode_state(before.snapshot(before.version))
        restored = make_ledger(self.rules_of_run, decode_state(self.snapshot))
        assert restored.unaccounted() == 0
        for figure in ("issued", "trained", "dropped", "cursor"):
            assert getattr(restored.state, figure) == getattr(before.state, figure)
        assert restored.state.sealed == restored.state.trained
        self.ledger, self.work, self.log, self.batches = restored, [], [], {}
        self.stored.clear()
        self.checkpoints = [before.step]
        self.take_over(before.step)
        self.adopted = dict.fromkeys(GENERATORS, self.ledger.version)

    @rule(ahead=st.booleans(), commits=st.sampled_from([0, 1, 1, 2]))
    def deliver_and_commit(self, ahead: bool, commits: int) -> None:
        self._deliver(commits, ahead=ahead)

    @rule(data=st.data(), ahead=st.booleans())
    def learner_rejects_a_batch(self, data: st.DataObject, ahead: bool) -> None:
        step = self.ledger.step + ahead
        batch = self.ledger.state.batches.get(step)
        if batch is None:
            return
        named = data.draw(st.sets(st.sampled_from(batch), min_size=1))
        for _ in range(2):
            self.ledger.reject_batch(self.ledger.version, step, "nonfinite", named)

    def _deliver(self, commits: int, *, ahead: bool = False) -> None:
        version = self.ledger.version
        batch = self.ledger.deliver(version)
        if not isinstance(batch, list):
            return
        if ahead:
            self.ledger.deliver(version, version.step + 1)
        again = self.ledger.deliver(version)
        assert again == batch
        size = self.rules_of_run.bound.groups_per_step
        assert len(batch) == size or self.ledger.out_of_prompts
        assert len(batch) >= self.rules_of_run.min_groups
        self.stored_events_tell_one_story()
        assert {key for group in batch for key in group.trajectory_keys()} <= self.stored
        for _ in range(commits):
            self.ledger.commit(version.next(), {})

    # ---- what holds at every moment ------------------------------------------

    @invariant()
    def every_group_is_accounted_for(self) -> None:
        self.stored_events_tell_one_story()
        ledger, rules = self.ledger, self.rules_of_run
        assert ledger.unaccounted() == 0
        groups = [group for group in ledger.groups.values() if group.item == "train"]
        counted = Counter({state: n for state, n in ledger.in_flight().items() if n})
        assert counted == Counter(group.state for group in groups)
        assert ledger.state.trained == sum(map(len, self.lineage.values()))
        live = [group for group in groups if group.is_live]
        taken_apart = 2 * rules.bound.groups_per_step  # batches whose groups wait again
        assert len(live) <= rules.max_in_flight + taken_apart
        bytes_held = sum(group.num_bytes for group in ledger.groups.values())
        assert ledger.state.untrained_bytes == bytes_held
        assert ledger.state.replay_bytes <= rules.replay_budget_bytes
        assert ledger.state.sealed <= ledger.state.trained

    @invariant()
    def the_views_are_what_a_walk_over_all_groups_would_find(self) -> None:
        index = self.ledger.index
        fresh = GroupIndex(self.rules_of_run.bound, self.ledger.groups.values())
        counts = ("num_siblings", "num_generated", "num_scored")
        for view in ("due", "ready", "num_live", *counts):
            assert getattr(index, view) == getattr(fresh, view), view
        assert set(index.again) == set(fresh.again)
        assert set(index.fresh) == set(fresh.fresh)
        holders = Counter(lease.holder for lease in self.ledger.leases.values())
        assert {name: len(held) for name, held in self.ledger.by_holder.items()} == holders

    @invariant()
    def no_trained_token_is_older_than_the_bound(self) -> None:
        bound = self.rules_of_run.bound.max_staleness_steps
        assert all(0 <= lag <= bound for lag in self.ledger.state.staleness)

    @invariant()
    def what_waits_can_still_be_trained_in_time(self) -> None:
        bound = self.rules_of_run.bound
        if not bound.reserves:
            return
        due = [bound.deadline(g.adopted_step) for g in self.ledger.groups.values() if g.is_live]
        step, booked = self.ledger.free_step, self.ledger.state.batches
        assert all(deadline >= step for deadline in due)
        for last in range(step, max(due, default=step) + 1):
            assert sum(deadline <= last for deadline in due) <= bound.fits(step, last, booked)

    @invariant()
    def stored_events_tell_one_story(self) -> None:
        """And every group is trained once in the history of the learner's weights."""
        events, released = self.ledger.drain()
        for event in events:
            match event:
                case TakenOver(version=version):
                    assert version > self.last_version
                    self.last_version = version
                    self._go_back(version.step)
                case Trained(version=version):
                    assert version > self.last_version
                    self.last_version = version
                    self.lineage[version.step - 1] = self.batches.pop(version.step - 1)
                case Delivered(step=step, group_ids=group_ids):
                    assert step not in self.batches
                    self.batches[step] = group_ids
                case Unbound(step=step):
                    del self.batches[step]
                case Evicted(step=step):
                    assert step in self.lineage
                case Issued(cursor=cursor, item="train", group_id=group_id):
                    assert cursor == self.ledger_cursor
                    self.ledger_cursor = cursor + 1
                    self.position_of[group_id] = cursor
                case Retried(group_id=group_id, of=old):
                    self.position_of[group_id] = self.position_of[old]
                case Requeued(group_id=group_id, of=old, position=position):
                    assert self.position_of[old] == position
                    self.position_of[group_id] = position
        self.log.extend(encode_event(event) for event in events)
        self.stored |= self.put
        self.stored -= set(released)
        self.put = set()
        trained = Counter(group_id for batch in self.lineage.values() for group_id in batch)
        assert all(count == 1 for count in trained.values())
        positions = [self.position_of[group_id] for group_id in trained]
        assert len(set(positions)) == len(positions), "a prompt was trained twice"
        assert self.batches == self.ledger.state.batches
        bound = {group_id for batch in self.batches.values() for group_id in batch}
        assert not bound & set(trained)
        held = [*self.ledger.groups.values()]
        held += [group for groups in self.ledger.state.replay.values() for group in groups]
        assert self.stored == {key for group in held for key in group.trajectory_keys()}

    def _go_back(self, step: int) -> None:
        """What was trained from this step on is bound again, or on its way again."""
        for lost in [one for one in self.lineage if one >= step]:
            batch = self.lineage.pop(lost)
            if self.ledger.state.batches.get(lost) == batch:
                self.batches[lost] = batch
            else:
                assert all(group_id not in self.batches.get(lost, ()) for group_id in batch)

    # ---- and at the end ------------------------------------------------------

    def teardown(self) -> None:
        if not hasattr(self, "ledger"):
            return
        self._finish_without_faults()
        self.stored_events_tell_one_story()
        self.every_group_is_accounted_for()
        self.no_trained_token_is_older_than_the_bound()
        assert self.ledger.finished
        assert not self.ledger.over
        self.ledger.learner_leaves()
        assert self.ledger.over
        self.stored_events_tell_one_story()
        rules, state = self.rules_of_run, self.ledger.state
        assert self.ledger.groups == {}
        assert state.issued == state.trained + state.dropped.total()
        full = self.ledger.step * rules.bound.groups_per_step
        assert state.trained == full or self.ledger.out_of_prompts
        assert self.ledger.step == rules.total_steps or state.stop_reason
        if rules.bound.reserves and not state.stop_reason:
            assert not state.dropped["run_ended"], "more was issued than could be trained"
            assert not state.dropped["stale"]
        assert state_of(self._rebuilt()) == state_of(self.ledger)
        others = make_rules(group_size=7, max_staleness_steps=9, plan=eval_plan(1, samples=6))
        assert state_of(self._rebuilt(others)) == state_of(self.ledger), "settings are in no event"

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
                    submit(self.ledger, header(group.group_id, sibling, adopted))
                    self.put.add((group.group_id, sibling))
            self._score_all()
            self._deliver(commits=1, ahead=True)


def _lease_id(lease: Lease) -> int:
    return lease.lease_id


TestRun = Run.TestCase
TestRun.settings = PROFILE

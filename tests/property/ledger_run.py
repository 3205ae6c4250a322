"""A run's ledger at the mercy of rules: every role can die, and so can all of them at once.

Time is a number that rules move. Learners die and go back to a checkpoint, the broker dies before
or after what it was asked is durable, generators adopt late and are stopped, answers come twice,
late, out of order and from lives that were given up, batches are fetched ahead and rejected.
Everything dies and resumes: with its store, with one that lost its end, without one; from the
newest checkpoint that is whole, from an older one. The beginning of a broker, the choice of a
checkpoint and what is kept of them are the product's; the store is in this process, checkpoints are
small folders.

The machine keeps a book of its own. In it weights are *nodes* of a tree, one for each time that a
step was trained; the ledger knows labels (v2.7), and no label may ever name two nodes. One node may
have several labels: every learner that takes over names anew what it holds. A ledger knows those of
its own account: one that begins apart, from what a checkpoint keeps, knows nothing of what was
granted after that was saved.
"""

import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from slipstream.broker.config import BrokerSettings, broker_settings
from slipstream.broker.data.mixture import PromptSource
from slipstream.broker.data.prompts import Prompts
from slipstream.broker.identity import write_identity
from slipstream.broker.ledger.commands import Ledger
from slipstream.broker.ledger.effects import apply
from slipstream.broker.ledger.events import (
    Delivered,
    Evicted,
    Generated,
    Issued,
    Leased,
    LedgerEvent,
    Requeued,
    Retried,
    TakenOver,
    Trained,
    Unbound,
    decode_event,
    encode_event,
)
from slipstream.broker.ledger.groups import Group, Lease
from slipstream.broker.ledger.index import GroupIndex
from slipstream.broker.ledger.state import BookState, LedgerRules, decode_state, encode_state
from slipstream.broker.ledger.throttle import Throttle
from slipstream.broker.run_ledger import build_ledger
from slipstream.broker.startup import StartState, start_run
from slipstream.broker.store.base import Changes, StoredTrajectory
from slipstream.deploy.launch.resume import find_resume_point
from slipstream.learner.checkpoints.digests import DIGESTS_FILE, damage_of, write_digests
from slipstream.learner.checkpoints.resume import resume_order
from slipstream.learner.checkpoints.retention import Resumption, is_overtaken, to_remove
from slipstream.wire.errors import ConfigError, RefusedError
from slipstream.wire.files.checkpoints import (
    INFO_FILE,
    LEDGER_FILE,
    CheckpointInfo,
    checkpoint_name,
    ledger_file,
    read_checkpoint_info,
    read_ledger,
    readable_checkpoints,
)
from slipstream.wire.files.run_folder import TRAIL
from slipstream.wire.messages.broker import LeasedGroup
from slipstream.wire.messages.trajectory import Prompt, Score, TrajectoryHeader, TrajectoryKey
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.settings.load import load_table
from slipstream.wire.settings.sections import CheckpointSection, EvalSection, StalenessTargetTable
from tests.support.checkpoint_infos import checkpoint_info
from tests.support.ledger_driver import LEASE_S, eval_plan, header, make_rules, state_of, submit
from tests.support.memory_store import MemoryStore, SharedMemory

GENERATORS = ("generator-0", "generator-1")
MAX_ATTEMPTS = 3
ROWS = 9
KEPT_CHECKPOINTS = CheckpointSection(keep_last=2)
WORK_REMEMBERED = 60  # grants, so that answers of lives long gone come, too
DAMAGES = ("tensors", "cut tensors", "info", "digests", "ledger", "cut ledger")
T = TypeVar("T")


@dataclass(frozen=True, eq=False, repr=False)
class Node:
    """Weights: those that a step made of others; the root is what the run begins with."""

    parent: "Node | None" = None
    batch: tuple[int, ...] = ()  # groups
    depth: int = 0  # learner steps

    def after(self, batch: tuple[int, ...]) -> "Node":
        """Return what a step makes of these; another one each time that it is trained."""
        return Node(self, batch, self.depth + 1)

    def path(self) -> list["Node"]:
        """Return the steps from the first to this one."""
        nodes, node = [], self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def at(self, depth: int) -> "Node":
        """Return the ancestor after so many steps."""
        node = self
        while node.depth > depth and node.parent is not None:
            node = node.parent
        return node

    def descends_from(self, other: "Node") -> bool:
        """Return whether the other weights are these or among their ancestors."""
        return self.at(other.depth) is other


@dataclass
class Book:
    """What the machine believes of what the store holds."""

    node: Node
    batches: dict[int, tuple[int, ...]] = field(default_factory=dict)
    cursor: int = 0
    recorded: frozenset[int] = frozenset()  # groups that are delivered again, as they were before
    epochs: frozenset[int] = frozenset({0})  # granted in this account; no other label is known


def now(work: Coroutine[Any, Any, T]) -> T:
    """Run what waits for nothing: with a store in memory nothing does."""
    try:
        work.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("it waits")


def base_settings() -> BrokerSettings:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.jsonl").write_text('{"prompt": "", "ground_truth": ""}\n')
        (Path(folder) / "run.toml").write_text("")
        table = load_table(Path(folder) / "run.toml", [f"data.file={folder}/train.jsonl"])
        return broker_settings(table)


class Run(RuleBasedStateMachine):
    """A broker's ledger, two generators, a reward worker and a learner, at the mercy of rules."""

    base: BrokerSettings | None = None
    begun: ClassVar[Counter[str]] = Counter()  # what happened in all schedules of this process

    @initialize(
        staleness=st.integers(0, 3),
        groups_per_step=st.integers(1, 3),
        group_size=st.integers(2, 3),
        total_steps=st.integers(1, 6),
        held_out=st.integers(0, 2),
        every_steps=st.integers(0, 2),
        samples=st.integers(1, 5),
        max_in_flight=st.sampled_from([100, 100, 0]),
        epochs=st.sampled_from([0, 0, 0, 1]),
        min_groups=st.integers(1, 3),
        reserves=st.sampled_from([True, True, True, False]),
        replay_budget=st.sampled_from([1_000_000, 1_000_000, 100, 0]),
        high_water=st.sampled_from([1_000_000, 50]),
        has_target=st.booleans(),
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
        epochs: int,
        min_groups: int,
        reserves: bool,
        replay_budget: int,
        high_water: int,
        has_target: bool = False,
    ) -> None:
        Run.base = Run.base or base_settings()
        self.folder = Path(tempfile.mkdtemp(prefix="ledger-run-"))
        run = msgspec.structs.replace(
            Run.base.run,
            dir=str(self.folder),
            steps=total_steps,
            epochs=float(epochs),
            group_size=group_size,
            groups_per_step=groups_per_step,
            max_staleness_steps=staleness,
            staleness_mode="wait" if reserves else "drop",
            min_groups=min(min_groups, groups_per_step),
            staleness_target=StalenessTargetTable(p95_lag=0 if has_target and staleness else None),
        )
        broker = msgspec.structs.replace(
            Run.base.broker,
            max_attempts=MAX_ATTEMPTS,
            max_in_flight=max_in_flight or groups_per_step,
            lease_s=LEASE_S,
            replay_budget_bytes=replay_budget,
            high_water_bytes=high_water,
        )
        section = EvalSection(file="held_out.jsonl", every_steps=every_steps, samples=samples)
        self.settings = msgspec.structs.replace(
            Run.base, run=run, broker=broker, eval=section if held_out else EvalSection()
        )
        rows = [Prompt(prompt=f"train {i}", ground_truth=str(i)) for i in range(ROWS)]
        problems = [
            Prompt(prompt=f"held out {i}", ground_truth=str(i), data_source="held_out")
            for i in range(held_out)
        ]
        self.prompts = Prompts(PromptSource([rows], seed=0), problems)
        (self.settings.run.folder / TRAIL).mkdir(parents=True)

        self.now_s = 0.0
        self.num_spare = 0  # groups that were begun in the place of others that did not come
        self.shared = SharedMemory()
        self.past: list[tuple[SharedMemory, Book]] = []  # what the store held lately
        root = Node()
        self.book = Book(root)
        self.held = root  # weights of the learner that takes over
        self.held_version = PolicyVersion(0, 0)  # the label under which they were saved
        self.weights_of = {PolicyVersion(0, 0): root}  # of every label that there ever was
        self.epochs_at: dict[PolicyVersion, frozenset[int]] = {}  # known to what was saved as this
        self.headers: dict[int, dict[int, TrajectoryHeader]] = {}
        self.position_of: dict[int, int] = {}  # group -> prompt, over all lives
        self.lease_ids: set[int] = set()  # over all lives
        self.epochs: set[int] = set()  # that a learner was given
        self.last_version = PolicyVersion(0, 0)
        self.put: set[TrajectoryKey] = set()  # goes with the events that are not stored yet
        self.next_event = 0  # of the trail, which outlives the store
        self.work: list[tuple[LeasedGroup, PolicyVersion]] = []  # granted, ended or not
        self.adopted = dict.fromkeys(GENERATORS, PolicyVersion(0, 0))
        self.incarnation = 0
        self.was_stopped = False  # by somebody, in any life
        self.resumption: Resumption | None = None
        self.begun_after: int | None = None  # the newest epoch of a checkpoint at the last resume
        Run.begun["schedules"] += 1
        self._begin()
        self._learner_starts(None)
        self.adopted = dict.fromkeys(GENERATORS, self.ledger.book.version)

    # ---- processes begin -----------------------------------------------------

    @property
    def rules_of_run(self) -> LedgerRules:
        return self.ledger.book.rules

    def _begin(self, *, restarted: bool = False) -> StartState:
        """A broker starts; what its store holds is its ledger."""
        self.store = MemoryStore(self.shared)
        beginning = now(
            start_run(
                self.settings,
                self.prompts,
                self.store,
                restarted=restarted,
                first_event=self.next_event,
            )
        )
        self.ledger, self.identity = beginning.ledger, beginning.identity
        self.next_event = min(self.next_event, self.ledger.book.state.num_events)  # it is cut there
        self.put = set()
        self.ledger.restarted(self.now_s)
        assert self.ledger.drain() == ([], [])
        assert self.ledger.expire(self.now_s) == 0, "every lease has a full term again"
        return beginning

    def _learner_starts(self, checkpoint: Path | None, *, again: bool | None = None) -> None:
        """A learner loads a checkpoint, or what the run begins with, and takes over.

        Args:
            checkpoint: that it loads.
            again: the broker dies before it answers, after (True) or before that is durable.

        Raises:
            RefusedError: the broker knows nothing of such weights.
        """
        info = read_checkpoint_info(checkpoint) if checkpoint is not None else None
        self.held_version = info.version if info is not None else PolicyVersion(0, 0)
        self.held = self.weights_of[self.held_version]
        self.incarnation += 1
        version = self._take_over(info)
        if again is not None:
            self._broker_dies(is_durable=again)
            asked_again = self._take_over(info)
            assert not again or version == asked_again, "asked twice, granted twice"
            version = asked_again
        self._store_events()
        assert version.epoch not in self.epochs, "an epoch was granted twice"
        self.epochs.add(version.epoch)
        self.resumption = None
        if info is None:
            return
        self.resumption = Resumption(info.version, version.epoch)
        if is_overtaken(list(self._infos().values()), self.resumption):
            self._save()
        else:
            self._seal()

    def _take_over(self, info: CheckpointInfo | None) -> PolicyVersion:
        version = self.ledger.training.take_over(
            info.step if info is not None else 0,
            learner=f"learner-{self.incarnation}",
            held=info.version if info is not None else None,
        )
        if version.epoch > self.identity.epoch:  # on disk before anybody may use it
            self.identity = self.identity.granted(version.epoch)
            write_identity(self.settings.run.folder, self.identity)
        return version

    def _broker_dies(self, *, is_durable: bool, cuts_log: bool = False) -> None:
        """And another one starts, with what the store holds.

        Args:
            is_durable: what it has done of late is in the store; else it is as if it was not.
            cuts_log: it had written a snapshot.
        """
        if is_durable:
            self._store_events()
            if cuts_log:
                now(self.store.commit(Changes(snapshot=encode_state(self.ledger.book.state))))
            before = state_of(self.ledger)
        else:
            before = self._replayed().book.state
        self._begin(restarted=True)
        found = state_of(self.ledger)
        found.granted_epoch = before.granted_epoch = max(self.epochs, default=0)
        assert found == before, "a broker that starts again knows what was acknowledged"

    def _replayed(self, rules: LedgerRules | None = None) -> Ledger:
        """What snapshot and events make, under these settings or others."""
        assert self.shared.snapshot is not None
        ledger = build_ledger(self.settings, self.prompts, decode_state(self.shared.snapshot))
        if rules is not None:
            ledger = Ledger(
                rules,
                prompt_at=self.prompts.training.at,
                eval_prompt_at=self.prompts.held_out.__getitem__,
                state=decode_state(self.shared.snapshot),
            )
        for stored in self.shared.events:
            apply(ledger.book, decode_event(stored))
        return ledger

    # ---- checkpoints ---------------------------------------------------------

    def _infos(self) -> dict[Path, CheckpointInfo]:
        return readable_checkpoints(self.settings.run.checkpoints)

    def _whole(self) -> list[Path]:
        return [path for path in self._infos() if not _damage_of(path)]

    def _save(self) -> None:
        self._store_events()
        version = self.ledger.book.version
        path = self.settings.run.checkpoints / checkpoint_name(version.step)
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        info = checkpoint_info(
            version, run_name=self.settings.run.name, run_id=self.identity.run_id, has_digests=True
        )
        self.epochs_at[version] = self.book.epochs
        (path / INFO_FILE).write_bytes(msgspec.json.encode(info))
        ledger = ledger_file(encode_state(self.ledger.training.snapshot(version)))
        (path / LEDGER_FILE).write_bytes(ledger)
        (path / "tensors").write_text(f"weights of {version.label}")
        write_digests(path)
        infos = self._infos()
        gone = to_remove(
            list(infos.values()), KEPT_CHECKPOINTS, self.settings.eval, resumption=self.resumption
        )
        for old in [old for old, info in infos.items() if info in gone]:
            shutil.rmtree(old)
        self._seal()

    def _seal(self) -> None:
        version = self.ledger.book.version
        oldest = min((info.step for info in self._infos().values()), default=version.step)
        for _ in range(2):
            self.ledger.training.seal(version, version.step, min(oldest, version.step))

    @rule()
    def learner_saves(self) -> None:
        """And keeps two checkpoints; what it has saved it does not save anew."""
        if self.ledger.book.version not in [info.version for info in self._infos().values()]:
            self._save()

    @precondition(lambda self: len(self._whole()) >= 2)
    @rule(how=st.sampled_from(DAMAGES))
    def newest_checkpoint_is_damaged(self, how: str) -> None:
        """And at least one other is whole."""
        infos = self._infos()
        path = max(self._whole(), key=lambda path: infos[path].version)
        _damage(path, how)
        assert path not in self._whole(), f"damage to {how} is not noticed"

    # ---- deaths --------------------------------------------------------------

    @rule(again=st.sampled_from([None, None, True, False]))
    def learner_dies_and_is_replaced(self, again: bool | None) -> None:
        """It resumes from the newest checkpoint that is whole and of ancestors of its weights."""
        self._store_events()
        named = Path(self.settings.run.resume_from) if self.settings.run.resume_from else None
        order = resume_order(self._infos(), named, begun_after=self.begun_after)
        checkpoint = next((path for path in order if not _damage_of(path)), None)
        infos = self._infos()
        ancestors = [path for path in self._whole() if self._is_ancestor(infos[path].version)]
        newest = max(ancestors, key=lambda path: infos[path].version, default=None)
        Run.begun["learner deaths"] += 1
        if checkpoint is None:  # then what its settings name, or the model
            assert newest is None
            if named is not None:
                self._everything_resumes("auto", "kept")  # that was removed, or is damaged
                return
            if self._infos():
                return
        try:
            self._learner_starts(checkpoint, again=again)
        except RefusedError:
            assert checkpoint is not None
            assert not self._is_ancestor(self.held_version), "its weights are of this run"
            self._everything_resumes("auto", "kept")
        else:
            assert checkpoint == newest, "steps were given up that a checkpoint holds"

    @rule(cuts_log=st.booleans())
    def broker_dies_and_is_replaced(self, cuts_log: bool) -> None:
        """What it had acknowledged is in its store; clients that asked meanwhile ask again."""
        Run.begun["broker deaths"] += 1
        self._broker_dies(is_durable=True, cuts_log=cuts_log)

    @rule(data=st.data(), is_durable=st.booleans(), cuts_log=st.booleans())
    def broker_dies_before_it_answers(
        self, data: st.DataObject, is_durable: bool, cuts_log: bool
    ) -> None:
        """Clients that had asked ask again, and name the leases that they know."""
        self._store_events()
        version = self.ledger.book.version
        holder = data.draw(st.sampled_from(GENERATORS))
        granted = [(group, adopted) for group, adopted in self.work]

        def lease() -> None:
            self._leased(holder, self.adopted[holder], 8)

        def answer() -> None:
            for group, adopted in granted[-2:]:
                self._submit(group, group.siblings[-1], adopted, newest_too=False)

        def commit() -> None:
            self.ledger.training.deliver(version)
            if version.step in self.ledger.book.state.batches:
                self.ledger.training.commit(version.next(), {})

        asked: Callable[[], None] = data.draw(
            st.sampled_from([lease, answer, commit, self._score_all])
        )
        if self.ledger.book.finished:
            asked = self._score_all
        Run.begun["broker deaths before an answer"] += 1
        asked()
        self._broker_dies(is_durable=is_durable, cuts_log=cuts_log)
        for name in GENERATORS:
            known = [group.lease_id for group, _ in self.work]
            self.ledger.release_all(name, "lost", keep=known)
        if asked is commit and self.ledger.book.version != version:
            assert is_durable
            self.ledger.training.commit(version.next(), {})  # sent twice
        elif not self.ledger.book.finished:
            asked()

    @rule(
        store=st.sampled_from(["kept", "kept", "emptied", "emptied", "cut"]),
        older=st.integers(0, 2),
        past=st.integers(1, 4),
    )
    def everything_dies_and_goes_on(self, store: str, older: int, past: int) -> None:
        """From the newest checkpoint that is whole, or one that somebody names."""
        infos = self._infos()
        whole = sorted(self._whole(), key=lambda path: infos[path].version)
        wanted = "auto" if older == 0 or older >= len(whole) else str(whole[-1 - older])
        if whole and infos[whole[-1]].step >= self.settings.run.steps and wanted == "auto":
            return  # it is complete
        self._everything_resumes(wanted, store, past=past)

    def _everything_resumes(self, wanted: str, store: str, *, past: int = 1) -> None:
        self._store_events()
        Run.begun[f"resumes on a store that was {store}"] += 1
        kept, before = self.shared, self.ledger
        if store == "emptied":
            self.shared = SharedMemory(generation=kept.generation)
        elif store == "cut" and self.past:
            self.shared, self.book = self.past[-min(past, len(self.past))]
            self.shared.generation = kept.generation
        self.past.clear()
        known = self._replayed().book.state if self.shared.snapshot is not None else None
        run = self.settings.run
        run = msgspec.structs.replace(run, resume_from="", steps=before.book.rules.total_steps)
        try:
            point = find_resume_point(run, wanted)
        except ConfigError:  # it is at the last step, and its learner was refused
            run = msgspec.structs.replace(run, steps=run.steps + 2)
            point = find_resume_point(run, wanted)
        assert point is not None
        assert point.run_folder == run.folder
        run = msgspec.structs.replace(run, resume_from=str(point.checkpoint or ""))
        self.settings = msgspec.structs.replace(self.settings, run=run)
        self.begun_after = max((i.version.epoch for i in self._infos().values()), default=None)
        if point.checkpoint is None and store == "emptied":
            self._is_refused()
            self.shared = kept  # somebody put it back
        self._begin()
        if point.checkpoint is None:
            assert self.identity.life == before.book.state.life or store == "cut"
        else:
            self._has_gone_on(point.checkpoint, before.book.state, known, store)
        self._learner_starts(point.checkpoint)

    def _is_refused(self) -> None:
        """No run begins anew without an error."""
        with pytest.raises(ConfigError, match="--resume"):
            self._begin()
        assert (self.shared.snapshot, self.shared.events) == (None, [])

    def _has_gone_on(
        self, checkpoint: Path, before: BookState, known: BookState | None, store: str
    ) -> None:
        """Check what a start made of a checkpoint and the store."""
        version = read_checkpoint_info(checkpoint).version
        held = self.weights_of[version]
        state = self.ledger.book.state
        assert self.ledger.book.unaccounted() == 0
        assert state.awaits_learner
        is_apart = known is None or not self._is_ancestor(version)
        if known is not None and not is_apart:
            is_apart = held.depth < min(known.history, default=known.version.step)
        if store == "cut" and not is_apart:  # a life ends if acknowledged events are gone
            assert before.life <= state.life <= before.life + 1
        else:
            assert state.life == before.life + is_apart
        if not is_apart:
            return
        saved = decode_state(read_ledger(checkpoint))
        for figure in ("issued", "trained", "dropped", "cursor", "version"):
            assert getattr(state, figure) == getattr(saved, figure)
        assert state.sealed == state.trained
        self.book = Book(held, {}, saved.cursor, epochs=self.epochs_at[version])

    # ---- what the roles do ---------------------------------------------------

    @rule(holder=st.sampled_from(GENERATORS))
    def adopt_newest(self, holder: str) -> None:
        self.adopted[holder] = self.ledger.book.version

    @rule(holder=st.sampled_from(GENERATORS), room=st.integers(1, 12))
    def lease(self, holder: str, room: int) -> None:
        adopted = self.adopted[holder]
        granted = self._leased(holder, adopted, room)
        assert sum(len(group.siblings) for group in granted) <= room
        self.work.extend((group, adopted) for group in granted)
        del self.work[:-WORK_REMEMBERED]

    def _leased(self, holder: str, adopted: PolicyVersion, room: int) -> list[LeasedGroup]:
        """Lease groups; count those that are begun though as many as are trained were."""
        book = self.ledger.book
        last, first = book.state.last_step, book.state.next_group_id
        steps = last - book.step - sum(step < last for step in book.state.batches)
        is_enough = book.index.num_live >= steps * book.rules.bound.groups_per_step
        granted = self.ledger.lease(holder, adopted, max_sequences=room, now_s=self.now_s)
        if is_enough:
            new = [one for one in granted if one.group_id >= first and one.item == "train"]
            self.num_spare += len(new)
            Run.begun["groups to spare"] += len(new)
        return granted

    @precondition(lambda self: self.ledger.book.controller is not None)
    @rule(bound=st.integers(0, 3), some=st.integers(0, 2))
    def a_target_changes_its_mind(self, bound: int, some: int) -> None:
        """Whatever a controller may decide, at any time."""
        rules, controller = self.rules_of_run, self.ledger.book.controller
        assert controller is not None
        least, most = rules.bound.groups_per_step, controller.most_in_flight
        in_flight = max(least, min(most, (bound + 1) * least - some % least))
        controller.throttle = Throttle(-(-in_flight // least) - 1, in_flight)

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
        if newest_too and self.ledger.book.version > adopted:
            versions.append(self.ledger.book.version)
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
            for group in self.ledger.book.groups.values()
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

    @precondition(lambda self: self.ledger.book.leases)
    @rule(data=st.data())
    def reject(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(sorted(self.ledger.book.leases.values(), key=_lease_id)))
        self.ledger.reject(lease.holder, lease.lease_id, "overlong_prompt")

    @precondition(lambda self: self.ledger.book.step >= 2)
    @rule(drops=st.booleans())
    def somebody_looks_at_the_dead_letters(self, drops: bool) -> None:
        letters = list(self.ledger.book.state.dead_letters)[:3]
        if drops:
            self.ledger.drop_letters(letters)
        else:
            done, _ = self.ledger.retry(letters)
            assert not set(done) & set(self.ledger.book.state.dead_letters)

    @rule()
    def somebody_ends_the_run(self) -> None:
        self.was_stopped = True
        self.ledger.plan_stop("enough")

    @rule(ahead=st.booleans(), commits=st.sampled_from([0, 1, 1, 2]))
    def deliver_and_commit(self, ahead: bool, commits: int) -> None:
        self._deliver(commits, ahead=ahead)

    @rule(data=st.data(), ahead=st.booleans())
    def learner_rejects_a_batch(self, data: st.DataObject, ahead: bool) -> None:
        step = self.ledger.book.step + ahead
        batch = self.ledger.book.state.batches.get(step)
        if batch is None:
            return
        named = data.draw(st.sets(st.sampled_from(batch), min_size=1))
        for _ in range(2):
            self.ledger.training.reject_batch(self.ledger.book.version, step, "nonfinite", named)

    def _deliver(self, commits: int, *, ahead: bool = False) -> None:
        version = self.ledger.book.version
        batch = self.ledger.training.deliver(version)
        if not isinstance(batch, list):
            return
        if ahead:
            self.ledger.training.deliver(version, version.step + 1)
        again = self.ledger.training.deliver(version)
        assert again == batch
        size = self.rules_of_run.bound.groups_per_step
        assert len(batch) == size or self.ledger.book.out_of_prompts
        assert len(batch) >= self.rules_of_run.min_groups
        self._store_events()
        keys = {key for group in batch for key in group.trajectory_keys()}
        assert keys <= self.shared.trajectories.keys()
        for _ in range(commits):
            self.ledger.training.commit(version.next(), {})

    # ---- what holds at every moment ------------------------------------------

    @invariant()
    def every_group_is_accounted_for(self) -> None:
        self.stored_events_tell_one_story()
        ledger, rules = self.ledger, self.rules_of_run
        assert ledger.book.unaccounted() == 0
        groups = [group for group in ledger.book.groups.values() if group.item == "train"]
        counted = Counter({state: n for state, n in ledger.book.in_flight().items() if n})
        assert counted == Counter(group.state for group in groups)
        assert ledger.book.state.trained == sum(len(node.batch) for node in self.book.node.path())
        live = [group for group in groups if group.is_live]
        taken_apart = 2 * rules.bound.groups_per_step  # batches whose groups wait again
        assert len(live) <= rules.max_in_flight + taken_apart
        bytes_held = sum(group.num_bytes for group in ledger.book.groups.values())
        assert ledger.book.state.untrained_bytes == bytes_held
        assert ledger.book.state.replay_bytes <= rules.replay_budget_bytes
        assert ledger.book.state.sealed <= ledger.book.state.trained
        self._every_trajectory_is_accounted_for(groups)

    def _every_trajectory_is_accounted_for(self, groups: list[Group]) -> None:
        """By a count of siblings: a group counts for all of them, and is trained with all."""
        state, size = self.ledger.book.state, self.rules_of_run.group_size
        for batch in state.replay.values():
            for group in batch:
                assert sorted(group.headers) == sorted(group.scores) == list(range(size))
        trained = sum(len(node.batch) for node in self.book.node.path()) * size
        account = self.ledger.book.trajectories()
        assert account["trained"] == trained
        assert account["in_flight"] == sum(len(group.missing) for group in groups) + sum(
            len(group.headers) for group in groups
        )
        assert account["issued"] == account["trained"] + account["dropped"] + account["in_flight"]
        assert account["dropped"] == state.dropped.total() * size

    @invariant()
    def the_views_are_what_a_walk_over_all_groups_would_find(self) -> None:
        index = self.ledger.book.index
        fresh = GroupIndex(self.rules_of_run.bound, self.ledger.book.groups.values())
        counts = ("num_siblings", "num_generated", "num_scored")
        for view in ("due", "ready", "num_live", *counts):
            assert getattr(index, view) == getattr(fresh, view), view
        assert set(index.again) == set(fresh.again)
        assert set(index.fresh) == set(fresh.fresh)
        holders = Counter(lease.holder for lease in self.ledger.book.leases.values())
        assert {name: len(held) for name, held in self.ledger.book.by_holder.items()} == holders

    @invariant()
    def no_trained_token_is_older_than_the_bound(self) -> None:
        bound = self.rules_of_run.bound.max_staleness_steps
        assert all(0 <= lag <= bound for lag in self.ledger.book.state.staleness)

    @invariant()
    def what_waits_can_still_be_trained_in_time(self) -> None:
        bound = self.rules_of_run.bound
        if not bound.reserves:
            return
        due = [g.deadline(bound) for g in self.ledger.book.groups.values() if g.is_live]
        step, booked = self.ledger.book.free_step, self.ledger.book.state.batches
        assert all(deadline >= step for deadline in due)
        for last in range(step, max(due, default=step) + 1):
            assert sum(deadline <= last for deadline in due) <= bound.fits(step, last, booked)

    @invariant()
    def stored_events_tell_one_story(self) -> None:
        """And every prompt is trained once in the history of the learner's weights."""
        self._store_events()
        book, state = self.book, self.ledger.book.state
        assert state.version.step == book.node.depth
        trained = [group_id for node in book.node.path() for group_id in node.batch]
        assert len(set(trained)) == len(trained)
        positions = {self.position_of[group_id] for group_id in trained}
        assert len(positions) == len(trained), "a prompt was trained twice"
        assert book.batches == state.batches
        bound = {group_id for batch in book.batches.values() for group_id in batch}
        assert not bound & set(trained)
        held = [*self.ledger.book.groups.values()]
        held += [group for groups in state.replay.values() for group in groups]
        keys = {key for group in held for key in group.trajectory_keys()}
        assert self.shared.trajectories.keys() == keys

    def _store_events(self) -> None:
        """Make durable what happened, and follow it in our own book."""
        events, released = self.ledger.drain()
        put = {key: StoredTrajectory(b"", b"") for key in self.put}
        self.put = set()
        if not (events or released or put):
            return
        self.past = [
            *self.past,
            (_copy(self.shared), replace(self.book, batches=dict(self.book.batches))),
        ][-4:]
        stored = [encode_event(event) for event in events]
        now(self.store.commit(Changes(events=stored, put=put, remove=list(released))))
        self.next_event = self.ledger.book.state.num_events
        for event in events:
            self._follow(event)

    def _follow(self, event: LedgerEvent) -> None:
        book = self.book
        match event:
            case TakenOver(version=version):
                self._is_newer(version)
                self._go_back(version)
            case Trained(version=version):
                self._is_newer(version)
                self._has_trained(version)
            case Delivered(step=step, group_ids=group_ids):
                assert step not in book.batches
                book.batches[step] = group_ids
            case Unbound(step=step):
                book.recorded -= set(book.batches.pop(step))
            case Evicted(step=step):
                assert step < book.node.depth
            case Generated(header=sent):
                self.headers.setdefault(sent.group_id, {})[sent.sibling] = sent
            case Leased(lease_id=lease_id):
                assert lease_id not in self.lease_ids, "the id of a lease was given out twice"
                self.lease_ids.add(lease_id)
            case Issued(cursor=cursor, item=item, group_id=group_id):
                self._is_new(group_id, cursor if item == "train" else -1)
                if item == "train":
                    assert cursor == book.cursor
                    book.cursor = cursor + 1
            case Retried(group_id=group_id, of=old):
                self._is_new(group_id, self.position_of[old])
            case Requeued(group_id=group_id, of=old, position=position):
                assert self.position_of[old] == position
                self._is_new(group_id, position)

    def _is_new(self, group_id: int, position: int) -> None:
        assert group_id not in self.position_of, "the id of a group was given out twice"
        self.position_of[group_id] = position

    def _is_newer(self, version: PolicyVersion) -> None:
        assert version > self.last_version, "a label was given out twice, or goes back"
        self.last_version = version

    def _is_ancestor(self, version: PolicyVersion) -> bool:
        """Return whether this account knows the label and the weights of now descend from those."""
        known = version.epoch in self.book.epochs
        return known and self.book.node.descends_from(self.weights_of[version])

    def _go_back(self, version: PolicyVersion) -> None:
        """What was trained from this step on is bound again, or on its way again."""
        book, held = self.book, self.held
        assert self._is_ancestor(self.held_version), "the run resumes from weights of another one"
        assert held.depth == version.step
        for lost in book.node.path()[version.step :]:
            step = lost.depth - 1
            if self.ledger.book.state.batches.get(step) == lost.batch:
                book.batches[step] = lost.batch
            else:
                assert not set(lost.batch) & set(book.batches.get(step, ()))
        book.recorded = frozenset(group_id for batch in book.batches.values() for group_id in batch)
        book.node = self.weights_of[version] = held
        book.epochs |= {version.epoch}

    def _has_trained(self, version: PolicyVersion) -> None:
        """Every token was chosen by ancestors of the weights that it trains, and not too old."""
        book = self.book
        step, batch = version.step - 1, book.batches.pop(version.step - 1)
        assert step == book.node.depth
        bound = self.rules_of_run.bound.max_staleness_steps
        for group_id, sent in [(g, sent) for g in batch for sent in self.headers[g].values()]:
            for run in sent.version_runs:
                assert 0 <= step - run.version.step <= bound, "too old"
                assert self._is_ancestor(run.version) or group_id in book.recorded, (
                    f"a token of {run.version.label}, which {version.label} does not descend from"
                )
        self.weights_of[version] = book.node = book.node.after(batch)

    # ---- and at the end ------------------------------------------------------

    def teardown(self) -> None:
        if not hasattr(self, "ledger"):
            return
        try:
            self._end()
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _end(self) -> None:
        self._finish_without_faults()
        self.stored_events_tell_one_story()
        self.every_group_is_accounted_for()
        self.no_trained_token_is_older_than_the_bound()
        assert self.ledger.book.finished
        assert not self.ledger.book.over
        self.ledger.training.leave()
        assert self.ledger.book.over
        self.stored_events_tell_one_story()
        rules, state = self.rules_of_run, self.ledger.book.state
        assert self.ledger.book.groups == {}
        assert state.issued == state.trained + state.dropped.total()
        full = self.ledger.book.step * rules.bound.groups_per_step
        assert state.trained == full or self.ledger.book.out_of_prompts
        assert self.ledger.book.step == rules.total_steps or state.stop_reason
        if rules.bound.reserves and not (state.stop_reason or self.was_stopped):
            assert state.dropped["run_ended"] <= self.num_spare, "more than could be trained"
            assert not state.dropped["stale"]
        assert state_of(self._replayed()) == state_of(self.ledger)
        others = make_rules(group_size=7, max_staleness_steps=9, plan=eval_plan(1, samples=6))
        assert state_of(self._replayed(others)) == state_of(self.ledger), "settings are in no event"

    def _finish_without_faults(self) -> None:
        """One generator works, everything is scored, the learner trains: it has to end."""
        for _ in range(200):
            if self.ledger.book.finished:
                return
            self.now_s += 1_000.0  # silent holders lose their leases
            self.ledger.expire(self.now_s)
            holder = GENERATORS[0]
            adopted = self.ledger.book.version
            for group in self._leased(holder, adopted, 100):
                for sibling in group.siblings:
                    submit(self.ledger, header(group.group_id, sibling, adopted))
                    self.put.add((group.group_id, sibling))
            self._score_all()
            self._deliver(commits=1, ahead=True)


def _lease_id(lease: Lease) -> int:
    return lease.lease_id


def _copy(shared: SharedMemory) -> SharedMemory:
    return SharedMemory(
        shared.generation, shared.snapshot, list(shared.events), dict(shared.trajectories)
    )


def _damage_of(checkpoint: Path) -> str:
    try:
        return damage_of(checkpoint)
    except ConfigError as error:
        return str(error)


def _damage(checkpoint: Path, how: str) -> None:
    """Flip a bit of a file of a checkpoint, or cut it off."""
    names = {"info": INFO_FILE, "digests": DIGESTS_FILE, "ledger": LEDGER_FILE}
    path = checkpoint / names.get(how.removeprefix("cut "), "tensors")
    data = path.read_bytes()
    if how in {"tensors", "ledger"}:
        middle = len(data) // 2
        path.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
    else:
        path.write_bytes(data[: len(data) // 2])

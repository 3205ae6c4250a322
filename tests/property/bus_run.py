"""The relay's decisions at the mercy of engines, agents, learners and time.

Engines hold bytes and a label; a phase of a publish does to them what an agent does. Which engine
is served, with which version, in which phase, and which slot a learner writes is decided by the
product. An engine may go on to load a slot that the relay gave up: then the slot's label decides.
Faults are drawn: each process may fail before or after an action, hang, die, be replaced or fall
silent; then all of it stops, and every living engine has to arrive.
"""

from dataclasses import dataclass, field
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from slipstream.weightbus.relay.fleet import CollectiveGroup, Fleet, Seat, Serving
from slipstream.weightbus.relay.publish_state import LIVE, STAGED, Phase, PublishState
from slipstream.weightbus.version.slots import Slots
from slipstream.wire.messages.versions import PolicyVersion

SILENCE_S = 30.0
RETRY_S = 1.0
PATIENCE_S = SILENCE_S + RETRY_S
NAMES = ("a", "b", "c", "d")
MIXTURE = PolicyVersion(0, 999)


@dataclass(eq=False)
class Engine:
    """What one engine holds. It generates unless it is paused."""

    name: str
    label: PolicyVersion | None = None
    data: PolicyVersion | None = None
    is_paused: bool = False
    is_alive: bool = True
    hears: bool = True  # its agent; else it answers nothing and sends nothing
    reads: "LateRead | None" = None  # a load that nobody waits for any more

    @property
    def is_whole(self) -> bool:
        return self.data == self.label

    def abandon(self) -> None:
        """Resume with what it had if that is whole, else stay paused."""
        if self.is_whole:
            self.is_paused = False
        else:
            self.label = None

    @property
    def adopted(self) -> PolicyVersion | None:
        """The version that its agent reports."""
        return self.label if self.is_whole else None


@dataclass(eq=False)
class LateRead:
    """A load of a slot that the relay gave up, and takes to be unread from then on."""

    slot: int
    version: PolicyVersion
    label: PolicyVersion | None  # of the slot, as it began
    data: PolicyVersion | None


@dataclass(eq=False)
class Publish:
    """One serving on its way."""

    serving: Serving
    slot: int
    engines: dict[str, Engine]
    course: PublishState[str] = field(init=False)

    def __post_init__(self) -> None:
        self.course = PublishState(
            list(self.engines), STAGED if self.serving.group is None else LIVE
        )


class Bus(RuleBasedStateMachine):
    """A relay with up to four engines and the learner's three slots."""

    begun: ClassVar[dict[str, int]] = {"schedules": 0, "publishes": 0, "faults": 0, "given up": 0}
    begun |= {"late": 0, "late and whole": 0}

    @initialize(
        engines_per_group=st.sampled_from([3, 2, 1]),
        transports=st.lists(
            st.sampled_from(["collective", "collective", "tcp", "disk"]), min_size=1, max_size=4
        ),
    )
    def begin(self, engines_per_group: int, transports: list[str]) -> None:
        self.begun["schedules"] += 1
        self.fleet = Fleet(
            silence_s=SILENCE_S, retry_s=RETRY_S, engines_per_group=engines_per_group
        )
        self.engines_per_group = engines_per_group
        self.slots = Slots()
        self.memory: list[PolicyVersion | None] = [None, None, None]
        self.labels: list[PolicyVersion | None] = [None, None, None]  # in the slots' headers
        self.writing: int | None = None
        self.newest: PolicyVersion | None = None  # that the learner has published
        self.version = PolicyVersion(1, 0)
        self.engines: dict[str, Engine] = {}
        self.publishes: list[Publish] = []
        self.now_s = 0.0
        for name, transport in zip(NAMES, transports, strict=False):
            self.an_engine_starts(name, transport, "cpu")
        self.learner_publishes(new_epoch=False)
        self._turn_to_the_end()

    # ---- the learner ---------------------------------------------------------

    @rule()
    def learner_begins_to_write(self) -> None:
        newest = self.slots.newest
        slot = self.slots.reserve()
        assert slot not in {publish.slot for publish in self.publishes}, "it is being read"
        if slot == newest:
            others = {0, 1, 2} - {slot}
            assert others == {publish.slot for publish in self.publishes}, "the only whole one"
        self.labels[slot] = None
        self.memory[slot] = MIXTURE
        self.writing = slot

    @precondition(lambda self: self.writing is not None)
    @rule(new_epoch=st.booleans())
    def learner_has_written(self, new_epoch: bool) -> None:
        assert self.writing is not None
        epoch, step = self.version.epoch, self.version.step
        self.version = PolicyVersion(epoch + new_epoch, step + 1)
        self.memory[self.writing] = self.version
        self.labels[self.writing] = self.version
        self.slots.written(self.writing, self.version)
        self.newest, self.writing = self.version, None

    @rule(new_epoch=st.sampled_from([False, False, True]))
    def learner_publishes(self, new_epoch: bool) -> None:
        self.learner_begins_to_write()
        self.learner_has_written(new_epoch)

    # ---- members -------------------------------------------------------------

    @rule(
        name=st.sampled_from(NAMES),
        transport=st.sampled_from(["collective", "collective", "tcp", "disk"]),
        device=st.sampled_from(["cpu", "cpu", "cuda"]),
    )
    def an_engine_starts(self, name: str, transport: str, device: str) -> None:
        """Maybe in the place of another one of its name."""
        if name in self.engines:
            self.engines[name].is_alive = False
            self._forget(name)
        self.engines[name] = Engine(name)
        shares = transport == "collective"
        seat = Seat(name, transport, device, None, last_message_s=self.now_s, shares_group=shares)
        self.fleet.join(seat)

    @rule(seconds=st.sampled_from([0.1, 1.0, 1.0, PATIENCE_S]))
    def time_passes(self, seconds: float) -> None:
        """Agents that can send a heartbeat; those silent for too long are given up."""
        self.now_s += seconds
        self._heartbeats()
        for name in self.fleet.silent(self.now_s):
            assert not self.engines[name].hears, "it sent a heartbeat"
            self.begun["given up"] += 1
            self.engines.pop(name).is_alive = False
            self._forget(name)

    def _heartbeats(self) -> None:
        for name in self.fleet.seats:
            if self.engines[name].hears:
                self.fleet.heartbeat(name, self.engines[name].adopted, self.now_s)

    @precondition(lambda self: self.engines)
    @rule(data=st.data())
    def an_agent_falls_silent(self, data: st.DataObject) -> None:
        self.begun["faults"] += 1
        self.engines[data.draw(st.sampled_from(sorted(self.engines)))].hears = False

    @precondition(lambda self: self.engines)
    @rule(data=st.data())
    def an_agent_leaves(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.engines)))
        self.engines.pop(name).is_alive = False
        self._forget(name)

    def _forget(self, name: str) -> None:
        seat = self.fleet.seats[name]
        dissolved = self.fleet.forget(name)
        assert dissolved is None or not dissolved.seats
        for publish in list(self.publishes):
            if publish.serving.seats == (seat,) and publish.serving.group is None:
                self._release(publish)  # no other engine is in it: it is cancelled

    # ---- publishes -----------------------------------------------------------

    @rule()
    def decide(self) -> None:
        for serving in self.fleet.due(next(iter(self.slots.whole), None), self.now_s):
            slot = self.slots.begin()
            if slot is None:
                assert len({publish.slot for publish in self.publishes}) == 2
                return
            assert serving.version == self.slots.version(slot) == self.memory[slot]
            self.fleet.started(serving)
            engines = {seat.name: self.engines[seat.name] for seat in serving.seats}
            self.publishes.append(Publish(serving, slot, engines))
            self.begun["publishes"] += 1

    @rule(data=st.data(), publishes=st.booleans())
    def the_bus_turns_once(self, data: st.DataObject, publishes: bool) -> None:
        """All agents send heartbeats; what is begun goes to its end or somewhere on the way."""
        self.time_passes(RETRY_S)
        if publishes:
            self.learner_publishes(new_epoch=False)
        self.decide()
        for publish in list(self.publishes):
            for _ in range(data.draw(st.sampled_from([9, 9, 4, 5]))):
                if publish in self.publishes:
                    self._advance(publish, {}, {})

    @precondition(lambda self: self.publishes)
    @rule(data=st.data())
    def a_publish_goes_on(self, data: st.DataObject) -> None:
        self._advance(data.draw(st.sampled_from(self.publishes)), {}, {})

    @precondition(lambda self: self.publishes)
    @rule(data=st.data(), phases=st.integers(1, 7))
    def a_publish_goes_on_for_long(self, data: st.DataObject, phases: int) -> None:
        publish = data.draw(st.sampled_from(self.publishes))
        for _ in range(phases):
            if publish in self.publishes:
                self._advance(publish, {}, {})

    @precondition(lambda self: self.engines)
    @rule(
        data=st.data(),
        before=st.integers(0, 6),
        effect=st.sampled_from(["none", "half", "whole"]),
        hears_of_it=st.booleans(),
    )
    def somebody_fails(
        self, data: st.DataObject, before: int, effect: str, hears_of_it: bool
    ) -> None:
        """In any phase; its command may have taken effect all the same, or half."""
        if not self.publishes:
            self.learner_publishes(new_epoch=False)
            self.decide()
        if not self.publishes:
            return
        publish = max(self.publishes, key=lambda publish: len(publish.engines))
        for _ in range(before):
            if publish in self.publishes:
                self._advance(publish, {}, {})
        if publish in self.publishes and publish.course.members:
            self.begun["faults"] += 1
            name = data.draw(st.sampled_from(publish.course.members))
            self._advance(publish, {name: effect}, {name: hears_of_it})

    def _advance(self, publish: Publish, fails: dict[str, str], abandons: dict[str, bool]) -> None:
        """All that are left do the next phase; members that are gone or silent fail in it."""
        course, phase = publish.course, publish.course.phase
        assert phase is not None
        failed = {}
        for name in course.members:
            engine = publish.engines[name]
            is_there = engine.is_alive and engine.hears and engine.reads is None
            effect = fails.get(name, "whole")
            if is_there and effect != "none":
                if effect == "late" and phase is Phase.ADOPT:
                    self._begins_late(engine, publish)
                else:
                    is_torn = bool(fails) if phase is Phase.LOAD else effect == "half"
                    self._does(engine, phase, publish, is_torn=is_torn)
            if not is_there or name in fails:
                failed[name] = "it failed"
            elif phase is Phase.VERIFY and engine.data != publish.serving.version:
                failed[name] = "it holds something else"
        before = list(course.members)
        course.done(failed)
        assert not set(course.members) & set(course.failed)
        assert set(course.members) | set(course.failed) == set(publish.engines)
        assert not failed or phase is not Phase.LOAD or set(before) <= set(course.failed)
        if course.phase is None:
            self._finish(publish, abandons)

    def _does(self, engine: Engine, phase: Phase, publish: Publish, *, is_torn: bool) -> None:
        version = publish.serving.version
        match phase:
            case Phase.PAUSE:
                engine.is_paused = True
            case Phase.LOAD:
                assert engine.is_paused, "weights move under an engine that generates"
                engine.data = MIXTURE if is_torn else self.memory[publish.slot]
            case Phase.ADOPT:  # pause to resume, by its agent: it fails anywhere in between
                engine.is_paused = True
                engine.data = MIXTURE if is_torn else self.memory[publish.slot]
                if not is_torn:
                    assert engine.label is None or engine.label <= version, "a label goes back"
                    engine.label, engine.is_paused = version, False
            case Phase.COMMIT:
                assert engine.data == version, "it commits what it does not hold"
                assert engine.label is None or engine.label <= version, "a label goes back"
                engine.label, engine.is_paused = version, False
            case _:
                pass

    @precondition(lambda self: self.engines)
    @rule(data=st.data(), writes=st.integers(0, 4), ends=st.booleans())
    def an_engine_loads_late(self, data: st.DataObject, writes: int, ends: bool) -> None:
        """The relay gives its load up; the learner may write to the slot meanwhile."""
        self.learner_publishes(new_epoch=False)
        self.decide()
        staged = [one for one in self.publishes if one.serving.group is None]
        if not staged:
            return
        publish = data.draw(st.sampled_from(staged))
        while publish.course.phase is not Phase.ADOPT and publish in self.publishes:
            self._advance(publish, {}, {})
        if publish not in self.publishes or not publish.course.members:
            return
        (name,) = publish.course.members
        engine = publish.engines[name]
        self._advance(publish, {name: "late"}, {})
        for _ in range(writes):
            self.learner_publishes(new_epoch=False)
        if ends and engine.reads is not None:
            self._ends_late(engine)

    def _begins_late(self, engine: Engine, publish: Publish) -> None:
        self.begun["late"] += 1
        version, slot = publish.serving.version, publish.slot
        engine.reads = LateRead(slot, version, self.labels[slot], self.memory[slot])
        engine.is_paused, engine.data = True, MIXTURE

    @precondition(lambda self: any(engine.reads for engine in self.engines.values()))
    @rule(data=st.data())
    def a_late_load_ends(self, data: st.DataObject) -> None:
        """The engine adopts what it read if the slot is labelled with it before and after."""
        names = sorted(name for name, engine in self.engines.items() if engine.reads)
        self._ends_late(self.engines[data.draw(st.sampled_from(names))])

    def _ends_late(self, engine: Engine) -> None:
        reads, engine.reads = engine.reads, None
        assert reads is not None
        is_same = reads.data == self.memory[reads.slot]
        engine.data = reads.data if is_same else MIXTURE
        if reads.version == reads.label == self.labels[reads.slot]:
            assert engine.label is None or engine.label <= reads.version, "a label goes back"
            engine.label, engine.is_paused = reads.version, False
            self.begun["late and whole"] += 1
        else:
            engine.abandon()

    def _turn_to_the_end(self) -> None:
        self.decide()
        for publish in list(self.publishes):
            while publish in self.publishes:
                self._advance(publish, {}, {})
        self._heartbeats()

    def _finish(self, publish: Publish, abandons: dict[str, bool]) -> None:
        course = publish.course
        for name in course.members:
            assert publish.engines[name].label == publish.serving.version
        for name in course.failed:
            engine = publish.engines[name]
            can_abandon = engine.is_alive and engine.hears and engine.reads is None
            if can_abandon and abandons.get(name, True):
                engine.abandon()
        group = publish.serving.group
        gone = self.fleet.finished(publish.serving, course.members, self.now_s)
        assert gone is (group if group is not None and not group.seats else None)
        for seat in publish.serving.seats:
            is_current = seat.adopted == publish.serving.version
            assert is_current == (seat.name in course.members), "a failed engine is not current"
            assert is_current or seat.group is None, "a failed engine is repaired alone"
        self._release(publish)

    def _release(self, publish: Publish) -> None:
        self.publishes.remove(publish)
        self.slots.end(publish.slot)

    # ---- what holds at every moment ------------------------------------------

    @invariant()
    def an_engine_runs_one_version_or_nothing(self) -> None:
        for engine in self.engines.values():
            assert engine.is_paused or engine.is_whole, "it generates with a mixture"
            assert engine.label is None or engine.label <= self.version

    @invariant()
    def what_is_read_is_not_written(self) -> None:
        for publish in self.publishes:
            assert self.memory[publish.slot] == publish.serving.version
        assert len({publish.slot for publish in self.publishes}) <= 2

    @invariant()
    def everybody_is_in_one_place(self) -> None:
        assert self.fleet.seats.keys() == self.engines.keys()
        served = [seat for publish in self.publishes for seat in publish.serving.seats]
        assert len(set(served)) == len(served)
        groups: set[CollectiveGroup] = set()
        for seat in self.fleet.seats.values():
            assert (seat.receiving is not None) == (seat in served)
            if seat.group is not None:
                groups.add(seat.group)
                assert seat.group.seats.count(seat) == 1
                assert seat.group.device == seat.device
        assert all(len(group.seats) <= self.engines_per_group for group in groups)

    @invariant()
    def nobody_waits_for_another(self) -> None:
        """Engines that are behind are served, in a group that is, or failed within a second."""
        newest = next(iter(self.slots.whole), None)
        due = {seat for serving in self.fleet.due(newest, self.now_s) for seat in serving.seats}
        for seat in self.fleet.seats.values():
            is_busy = seat.receiving is not None
            is_busy = is_busy or (seat.group is not None and seat.group.receiving is not None)
            waits = seat.again_s > self.now_s
            assert seat in due or is_busy or waits or newest is None or seat.adopted == newest
            assert seat.again_s < self.now_s + 2 * RETRY_S
        wait_s = self.fleet.wait_s(self.now_s)
        assert wait_s is None or 0 < wait_s < 2 * RETRY_S

    # ---- and at the end ------------------------------------------------------

    def teardown(self) -> None:
        if not hasattr(self, "fleet"):
            return
        for engine in self.engines.values():
            if engine.reads is not None:
                self._ends_late(engine)
        for _ in range(2):  # silent agents are given up, and what they held goes
            self.time_passes(PATIENCE_S)
            self.now_s += RETRY_S
            self._heartbeats()
        assert all(engine.hears for engine in self.engines.values())
        for _ in range(4):  # what is under way; alone; with its group
            self._turn_to_the_end()
            self.now_s += RETRY_S
            self.nobody_waits_for_another()
        newest = next(iter(self.slots.whole), None)
        for publish in list(self.publishes):
            assert publish.serving.version == newest
        assert not self.publishes, "they do not come to an end"
        for engine in self.engines.values():
            assert newest is None or engine.label == engine.data == newest
            assert newest is None or not engine.is_paused

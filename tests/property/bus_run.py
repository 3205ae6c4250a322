"""The relay's decisions at the mercy of engines, agents, learners and time.

Engines hold bytes and a label; a phase of a publish does to them what an agent does. Which engine
is served, with which version, in which phase, and which slot a learner writes is decided by the
product. Engines of one other host fetch into memory of their agents, or map another one's; each
fetch has a moment at which its memory is a mixture. An engine may go on to load memory that the
relay gave up: then the memory's label decides.
Faults are drawn: each process may fail before or after an action, hang, die, be replaced or fall
silent; then all of it stops, and every living engine has to arrive.
"""

from dataclasses import dataclass, field
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from slipstream.weightbus.relay.fleet import CollectiveGroup, Fleet, Seat, Serving
from slipstream.weightbus.relay.host_fetches import HostEngine, HostFetches
from slipstream.weightbus.relay.publish_state import LIVE, STAGED, Phase, PublishState
from slipstream.weightbus.version.slots import Slots
from slipstream.wire.messages.versions import PolicyVersion

SILENCE_S = 30.0
RETRY_S = 1.0
PATIENCE_S = SILENCE_S + RETRY_S
NAMES = ("a", "b", "c", "d")
HOST_PATIENCE_S = 5.0
SHADOWED = ("c", "d")
MIXTURE = PolicyVersion(0, 999)


@dataclass(eq=False)
class Memory:
    """A labelled file: a slot of the learner's, or the memory of an agent on another host."""

    data: PolicyVersion | None = None
    label: PolicyVersion | None = None  # in its header


@dataclass(eq=False)
class Engine:
    """What one engine holds. It generates unless it is paused."""

    name: str
    on_host: HostEngine = field(default_factory=HostEngine)
    path: str = ""  # file of its agent's memory
    received: Memory | None = None  # what it is to load, on another host
    has_failed: bool = False  # in its last publish
    label: PolicyVersion | None = None
    data: PolicyVersion | None = None
    is_paused: bool = False
    is_alive: bool = True
    hears: bool = True  # its agent; else it answers nothing and sends nothing
    reads: "LateRead | None" = None  # a load that nobody waits for any more
    shadow: PolicyVersion | None = None  # contents of the copy next to its weights, if it has one

    @property
    def has_shadow(self) -> bool:
        return self.name in SHADOWED

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
    """A load of memory that the relay gave up, and takes to be unread from then on."""

    memory: Memory
    version: PolicyVersion
    label: PolicyVersion | None  # label of the memory as the load began
    data: PolicyVersion | None


@dataclass(eq=False)
class Publish:
    """One serving on its way."""

    serving: Serving
    slot: int
    engines: dict[str, Engine]
    told: str | None = None  # the file that its agent is to map; empty if it has begun to fetch
    course: PublishState[str] = field(init=False)

    def __post_init__(self) -> None:
        self.course = PublishState(
            list(self.engines), STAGED if self.serving.group is None else LIVE
        )


class Bus(RuleBasedStateMachine):
    """A relay with up to four engines and the learner's three slots."""

    begun: ClassVar[dict[str, int]] = {"schedules": 0, "publishes": 0, "faults": 0, "given up": 0}
    begun |= {
        "late": 0,
        "late and whole": 0,
        "fetched": 0,
        "mapped": 0,
        "left": 0,
        "unseen": 0,
        "copied": 0,
    }

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
        self.memory = [Memory(), Memory(), Memory()]  # the slots
        self.fetches = HostFetches(patience_s=HOST_PATIENCE_S)
        self.files: dict[str, Memory] = {}  # what agents of the other host have, by path
        self.num_files = 0
        self.writing: int | None = None
        self.newest: PolicyVersion | None = None  # that the learner has published
        self.version = PolicyVersion(1, 0)
        self.engines: dict[str, Engine] = {}
        self.publishes: list[Publish] = []
        self.now_s = 0.0
        for name, transport in zip(NAMES, transports, strict=False):
            self.an_engine_starts(name, transport, "cpu", "h")
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
        self.memory[slot].label = None
        self.memory[slot].data = MIXTURE
        self.writing = slot

    @precondition(lambda self: self.writing is not None)
    @rule(new_epoch=st.booleans())
    def learner_has_written(self, new_epoch: bool) -> None:
        assert self.writing is not None
        epoch, step = self.version.epoch, self.version.step
        self.version = PolicyVersion(epoch + new_epoch, step + 1)
        self.memory[self.writing].data = self.version
        self.memory[self.writing].label = self.version
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
        host=st.sampled_from(["h", "h", ""]),
    )
    def an_engine_starts(self, name: str, transport: str, device: str, host: str) -> None:
        """Maybe in the place of another one of its name."""
        if name in self.engines:
            self._dies(name)
        self.engines[name] = Engine(name, HostEngine(host if transport == "tcp" else ""))
        self.fetches.join(self.engines[name].on_host)
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
            self._dies(name)

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
        self._dies(data.draw(st.sampled_from(sorted(self.engines))))

    def _dies(self, name: str) -> None:
        """Its agent's memory is there for those who have it open, and for no others."""
        engine = self.engines.pop(name)
        engine.is_alive = False
        self.files.pop(engine.path, None)
        self._forget(name)
        self.fetches.leave(engine.on_host)

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
            assert serving.version == self.slots.version(slot) == self.memory[slot].data
            self.fleet.started(serving)
            engines = {seat.name: self.engines[seat.name] for seat in serving.seats}
            for engine in engines.values():
                is_alone = engine.has_failed
                self.fetches.begin(engine.on_host, serving.version, self.now_s, is_alone=is_alone)
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

    def _advance(self, publish: Publish, fails: dict[str, str], abandons: dict[str, bool]) -> bool:
        """All that are left do the next phase; members that are gone or silent fail in it.

        An engine on another host may only wait in it: False.
        """
        course, phase = publish.course, publish.course.phase
        assert phase is not None
        failed = {}
        if phase is Phase.PREPARE and publish.serving.group is None:
            (engine,) = publish.engines.values()
            effect = next(iter(fails.values()), "whole")
            is_there = engine.is_alive and engine.hears and engine.reads is None
            if engine.on_host.host and is_there and effect != "none":
                step = self._receives(engine, publish, only_begins=effect == "half")
                if step in {"waits", "begins"} and not fails:
                    return step == "begins"
                fails = fails or ({engine.name: "none"} if step == "refuses" else {})
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
        return True

    def _receives(self, engine: Engine, publish: Publish, *, only_begins: bool) -> str:
        """Do the agent's next step towards having a version, as the relay has told it."""
        version, place = publish.serving.version, engine.on_host
        if publish.told is None:
            publish.told = self.fetches.source(place, self.now_s)
            if publish.told == "":
                self._begins_to_fetch(engine)
            return "waits" if publish.told is None else "begins"
        if publish.told:
            if (memory := self.files.get(publish.told)) is not None:
                if memory.label != version:
                    return "refuses"
                self.begun["mapped"] += 1
                self.files.pop(engine.path, None)
                engine.path, engine.received = "", memory
                return "has it"
            self.begun["unseen"] += 1
            self._begins_to_fetch(engine)
            publish.told = ""
            return "begins"
        memory = self.files[engine.path]
        memory.data = memory.label = version
        engine.received = memory
        self.begun["fetched"] += 1
        if not only_begins:
            self.fetches.fetched(place, engine.path)
        return "has it"

    def _begins_to_fetch(self, engine: Engine) -> None:
        if engine.on_host.num_readers:  # the relay's word for it
            self.begun["left"] += 1
            del self.files[engine.path]
            engine.path = ""
        if not engine.path:
            self.num_files += 1
            engine.path = f"/proc/1/fd/{self.num_files}"
            self.files[engine.path] = Memory()
        memory = self.files[engine.path]
        memory.label, memory.data = None, MIXTURE

    def _loaded_by(self, engine: Engine, publish: Publish) -> Memory:
        """Return the memory from which an engine loads."""
        if not engine.on_host.host:
            return self.memory[publish.slot]
        assert engine.received is not None
        return engine.received

    def _does(self, engine: Engine, phase: Phase, publish: Publish, *, is_torn: bool) -> None:
        version = publish.serving.version
        match phase:
            case Phase.PREPARE if publish.serving.group is None and engine.has_shadow:
                own = engine.received if engine.on_host.host else self.memory[publish.slot]
                is_there = own is not None and own.label == version and not is_torn
                engine.shadow = own.data if own is not None and is_there else MIXTURE
            case Phase.PAUSE:
                engine.is_paused = True
            case Phase.LOAD:
                assert engine.is_paused, "weights move under an engine that generates"
                engine.data = MIXTURE if is_torn else self.memory[publish.slot].data
            case Phase.ADOPT:  # pause to resume, by its agent: it fails anywhere in between
                engine.is_paused = True
                if engine.shadow == version:
                    self.begun["copied"] += 1
                    engine.data = MIXTURE if is_torn else engine.shadow
                else:
                    memory = self._loaded_by(engine, publish)
                    engine.data = MIXTURE if is_torn else memory.data
                    assert is_torn or memory.label == version, "it is overwritten while it is read"
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
        for _ in range(4):
            if publish in self.publishes and publish.course.phase is not Phase.ADOPT:
                self._advance(publish, {}, {})
        is_ready = publish.course.phase is Phase.ADOPT and bool(publish.course.members)
        if publish not in self.publishes or not is_ready:
            return
        (name,) = publish.course.members
        engine = publish.engines[name]
        self._advance(publish, {name: "late"}, {})
        for _ in range(writes):
            self.learner_publishes(new_epoch=False)
            self._turn_to_the_end()
        if ends and engine.reads is not None:
            self._ends_late(engine)

    @rule(
        joins=st.booleans(),
        reader=st.sampled_from(["is told", "has opened it", "loads late"]),
        owner=st.sampled_from(["begins to fetch", "fetches", "dies"]),
    )
    def an_engine_overtakes_its_readers(self, joins: bool, reader: str, owner: str) -> None:
        """The one that fetched gets the next version, or dies, while another reads its file."""
        self._turn_to_the_end()
        if sum(bool(engine.on_host.host) for engine in self.engines.values()) < 2:
            for name in NAMES[:2]:
                self.an_engine_starts(name, "tcp", "cpu", "h")
        self.learner_publishes(new_epoch=False)
        self.decide()
        reading = self._until_one_is_told()
        if reading is None:
            return
        (engine,) = reading.engines.values()
        its_owner = engine.on_host.reads
        if reader != "is told":
            self._advance(reading, {}, {})
        self._advance_all(9, but=reading)
        if reader == "loads late" and reading.course.phase is Phase.ADOPT:
            self._advance(reading, {engine.name: "late"}, {})
        for name in [name for name, it in self.engines.items() if it.on_host is its_owner]:
            if owner == "dies":
                self._dies(name)
                continue
            self.learner_publishes(new_epoch=False)
            self.decide()
            self._advance_all(1 if owner == "begins to fetch" else 3, but=reading)
        if joins:
            self.an_engine_starts("d", "tcp", "cpu", "h")
            self.decide()
            self._advance_all(3, but=reading)
        for _ in range(3):
            if reading in self.publishes:
                self._advance(reading, {}, {})

    def _advance_all(self, times: int, *, but: Publish) -> None:
        for _ in range(times):
            for publish in [it for it in self.publishes if it is not but]:
                self._advance(publish, {}, {})

    def _until_one_is_told(self) -> Publish | None:
        for _ in range(4):
            for publish in list(self.publishes):
                if publish in self.publishes and publish.course.phase is Phase.PREPARE:
                    self._advance(publish, {}, {})
                if publish.told:
                    return publish
        return None

    def _begins_late(self, engine: Engine, publish: Publish) -> None:
        self.begun["late"] += 1
        version, memory = publish.serving.version, self._loaded_by(engine, publish)
        engine.reads = LateRead(memory, version, memory.label, memory.data)
        engine.is_paused, engine.data = True, MIXTURE

    @precondition(lambda self: any(engine.reads for engine in self.engines.values()))
    @rule(data=st.data())
    def a_late_load_ends(self, data: st.DataObject) -> None:
        """The engine adopts what it read if the memory is labelled with it before and after."""
        names = sorted(name for name, engine in self.engines.items() if engine.reads)
        self._ends_late(self.engines[data.draw(st.sampled_from(names))])

    def _ends_late(self, engine: Engine) -> None:
        reads, engine.reads = engine.reads, None
        assert reads is not None
        is_same = reads.data == reads.memory.data
        engine.data = reads.data if is_same else MIXTURE
        if reads.version == reads.label == reads.memory.label:
            assert engine.label is None or engine.label <= reads.version, "a label goes back"
            engine.label, engine.is_paused = reads.version, False
            self.begun["late and whole"] += 1
        else:
            engine.abandon()

    def _turn_to_the_end(self) -> None:
        self.decide()
        while self.publishes:
            moved = [self._advance(publish, {}, {}) for publish in list(self.publishes)]
            if not any(moved):
                self.now_s += HOST_PATIENCE_S
                moved = [self._advance(publish, {}, {}) for publish in list(self.publishes)]
                assert any(moved), "engines of a host wait for each other"
        self._heartbeats()

    def _finish(self, publish: Publish, abandons: dict[str, bool]) -> None:
        course = publish.course
        for name in course.members:
            assert publish.engines[name].label == publish.serving.version
        for name, engine in publish.engines.items():
            engine.has_failed = name in course.failed
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
        for engine in publish.engines.values():
            self.fetches.end(engine.on_host)

    # ---- what holds at every moment ------------------------------------------

    @invariant()
    def an_engine_runs_one_version_or_nothing(self) -> None:
        for engine in self.engines.values():
            assert engine.is_paused or engine.is_whole, "it generates with a mixture"
            assert engine.label is None or engine.label <= self.version

    @invariant()
    def what_is_read_is_not_written(self) -> None:
        for publish in self.publishes:
            assert self.memory[publish.slot].data == publish.serving.version
            if publish.told is not None and publish.course.phase is Phase.ADOPT:
                for name in publish.course.members:
                    memory = self._loaded_by(publish.engines[name], publish)
                    assert memory.data == memory.label == publish.serving.version
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
        there = [engine for engine in self.engines.values() if engine.on_host.host]
        for _ in range(2):  # one that failed fetches the first by itself
            before = self.begun["fetched"]
            self.learner_publishes(new_epoch=False)
            self._turn_to_the_end()
        alone = sum(engine.on_host.is_alone for engine in there)  # they never open a file
        once = alone + (alone < len(there))
        assert self.begun["fetched"] - before == once, "a version comes to a host once"
        assert all(engine.label == self.newest for engine in there)

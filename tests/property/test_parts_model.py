"""Every interleaving of a publish to engines from a learner on several hosts, with one failure.

An exhaustive search over a model: what decides is the code of the relays itself (``Slots``,
``PartBook``, ``Holds``), and the processes around it take their steps in every order. A failure
comes at every point; one is a learner that ends and comes back under another epoch, with other
memory, while engines fetch from the first. Checked in every state: while a head lives, no host
overwrites bytes that its engines fetch; no engine loads bytes of two versions, nor goes back.
Checked in every state in which nothing more can happen: every living engine runs the newest version
that all hosts have, and no host keeps the memory of a learner that has gone.
"""

from collections import deque
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import pytest

from slipstream.weightbus.version.part_book import Holds, PartBook
from slipstream.weightbus.version.slots import NUM_SLOTS, Slots
from slipstream.wire.messages.versions import PolicyVersion

TORN = 0  # content of a slot that is being written
EPOCH = 100  # a version is its step, and this for the second learner
NONE = (None,) * NUM_SLOTS


class Serving(NamedTuple):
    """A transaction of one engine."""

    version: int
    slot: int  # those of the second learner's memory come after the first's
    step: str  # hold, fetch, load, commit
    host: int = 0  # that is asked next


class Engine(NamedTuple):
    runs: int | None  # None: nothing, or a mixture
    serving: Serving | None = None
    newest: int = 0  # that it ever ran


class Learner(NamedTuple):
    version: int  # to write
    step: str  # open (the second), reserve, writing, copy, whole, written, publish, done
    host: int = 0
    slot: int = 0
    published: tuple[int, int] = (3, 0)  # version and slot, as it would tell a new head
    parts: tuple[tuple[int, int], ...] = ()  # the same of each part; (0, slot): overwritten
    last: int = 4

    @property
    def is_second(self) -> bool:
        return self.version > EPOCH


class Seen(NamedTuple):
    """A report of a part."""

    incarnation: int
    whole: frozenset[int]
    is_second: bool = False  # of whose memory


class Part(NamedTuple):
    """A part relay, and its reports on their way."""

    slots: tuple[int | None, ...]
    incarnation: int = 0
    head: int = 0  # incarnation of the head that it heard last
    held: frozenset[int] = frozenset()
    report: Seen | None = None  # in flight
    known: Seen | None = None  # by the head, of the first learner's memory
    known_of_second: Seen | None = None
    knows_second: bool = False
    is_lost: bool = False


class World(NamedTuple):
    contents: tuple[tuple[int, ...], ...]  # by host, by slot: the version whose bytes are there
    head_slots: tuple[int | None, ...]
    readers: tuple[int, ...]
    head: int  # incarnation; odd: it is dead
    parts: tuple[Part, ...]  # of hosts 1, 2, ...
    learner: Learner
    engines: tuple[Engine, ...]
    failure: str = ""  # that has happened
    knows_second: bool = False  # the head
    last_of_second: int = 0  # step of a second learner, 0 without one


def label(version: int) -> PolicyVersion:
    return PolicyVersion(1 + version // EPOCH, version % EPOCH)


def number_of(version: PolicyVersion) -> int:
    return EPOCH * (version.epoch - 1) + version.step


def of_memory(items: tuple, is_second: bool) -> tuple:  # type: ignore[type-arg]
    """Return what belongs to the slots of one learner's memory."""
    return items[NUM_SLOTS:] if is_second else items[:NUM_SLOTS]


def with_memory(items: tuple, is_second: bool, new: tuple) -> tuple:  # type: ignore[type-arg]
    return (*items[:NUM_SLOTS], *new) if is_second else (*new, *items[NUM_SLOTS:])


def slots_of(versions: tuple[int | None, ...], readers: tuple[int, ...] = ()) -> Slots:
    slots = Slots()
    for slot, version in enumerate(versions):
        if version is not None:
            slots.written(slot, label(version))
    slots._readers = list(readers or slots._readers)
    return slots


def steps_of(slots: Slots) -> tuple[int | None, ...]:
    return tuple(number_of(v) if (v := slots.version(slot)) else None for slot in range(NUM_SLOTS))


def newest_of(world: World, is_second: bool) -> int | None:
    """Return the newest version of one learner that every host has."""
    known = (part.known_of_second if is_second else part.known for part in world.parts)
    return _newest(of_memory(world.head_slots, is_second), tuple(known))


def newest_complete(world: World) -> int | None:
    if world.knows_second and (newest := newest_of(world, True)) is not None:
        return newest
    return newest_of(world, False)


@cache
def _newest(head_slots: tuple[int | None, ...], known: tuple[Seen | None, ...]) -> int | None:
    book = PartBook(range(1, len(known) + 1), silence_s=1)
    for number, report in enumerate(known, 1):
        if report is not None:
            whole = [label(step) for step in report.whole]
            book.heard(number, str(report.incarnation), whole, 0.0)
    whole = slots_of(head_slots).whole
    return next((number_of(v) for v in whole if book.is_complete(v)), None)


@cache
def reserved(
    versions: tuple[int | None, ...], readers: tuple[int, ...], newest: int | None
) -> tuple[int, tuple[int | None, ...]]:
    slots = slots_of(versions, readers)
    slot = slots.reserve(None if newest is None else label(newest))
    return slot, steps_of(slots)


@cache
def read(versions: tuple[int | None, ...], readers: tuple[int, ...], version: int) -> int | None:
    return slots_of(versions, readers).begin(label(version))


@cache
def kept(held: frozenset[int], before: int, now: int) -> frozenset[int]:
    """Return what a part keeps of its holds when it hears of a head."""
    holds = Holds(linger_s=1)
    holds.heard(str(before), 0.0)
    for version in held:
        holds.hold(label(version))
    holds.heard(str(now), 0.0)
    return frozenset(number_of(v) for v in holds.held(0.0))


def cleared(versions: tuple[int | None, ...], slot: int) -> tuple[int | None, ...]:
    slots = slots_of(versions)
    slots.clear(slot)
    return steps_of(slots)


def written(versions: tuple[int | None, ...], slot: int, version: int) -> tuple[int | None, ...]:
    slots = slots_of(versions)
    slots.written(slot, label(version))
    return steps_of(slots)


def changed(items: tuple, index: int, **fields: object) -> tuple:  # type: ignore[type-arg]
    return (*items[:index], items[index]._replace(**fields), *items[index + 1 :])


def put(items: tuple, index: int, value: object) -> tuple:  # type: ignore[type-arg]
    return (*items[:index], value, *items[index + 1 :])


def let_go(part: Part) -> Part:
    """Forget the first learner's memory, once the second has written and nothing of it is held."""
    first, second = of_memory(part.slots, False), of_memory(part.slots, True)
    if not any(second) or any(version in part.held for version in first):
        return part
    return part._replace(slots=(*NONE, *second))


def is_up(world: World) -> bool:
    return world.head % 2 == 0


# ---- the learner ---------------------------------------------------------------


def learner_step(world: World, careless: str) -> World | None:
    """Return what is after the learner's next step; it takes its steps in one order."""
    learner = world.learner
    match learner.step:
        case "open":
            return open_memory(world)
        case "reserve":
            return reserve(world, careless)
        case "writing":
            return tell_part(world)
        case "copy":
            return tear(world)
        case "whole":
            return complete(world)
        case "written":
            return tell_part_written(world, careless)
        case "publish":
            return publish(world)
    return None


def open_memory(world: World) -> World:
    """The second learner's parts hear of its memory, one after the other, and then the head."""
    learner, number = world.learner, world.learner.host - 1
    if learner.host > len(world.parts):
        step = learner._replace(step="reserve", host=0)
        return world._replace(learner=step, knows_second=True)
    if not world.parts[number].is_lost:
        world = world._replace(parts=changed(world.parts, number, knows_second=True))
    return world._replace(learner=learner._replace(host=learner.host + 1))


def reserve(world: World, careless: str) -> World:
    learner = world.learner
    if is_up(world) and careless != "reserve":
        second = learner.is_second
        own, readers = of_memory(world.head_slots, second), of_memory(world.readers, second)
        slot, left = reserved(own, readers, newest_of(world, second))
        world = world._replace(head_slots=with_memory(world.head_slots, second, left))
        slot += NUM_SLOTS * second
    else:  # it is killed before we choose: nobody reads
        slot = (learner.published[1] + 1) % NUM_SLOTS
    published = learner.published if learner.published[1] != slot else (0, slot)
    step = learner._replace(step="writing", host=1, slot=slot, published=published)
    return world._replace(learner=step)


def tell_part(world: World) -> World:
    """No rank writes before every part was told."""
    learner, number = world.learner, world.learner.host - 1
    part = world.parts[number]
    if not part.is_lost:
        if is_up(world) and part.head == world.head:
            assert part.slots[learner.slot] not in part.held, "a living head holds it"
        own = of_memory(part.slots, learner.is_second)
        left = with_memory(part.slots, learner.is_second, cleared(own, learner.slot % NUM_SLOTS))
        world = world._replace(parts=changed(world.parts, number, slots=left))
    told = learner.parts
    if told[number][1] == learner.slot:
        told = put(told, number, (0, learner.slot))
    is_last = learner.host == len(world.parts)
    step = learner._replace(parts=told, host=learner.host + 1)
    return world._replace(learner=step._replace(step="copy", host=0) if is_last else step)


def with_content(world: World, content: int) -> World:
    learner = world.learner
    own = put(world.contents[learner.host], learner.slot, content)
    return world._replace(contents=put(world.contents, learner.host, own))


def tear(world: World) -> World:
    learner = world.learner
    for engine in world.engines:
        if (serving := engine.serving) is not None and serving.step in {"hold", "fetch"}:
            assert serving.slot != learner.slot, "written while it is fetched"
    return with_content(world, TORN)._replace(learner=learner._replace(step="whole"))


def complete(world: World) -> World:
    learner = world.learner
    is_last = learner.host == len(world.parts)
    step = learner._replace(step="copy", host=learner.host + 1)
    if is_last:
        step = learner._replace(step="written", host=1)
    return with_content(world, learner.version)._replace(learner=step)


def tell_part_written(world: World, careless: str) -> World:
    learner, number = world.learner, world.learner.host - 1
    part = world.parts[number]
    if not part.is_lost and careless != "written":
        own = of_memory(part.slots, learner.is_second)
        whole = written(own, learner.slot % NUM_SLOTS, learner.version)
        part = part._replace(slots=with_memory(part.slots, learner.is_second, whole))
        world = world._replace(parts=put(world.parts, number, let_go(part)))
    told = put(learner.parts, number, (learner.version, learner.slot))
    step = learner._replace(parts=told, host=learner.host + 1)
    is_last = learner.host == len(world.parts)
    return world._replace(learner=step._replace(step="publish") if is_last else step)


def publish(world: World) -> World:
    learner = world.learner
    if is_up(world):
        own = of_memory(world.head_slots, learner.is_second)
        whole = written(own, learner.slot % NUM_SLOTS, learner.version)
        slots = with_memory(world.head_slots, learner.is_second, whole)
        if learner.is_second:  # the first's goes at once: transactions with it fail
            slots = with_memory(slots, False, NONE)
        world = world._replace(head_slots=slots)
    is_last = learner.version == learner.last
    step = learner._replace(
        step="done" if is_last else "reserve",
        version=learner.version + (not is_last),
        host=0,
        published=(learner.version, learner.slot),
    )
    return world._replace(learner=step)


# ---- the relays ----------------------------------------------------------------


def seen(part: Part) -> Seen:
    own = of_memory(part.slots, part.knows_second)
    return Seen(part.incarnation, frozenset(v for v in own if v is not None), part.knows_second)


def has_news(world: World, part: Part) -> bool:
    if part.head != world.head:
        return True
    if part.knows_second and not world.knows_second:
        return False  # a report that says nothing to the head
    return seen(part) != (part.known_of_second if part.knows_second else part.known)


def report_steps(world: World) -> Iterator[World]:
    for number, part in enumerate(world.parts):
        if part.report is not None:
            report = part.report
            if not is_up(world):
                yield world._replace(parts=changed(world.parts, number, report=None))
                continue
            held = kept(part.held, part.head, world.head)
            known: dict[str, object] = {"known": report}
            if report.is_second:
                known = {"known_of_second": report} if world.knows_second else {}
            heard = part._replace(report=None, head=world.head, held=held, **known)
            yield world._replace(parts=put(world.parts, number, let_go(heard)))
        elif is_up(world) and not part.is_lost and has_news(world, part):
            yield world._replace(parts=changed(world.parts, number, report=seen(part)))


def ended(world: World, number: int, **engine: object) -> World:
    """End an engine's transaction: its reader, and holds that no other needs."""
    serving = world.engines[number].serving
    assert serving is not None
    engines = changed(world.engines, number, serving=None, **engine)
    world = world._replace(engines=engines)
    readers = put(world.readers, serving.slot, world.readers[serving.slot] - 1)
    others = {one.serving.version for one in engines if one.serving is not None}
    if serving.version not in others:
        parts = tuple(
            let_go(part._replace(held=part.held - {serving.version}))
            if part.head == world.head
            else part
            for part in world.parts
        )
        world = world._replace(parts=parts)
    return world._replace(readers=readers)


def engine_steps(world: World) -> Iterator[World]:
    if not is_up(world):
        return
    for number, engine in enumerate(world.engines):
        if engine.serving is None:
            yield from begun(world, number)
        elif engine.serving.step == "hold":
            yield hold(world, number, engine.serving)
        elif engine.serving.step == "fetch":
            yield fetch(world, number, engine.serving)
        elif engine.serving.step == "load":  # from its own memory; torn until it has committed
            onward = engine.serving._replace(step="commit")
            engines = changed(world.engines, number, serving=onward, runs=None)
            yield world._replace(engines=engines)
        else:
            version = engine.serving.version
            yield ended(world, number, runs=version, newest=version)


def begun(world: World, number: int) -> Iterator[World]:
    engine, newest = world.engines[number], newest_complete(world)
    if newest is None or newest == engine.runs:
        return
    second = newest > EPOCH
    own, readers = of_memory(world.head_slots, second), of_memory(world.readers, second)
    if (slot := read(own, readers, newest)) is None:
        return
    assert newest >= engine.newest, "an engine goes back"
    slot += NUM_SLOTS * second
    readers = put(world.readers, slot, world.readers[slot] + 1)
    engines = changed(world.engines, number, serving=Serving(newest, slot, "hold", 1))
    yield world._replace(readers=readers, engines=engines)


def hold(world: World, number: int, serving: Serving) -> World:
    part = world.parts[serving.host - 1]
    is_there = not part.is_lost and serving.version in part.slots
    if not is_there or part.head != world.head:
        return ended(world, number)
    following = serving.host + 1
    is_last = following > len(world.parts)
    onward = serving._replace(step="fetch" if is_last else "hold", host=0 if is_last else following)
    parts = changed(world.parts, serving.host - 1, held=part.held | {serving.version})
    return world._replace(parts=parts, engines=changed(world.engines, number, serving=onward))


def fetch(world: World, number: int, serving: Serving) -> World:
    if serving.host == 0:
        if world.head_slots[serving.slot] != serving.version:
            assert world.knows_second, "written while it is fetched"
            return ended(world, number)
    else:
        part = world.parts[serving.host - 1]
        if part.is_lost or part.slots[serving.slot] != serving.version:
            return ended(world, number)
    content = world.contents[serving.host][serving.slot]
    assert content == serving.version, "bytes of another version, while the head lives"
    following = serving.host + 1
    is_last = following > len(world.parts)
    onward = serving._replace(step="load" if is_last else "fetch", host=following)
    return world._replace(engines=changed(world.engines, number, serving=onward))


# ---- failures ------------------------------------------------------------------


def failures(world: World) -> Iterator[World]:
    if world.failure:
        return
    dead = world._replace(
        head=world.head + 1,
        head_slots=NONE * 2,
        readers=(0,) * (2 * NUM_SLOTS),
        engines=tuple(engine._replace(serving=None) for engine in world.engines),
        parts=tuple(part._replace(known=None) for part in world.parts),
        failure="head",
    )
    yield dead
    for number, part in enumerate(world.parts):
        version, slot = world.learner.parts[number]
        anew: tuple[int | None, ...] = NONE * 2
        if version:
            anew = put(anew, slot, version)
        again = part._replace(
            slots=anew, incarnation=part.incarnation + 1, held=frozenset(), report=None, head=-1
        )
        yield world._replace(parts=put(world.parts, number, again), failure="part")
        lost = part._replace(is_lost=True, report=None, known=None)
        yield world._replace(
            parts=put(world.parts, number, lost),
            learner=world.learner._replace(step="done"),
            failure="host",
        )
    for number, engine in enumerate(world.engines):
        gone = ended(world, number) if engine.serving is not None else world
        engines = put(gone.engines, number, Engine(None))
        yield gone._replace(engines=engines, failure="engine")
    yield world._replace(learner=world.learner._replace(step="done"), failure="learner")
    if last := world.last_of_second:
        parts = ((0, NUM_SLOTS),) * len(world.parts)
        second = Learner(EPOCH + 1, "open", host=1, parts=parts, last=EPOCH + last)
        yield world._replace(learner=second, failure="restart")


def recoveries(world: World) -> Iterator[World]:
    """The learner starts another head; it does not where it is gone itself."""
    if is_up(world):
        return
    slots: tuple[int | None, ...] = NONE * 2
    version, slot = world.learner.published
    if version:
        slots = put(slots, slot, version)
    yield world._replace(head=world.head + 1, head_slots=slots)


def following(world: World, careless: str = "") -> Iterator[World]:
    if (onward := learner_step(world, careless)) is not None:
        yield onward
    yield from report_steps(world)
    yield from engine_steps(world)
    yield from recoveries(world)


def canonical(world: World) -> World:
    """Return the same for worlds in which engines have changed places."""
    if len(world.engines) < 2 or _rank(world.engines[0]) <= _rank(world.engines[1]):
        return world
    return world._replace(engines=world.engines[::-1])


def _rank(engine: Engine) -> tuple[object, ...]:
    return (engine.runs or 0, engine.newest, engine.serving or ())


def begin(num_parts: int, num_engines: int, last: int = 4, last_of_second: int = 0) -> World:
    """Return a world in which version 3 has come while an engine fetches version 2."""
    present: tuple[int | None, ...] = (3, 2, 1, *NONE)  # the slot after the newest is being read
    first = Part(present, known=Seen(0, frozenset({1, 2, 3})), held=frozenset({2}))
    engines = [Engine(1, Serving(2, 1, "fetch"), newest=1), Engine(3, newest=3)]
    return World(
        contents=((3, 2, 1, TORN, TORN, TORN),) * num_parts,
        head_slots=present,
        readers=(0, 1, 0, 0, 0, 0),
        head=0,
        parts=(first,) * (num_parts - 1),
        learner=Learner(4, "reserve", parts=((3, 0),) * (num_parts - 1), last=last),
        engines=tuple(engines[:num_engines]),
        last_of_second=last_of_second,
    )


def check_end(world: World) -> None:
    """Nothing can happen any more."""
    assert is_up(world)
    newest = newest_complete(world)
    if world.failure != "host":
        assert newest is not None
        if world.failure != "learner":
            assert newest == world.learner.last
        assert {engine.runs for engine in world.engines} == {newest}
    for engine in world.engines:
        assert engine.serving is None
        assert engine.runs is not None, "torn, and nobody heals it"
    assert not any(world.readers)
    assert not any(part.held for part in world.parts if not part.is_lost)
    if world.failure == "restart":
        lefts = (world.head_slots, *(part.slots for part in world.parts))
        assert not any(any(of_memory(slots, False)) for slots in lefts), "memory that nobody needs"


def search(start: World, careless: str = "") -> tuple[set[World], int]:
    """Return every world that can come about, and how many of them are ends."""
    known = {canonical(start)}
    waiting, num_ends = deque(known), 0
    while waiting:
        world = waiting.popleft()
        onward = [canonical(one) for one in following(world, careless)]
        if not onward:
            num_ends += 1
            check_end(world)
        for one in (*onward, *map(canonical, failures(world))):
            if one not in known:
                known.add(one)
                waiting.append(one)
    return known, num_ends


@pytest.mark.parametrize(
    ("num_parts", "num_engines", "last", "last_of_second"),
    [
        (2, 1, 5, 1),
        (2, 2, 4, 2),
        (3, 1, 4, 0),
        # `make test` has as many versions, hosts and engines, but not at once
        pytest.param(2, 1, 5, 2, marks=pytest.mark.slow),
        pytest.param(3, 2, 4, 1, marks=pytest.mark.slow),
    ],
)
def test_no_order_of_steps_and_no_failure_breaks_the_guarantees(
    num_parts: int, num_engines: int, last: int, last_of_second: int
):
    known, num_ends = search(begin(num_parts, num_engines, last, last_of_second))
    kinds = {world.failure for world in known}
    expected = {"", "head", "part", "host", "engine", "learner"}
    assert kinds == expected | ({"restart"} if last_of_second else set())
    assert num_ends >= len(kinds)


@pytest.mark.parametrize(
    ("careless", "found"), [("reserve", "holds it|while it is fetched"), ("written", "is not None")]
)
def test_the_search_finds_a_learner_that_is_careless(careless: str, found: str):
    with pytest.raises(AssertionError, match=found):
        search(begin(2, 1), careless)

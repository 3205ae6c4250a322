"""Every interleaving of a publish to engines from a learner on several hosts, with one failure.

An exhaustive search over a model: what decides is the code of the relays itself (``Slots``,
``PartBook``, ``Holds``), and the processes around it take their steps in every order. A failure
comes at every point. Checked in every state: while a head lives, no host overwrites bytes that its
engines fetch; no engine loads bytes of two versions, nor goes back. Checked in every state in which
nothing more can happen: every living engine runs the newest version that all hosts have.
"""

from collections import deque
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import pytest

from slipstream.weightbus.version.parts import Holds, PartBook
from slipstream.weightbus.version.slots import NUM_SLOTS, Slots
from slipstream.wire.messages.versions import PolicyVersion

TORN = 0  # content of a slot that is being written


class Serving(NamedTuple):
    """A transaction of one engine."""

    version: int
    slot: int
    step: str  # hold, fetch, load, commit
    host: int = 0  # that is asked next


class Engine(NamedTuple):
    runs: int | None  # None: nothing, or a mixture
    serving: Serving | None = None
    newest: int = 0  # that it ever ran


class Learner(NamedTuple):
    version: int  # to write
    step: str  # reserve, writing, copy, whole, written, publish, done
    host: int = 0
    slot: int = 0
    published: tuple[int, int] = (3, 0)  # version and slot, as it would tell a new head
    parts: tuple[tuple[int, int], ...] = ()  # the same of each part; (0, slot): overwritten
    last: int = 4


class Seen(NamedTuple):
    """A report of a part."""

    incarnation: int
    whole: frozenset[int]


class Part(NamedTuple):
    """A part relay, and its reports on their way."""

    slots: tuple[int | None, ...]
    incarnation: int = 0
    head: int = 0  # incarnation of the head that it heard last
    held: frozenset[int] = frozenset()
    report: Seen | None = None  # in flight
    known: Seen | None = None  # by the head
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


def label(step: int) -> PolicyVersion:
    return PolicyVersion(1, step)


def slots_of(versions: tuple[int | None, ...], readers: tuple[int, ...] = ()) -> Slots:
    slots = Slots()
    for slot, version in enumerate(versions):
        if version is not None:
            slots.written(slot, label(version))
    slots._readers = list(readers or slots._readers)
    return slots


def steps_of(slots: Slots) -> tuple[int | None, ...]:
    return tuple(v.step if (v := slots.version(slot)) else None for slot in range(NUM_SLOTS))


def newest_complete(world: World) -> int | None:
    return _newest(world.head_slots, tuple(part.known for part in world.parts))


@cache
def _newest(head_slots: tuple[int | None, ...], known: tuple[Seen | None, ...]) -> int | None:
    book = PartBook(range(1, len(known) + 1), silence_s=1)
    for number, report in enumerate(known, 1):
        if report is not None:
            whole = [label(step) for step in report.whole]
            book.heard(number, str(report.incarnation), whole, 0.0)
    whole = slots_of(head_slots).whole
    return next((v.step for v in whole if book.is_complete(v)), None)


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
    return frozenset(v.step for v in holds.held(0.0))


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


def is_up(world: World) -> bool:
    return world.head % 2 == 0


# ---- the learner ---------------------------------------------------------------


def learner_step(world: World, careless: str) -> World | None:
    """Return what is after the learner's next step; it takes its steps in one order."""
    learner = world.learner
    match learner.step:
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


def reserve(world: World, careless: str) -> World:
    learner = world.learner
    if is_up(world) and careless != "reserve":
        slot, left = reserved(world.head_slots, world.readers, newest_complete(world))
        world = world._replace(head_slots=left)
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
        left = cleared(part.slots, learner.slot)
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
        whole = written(part.slots, learner.slot, learner.version)
        world = world._replace(parts=changed(world.parts, number, slots=whole))
    told = put(learner.parts, number, (learner.version, learner.slot))
    step = learner._replace(parts=told, host=learner.host + 1)
    is_last = learner.host == len(world.parts)
    return world._replace(learner=step._replace(step="publish") if is_last else step)


def publish(world: World) -> World:
    learner = world.learner
    if is_up(world):
        whole = written(world.head_slots, learner.slot, learner.version)
        world = world._replace(head_slots=whole)
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
    return Seen(part.incarnation, frozenset(v for v in part.slots if v is not None))


def report_steps(world: World) -> Iterator[World]:
    for number, part in enumerate(world.parts):
        if part.report is not None:
            report = part.report
            if not is_up(world):
                yield world._replace(parts=changed(world.parts, number, report=None))
                continue
            held = kept(part.held, part.head, world.head)
            heard = {"report": None, "known": report, "head": world.head, "held": held}
            yield world._replace(parts=changed(world.parts, number, **heard))
        elif (
            is_up(world)
            and not part.is_lost
            and (part.known != seen(part) or part.head != world.head)
        ):
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
            part._replace(held=part.held - {serving.version}) if part.head == world.head else part
            for part in world.parts
        )
        world = world._replace(parts=parts)
    return world._replace(readers=readers)


def engine_steps(world: World) -> Iterator[World]:
    if not is_up(world):
        return
    for number, engine in enumerate(world.engines):
        serving = engine.serving
        if serving is None:
            newest = newest_complete(world)
            if newest is None or newest == engine.runs:
                continue
            if (slot := read(world.head_slots, world.readers, newest)) is None:
                continue
            assert newest >= engine.newest, "an engine goes back"
            readers = put(world.readers, slot, world.readers[slot] + 1)
            begun = Serving(newest, slot, "hold", 1)
            yield world._replace(
                readers=readers, engines=changed(world.engines, number, serving=begun)
            )
            continue
        if serving.step == "hold":
            part = world.parts[serving.host - 1]
            is_there = not part.is_lost and serving.version in part.slots
            if not is_there or part.head != world.head:
                yield ended(world, number)
                continue
            following = serving.host + 1
            is_last = following > len(world.parts)
            onward = serving._replace(
                step="fetch" if is_last else "hold", host=0 if is_last else following
            )
            parts = changed(world.parts, serving.host - 1, held=part.held | {serving.version})
            yield world._replace(
                parts=parts, engines=changed(world.engines, number, serving=onward)
            )
        elif serving.step == "fetch":
            if serving.host > 0:
                part = world.parts[serving.host - 1]
                if part.is_lost or part.slots[serving.slot] != serving.version:
                    yield ended(world, number)
                    continue
            content = world.contents[serving.host][serving.slot]
            assert content == serving.version, "bytes of another version, while the head lives"
            following = serving.host + 1
            is_last = following > len(world.parts)
            onward = serving._replace(step="load" if is_last else "fetch", host=following)
            yield world._replace(engines=changed(world.engines, number, serving=onward))
        elif serving.step == "load":  # from its own memory; torn until it has committed
            onward = serving._replace(step="commit")
            engines = changed(world.engines, number, serving=onward, runs=None)
            yield world._replace(engines=engines)
        else:
            yield ended(world, number, runs=serving.version, newest=serving.version)


# ---- failures ------------------------------------------------------------------


def failures(world: World) -> Iterator[World]:
    if world.failure:
        return
    dead = world._replace(
        head=world.head + 1,
        head_slots=(None,) * NUM_SLOTS,
        readers=(0,) * NUM_SLOTS,
        engines=tuple(engine._replace(serving=None) for engine in world.engines),
        parts=tuple(part._replace(known=None) for part in world.parts),
        failure="head",
    )
    yield dead
    for number, part in enumerate(world.parts):
        version, slot = world.learner.parts[number]
        anew: tuple[int | None, ...] = (None,) * NUM_SLOTS
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


def recoveries(world: World) -> Iterator[World]:
    """The learner starts another head; it does not where it is gone itself."""
    if is_up(world):
        return
    slots: tuple[int | None, ...] = (None,) * NUM_SLOTS
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


def begin(num_parts: int, num_engines: int, last: int = 4) -> World:
    """Return a world in which version 3 has come while an engine fetches version 2."""
    present: tuple[int | None, ...] = (3, 2, 1)  # the slot after the newest is being read
    first = Part(present, known=Seen(0, frozenset({1, 2, 3})), held=frozenset({2}))
    engines = [Engine(1, Serving(2, 1, "fetch"), newest=1), Engine(3, newest=3)]
    return World(
        contents=((3, 2, 1),) * num_parts,
        head_slots=present,
        readers=(0, 1, 0),
        head=0,
        parts=(first,) * (num_parts - 1),
        learner=Learner(4, "reserve", parts=((3, 0),) * (num_parts - 1), last=last),
        engines=tuple(engines[:num_engines]),
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
    assert world.readers == (0,) * NUM_SLOTS
    assert not any(part.held for part in world.parts if not part.is_lost)


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
    ("num_parts", "num_engines", "last"), [(2, 1, 5), (2, 2, 4), (3, 1, 4), (3, 2, 4)]
)
def test_no_order_of_steps_and_no_failure_breaks_the_guarantees(
    num_parts: int, num_engines: int, last: int
):
    known, num_ends = search(begin(num_parts, num_engines, last))
    kinds = {world.failure for world in known}
    assert kinds == {"", "head", "part", "host", "engine", "learner"}
    assert num_ends >= len(kinds)


@pytest.mark.parametrize(
    ("careless", "found"), [("reserve", "holds it|while it is fetched"), ("written", "is not None")]
)
def test_the_search_finds_a_learner_that_is_careless(careless: str, found: str):
    with pytest.raises(AssertionError, match=found):
        search(begin(2, 1), careless)

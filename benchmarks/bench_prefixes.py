"""Prefixes of trajectories in a small KV cache: computed once, or again after each sleep in a tool.

Trajectories of several turns, in groups that begin with the same prompt, go through the lanes of a
generator's worker. Between turns each sleeps as long as a command of a coding agent took: the times
of 32 commands, from `ls` to a run of tests, are in this file. Before: lanes that follow the tokens
of running sequences, and a cache that evicts what was used least recently. After: lanes that follow
the tokens of all live trajectories, and a cache that knows which are live. In the middle of each
measurement the engine gets new weights, and every live prefix has to be computed again.

First a model of the engine in virtual time, then a real SGLang on one thread. Unavoidable is the
first computation of a token, and of a live prefix under new weights. The hit rate is over tokens
that a trajectory had computed before, the lowest of any 100 calls in a row.
"""

import argparse
import asyncio
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, TypeAlias

from typing_extensions import override

from benchmarks.bars import Bars
from benchmarks.broker.process import work_folder
from benchmarks.run_measurement import write_inputs
from benchmarks.sglang_server import sglang_server
from slipstream.generators.config import GeneratorSettings, generator_settings
from slipstream.generators.engine import EngineLoad, SamplingParams
from slipstream.generators.lanes.concurrency import Range
from slipstream.generators.lanes.lanes import Booking, CallLanes, Lanes
from slipstream.generators.lanes.live_tokens import LiveTokens
from slipstream.generators.sglang.engine import SglangEngine
from slipstream.generators.sglang.process import SglangProcess
from slipstream.wire.messages.status import REPORT_EVERY_S
from slipstream.wire.messages.versions import PolicyVersion

RECORDED_S = (
    *(0.003, 0.013, 0.010, 0.013, 0.004, 0.011, 0.011, 0.002, 0.008, 0.002, 0.014, 0.152, 0.016),
    *(0.517, 0.062, 0.002, 0.290, 0.006, 0.002, 0.175, 7.459, 0.024, 0.007, 0.004, 1.908, 0.004),
    *(0.002, 0.041, 3.819, 0.004, 0.029, 0.002),
)
CACHED_TOKENS = 12_288
LONGEST = 2600  # tokens of a trajectory
_SIZE = 4  # trajectories of a group
_SEQUENCES, _OUTSIDE = 64, 256
_TOKENS = 3, 90  # first, and past the last
_WINDOW = 100  # calls
_TIMEOUT_S = 600.0
_PREFILL_PER_S, _STEP_S = 4000.0, 0.005  # rates of the model, roughly the real engine's


class Turn(NamedTuple):
    """One call of the engine, and what follows it."""

    num_new: int  # tokens of a prompt or of a tool's result, before the reply
    num_reply: int
    think_s: float


Group: TypeAlias = list[list[Turn]]


@dataclass(slots=True)
class Found:
    """What all calls of one setting found."""

    # Tokens of each prompt, those that the trajectory had computed before, and the cached ones.
    calls: list[tuple[int, int, int]] = field(default_factory=list)
    seconds: float = 0.0
    live: int = 0
    most_live: int = 0

    @property
    def prefilled(self) -> float:
        """Prefilled tokens over the unavoidable ones."""
        unavoidable = sum(num - max(known, cached) for num, known, cached in self.calls)
        return sum(num - cached for num, _, cached in self.calls) / unavoidable

    @property
    def lowest_hit_rate(self) -> float:
        """Lowest hit rate of any window of calls."""
        calls = [(known, min(known, cached)) for _, known, cached in self.calls if known]
        windows = (calls[i : i + _WINDOW] for i in range(len(calls) - _WINDOW + 1))
        rates = (map(sum, zip(*window, strict=True)) for window in windows)
        return min(hits / known for known, hits in rates)


def groups_of(count: int, *, of_recorded: float) -> list[Group]:
    """Return the same groups each time, which sleep for this share of the recorded times."""
    rng = random.Random(0)  # noqa: S311 no secret
    groups: list[Group] = []
    for _ in range(count):
        prompt = rng.randint(60, 240)
        groups.append([])
        for _ in range(_SIZE):
            times = rng.choices(RECORDED_S, k=min(24, 4 + int(rng.expovariate(1 / 12))))
            news = [prompt, *(rng.randint(10, 110) for _ in times[1:])]
            turns = zip(news, times, strict=True)
            groups[-1].append([Turn(new, rng.randint(12, 48), of_recorded * s) for new, s in turns])
    return groups


class SimulatedEngine:
    """A cache that gives up the newest tokens of the prefix that was used least recently."""

    def __init__(self, *, knows_live: bool) -> None:
        self.version = 0
        self._knows_live = knows_live
        self._parts: dict[str, list[int]] = {}  # tokens of each call; used least recently first
        self._running: set[str] = set()
        self._live: set[str] = set()
        self._freed = asyncio.Condition()
        self._prefills = asyncio.Lock()
        self._num_waiting = 0

    async def ask(self, ids: list[int], params: SamplingParams) -> tuple[list[int], int]:
        """Return a reply and how many tokens of the prompt were cached."""
        parts = self._parts[params.session] = self._parts.pop(params.session, [])
        self._running.add(params.session)
        self._live.add(params.session)
        num_cached = sum(parts)
        num_new = len(ids) - num_cached + params.max_new_tokens - 1
        self._num_waiting += 1
        async with self._freed:
            await self._freed.wait_for(lambda: self._make_room(num_new))
        self._num_waiting -= 1
        parts.append(num_new)
        async with self._prefills:
            await asyncio.sleep((len(ids) - num_cached) / _PREFILL_PER_S)
        await asyncio.sleep(params.max_new_tokens * _STEP_S)
        self._parts[params.session] = self._parts.pop(params.session)
        self._running.remove(params.session)
        async with self._freed:
            self._freed.notify_all()
        return [3] * params.max_new_tokens, num_cached

    def _make_room(self, num_tokens: int) -> bool:
        """Evict, ended trajectories first if they are known."""
        room = CACHED_TOKENS - sum(map(sum, self._parts.values()))
        idle = [session for session in self._parts if session not in self._running]
        for session in sorted(idle, key=lambda one: self._knows_live and one in self._live):
            while room < num_tokens and self._parts[session]:
                room += self._parts[session].pop()
        return room >= num_tokens

    async def load(self) -> EngineLoad:
        """Return the load; prefixes that are merely kept are none."""
        return EngineLoad(
            num_running=len(self._running) - self._num_waiting,
            num_waiting=self._num_waiting,
            used_tokens=sum(sum(self._parts[session]) for session in self._running),
            capacity_tokens=CACHED_TOKENS,
            num_retractions=0,
        )

    def end_session(self, session: str) -> None:
        """Let a trajectory end."""
        self._live.remove(session)

    async def adopt(self, version: int) -> None:
        """Take new weights."""
        self.version = version
        for session in self._parts.keys() - self._running:
            self._parts[session].clear()


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes as soon as nothing else is left to do."""

    _now_s = 0.0

    @override
    def time(self) -> float:
        return self._now_s

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:
            self._now_s = max(self._now_s, self._scheduled[0].when())
        super()._run_once()


class RealEngine(SglangEngine):
    """A real engine that shows how many tokens of a prompt it had in its cache."""

    def __init__(self, process: SglangProcess, folder: Path, *, knows_live: bool) -> None:
        super().__init__(
            process.url, process.api_key, request_timeout_s=_TIMEOUT_S, control_timeout_s=_TIMEOUT_S
        )
        self.version = 0
        self._folder = folder
        self._knows_live = knows_live

    async def ask(self, ids: list[int], params: SamplingParams) -> tuple[list[int], int]:
        """Return a reply and how many tokens of the prompt were cached."""
        params = params if self._knows_live else replace(params, session="")
        (answer,) = await self._answers(self._question(ids, params, count=1, seeds=()), 1)
        return answer["output_ids"], answer["meta_info"]["cached_tokens"]

    @override
    def end_session(self, session: str) -> None:
        if self._knows_live:
            super().end_session(session)

    async def adopt(self, version: int) -> None:
        """Take new weights."""
        self.version = version
        await self.adopt_folder(self._folder, PolicyVersion(0, version), digest="")


Engine: TypeAlias = SimulatedEngine | RealEngine


async def measured(engine: Engine, groups: Sequence[Group], *, counts_live: bool) -> Found:
    """Run all groups; new weights come when half of them have begun."""
    clock = asyncio.get_running_loop().time
    lanes = Lanes(
        Range(lowest=_SIZE, highest=_SEQUENCES, step=_SIZE),
        longest_tokens=LONGEST,
        most_outside=_OUTSIDE,
        live=LiveTokens(LONGEST) if counts_live else None,
        now=clock,
    )

    async def poll() -> None:
        while True:
            lanes.observe(await engine.load())
            await asyncio.sleep(REPORT_EVERY_S)

    found, began_s = Found(), clock()
    polling = asyncio.create_task(poll())
    async with asyncio.TaskGroup() as tasks:
        for number, group in enumerate(groups):
            await lanes.until_free()
            tasks.create_task(_group(engine, found, number, group, lanes.book(_SIZE)))
            await asyncio.sleep(0)
            if number == len(groups) // 2:
                await engine.adopt(1)
    polling.cancel()
    found.seconds = clock() - began_s
    return found


async def _group(engine: Engine, found: Found, number: int, group: Group, booking: Booking) -> None:
    await booking.enter()
    found.live += len(group)
    found.most_live = max(found.most_live, found.live)

    async def run(sibling: int, turns: list[Turn]) -> None:
        session = f"{number}/{sibling}"
        async with booking.by_call() as lanes:
            await _turns(engine, found, session, turns, lanes)
        engine.end_session(session)
        booking.leave(1)
        found.live -= 1

    await asyncio.gather(*(run(sibling, turns) for sibling, turns in enumerate(group)))


async def _turns(
    engine: Engine, found: Found, session: str, turns: list[Turn], lanes: CallLanes
) -> None:
    ids: list[int] = []
    num_known = version = 0
    rng = random.Random(session.partition("/")[0])  # noqa: S311 no secret; of the group's prompt
    for turn in turns:
        ids += [rng.randrange(*_TOKENS) for _ in range(turn.num_new)]
        rng = rng if num_known else random.Random(session)  # noqa: S311 no secret
        params = SamplingParams(
            temperature=1.0,
            max_new_tokens=turn.num_reply,
            min_new_tokens=turn.num_reply,
            session=session,
        )
        async with lanes.call():
            num_known, version = num_known if version == engine.version else 0, engine.version
            reply, num_cached = await engine.ask(ids, params)
        if version == engine.version:  # else it was computed under both
            found.calls.append((len(ids), num_known, num_cached))
        version = engine.version
        ids += reply
        num_known = len(ids) - 1  # the next call computes keys and values of the last one
        lanes.hold(len(ids))
        await asyncio.sleep(turn.think_s)


def simulated(num_groups: int, *, steered: bool) -> Found:
    """Run trajectories in virtual time, before (not steered) or after."""

    async def run() -> Found:
        groups = groups_of(num_groups, of_recorded=1.0)
        return await measured(SimulatedEngine(knows_live=steered), groups, counts_live=steered)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(run())


async def real(process: SglangProcess, folder: Path, *, steered: bool) -> Found:
    """Run trajectories in a real engine, before (not steered) or after."""
    engine = RealEngine(process, folder, knows_live=steered)
    try:
        await engine.adopt(0)
        return await measured(engine, groups_of(24, of_recorded=0.2), counts_live=steered)
    finally:
        await engine.close()


def judge(bars: Bars, kind: str, before: Found, after: Found) -> None:
    """Print what was found, and its bars."""
    for title, found in (("before", before), ("after", after)):
        print(
            f"  {kind}, {title}: {found.prefilled:.2f} x the unavoidable prefilled, hit rate never "
            f"below {found.lowest_hit_rate:.2f}, {found.most_live} live at most, "
            f"{found.seconds:.0f} s",
            flush=True,
        )
    bars.at_most(f"{kind}_lru_hit_rate", before.lowest_hit_rate, "share", needs=0.2)
    bars.at_least(f"{kind}_hit_rate", after.lowest_hit_rate, "share", needs=0.9)
    bars.at_most(f"{kind}_prefilled", after.prefilled, "x unavoidable", needs=1.1)


def _settings(folder: Path) -> GeneratorSettings:
    write_inputs(folder, hidden=64, layers=2)
    config = folder / "model" / "config.json"
    positions = {"max_position_embeddings": LONGEST}
    config.write_text(json.dumps(json.loads(config.read_bytes()) | positions))
    generators = {"device": "cpu", "max_sequences": _SEQUENCES, "max_cached_tokens": CACHED_TOKENS}
    return generator_settings(
        {
            "run": {"name": "p", "dir": str(folder), "model": str(folder / "model")},
            "sampling": {"max_prompt_tokens": LONGEST // 2, "max_response_tokens": LONGEST // 2},
            "environment": {"function": "none.py:None", "max_tokens": LONGEST},
            "generators": generators,
        }
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench_prefixes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--simulated", action="store_true", help="without a real engine")
    bars = Bars()
    is_simulated = parser.parse_args().simulated
    judge(bars, "simulated", simulated(72, steered=False), simulated(72, steered=True))
    if not is_simulated:
        with work_folder() as folder, sglang_server(_settings(folder)) as process:
            before, after = (
                asyncio.run(real(process, folder / "model", steered=steered))
                for steered in (False, True)
            )
        judge(bars, "real", before, after)
    return bars.exit_code


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)

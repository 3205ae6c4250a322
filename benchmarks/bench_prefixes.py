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
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, Protocol

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
GROUP_SIZE = 4
CACHED_TOKENS = 12_288
MOST_SEQUENCES, MOST_OUTSIDE = 64, 256
LONGEST = 2600  # tokens of a trajectory
NEEDS_PREFILLED = 1.1  # of the unavoidable
NEEDS_HIT_RATE = 0.9
LRU_BELOW = 0.2
_WINDOW = 100  # calls
_MOST_TURNS = 24
_TOKENS = 3, 90  # first, and past the last
_OF_RECORDED = 0.2  # of the recorded times, with the real engine
_HIDDEN, _LAYERS = 64, 2
_GROUPS = 24
_SIMULATED = 3  # times as many groups
_TIMEOUT_S = 600.0
_PREFILL_PER_S, _STEP_S = 4000.0, 0.005  # of the model; roughly those of the real engine
_EXAMPLES = """examples:
  python -m benchmarks.bench_prefixes
  python -m benchmarks.bench_prefixes --simulated --groups 400"""


class Turn(NamedTuple):
    """One call of the engine, and what follows it."""

    num_new: int  # tokens of a prompt or of a tool's result, before the reply
    num_reply: int
    think_s: float


class Call(NamedTuple):
    """What one call of the engine found in the cache."""

    num_prompt: int
    num_known: int  # tokens that the trajectory had computed before, under these weights
    num_cached: int


@dataclass(slots=True)
class Found:
    """What all calls of one setting found."""

    calls: list[Call] = field(default_factory=list)
    seconds: float = 0.0
    most_live: int = 0

    @property
    def prefilled(self) -> float:
        """Prefilled tokens over the unavoidable ones."""
        unavoidable = sum(num - max(known, cached) for num, known, cached in self.calls)
        return sum(num - cached for num, _, cached in self.calls) / unavoidable

    @property
    def lowest_hit_rate(self) -> float:
        """Lowest hit rate of any window of calls."""
        known = [call for call in self.calls if call.num_known]
        windows = [known[i : i + _WINDOW] for i in range(len(known) - _WINDOW + 1)]
        return min(
            sum(min(call.num_known, call.num_cached) for call in window)
            / sum(call.num_known for call in window)
            for window in windows
        )


class Engine(Protocol):
    """An engine whose hits are counted."""

    async def ask(self, ids: list[int], params: SamplingParams) -> tuple[list[int], int]:
        """Return a reply and how many tokens of the prompt were cached."""
        ...

    async def load(self) -> EngineLoad: ...
    def end_session(self, session: str) -> None: ...
    async def adopt(self, version: int) -> None:
        """Take new weights."""
        ...


def trajectories_of(num_groups: int, *, of_recorded: float = 1.0) -> Iterator[list[list[Turn]]]:
    """Yield groups of the same trajectories in every setting.

    They sleep for this share of the recorded times.
    """
    rng = random.Random(0)  # noqa: S311 no secret
    for _ in range(num_groups):
        prompt = rng.randint(60, 240)
        yield [
            [
                Turn(
                    prompt if i == 0 else rng.randint(10, 110),
                    rng.randint(12, 48),
                    of_recorded * think_s,
                )
                for i, think_s in enumerate(rng.choices(RECORDED_S, k=_num_turns(rng)))
            ]
            for _ in range(GROUP_SIZE)
        ]


def _num_turns(rng: random.Random) -> int:
    return min(_MOST_TURNS, 4 + int(rng.expovariate(1 / 12)))


class Measurement:
    """All trajectories of one setting."""

    def __init__(self, engine: Engine, lanes: Lanes, *, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._lanes = lanes
        self._clock = clock
        self._found = Found()
        self._num_live = 0
        self._version = 0

    async def run(self, groups: Sequence[list[list[Turn]]]) -> Found:
        """Run all groups; new weights come when half of them have begun."""
        began_s = self._clock()
        polling = asyncio.create_task(self._poll())
        async with asyncio.TaskGroup() as tasks:
            for number, group in enumerate(groups):
                await self._lanes.until_free()
                booking = self._lanes.book(GROUP_SIZE)
                tasks.create_task(self._group(number, group, booking))
                await asyncio.sleep(0)
                if number == len(groups) // 2:
                    self._version += 1
                    await self._engine.adopt(self._version)
        polling.cancel()
        self._found.seconds = self._clock() - began_s
        return self._found

    async def _group(self, number: int, group: list[list[Turn]], booking: Booking) -> None:
        await booking.enter()
        self._num_live += len(group)
        self._found.most_live = max(self._found.most_live, self._num_live)
        rng = random.Random(number)  # noqa: S311 no secret
        prompt = [rng.randrange(*_TOKENS) for _ in range(group[0][0].num_new)]

        async def run(sibling: int, turns: list[Turn]) -> None:
            session = f"{number}/{sibling}"
            try:
                async with booking.by_call() as lanes:
                    await self._turns(session, prompt, turns, lanes)
            finally:
                self._engine.end_session(session)
            booking.leave(1)
            self._num_live -= 1

        await asyncio.gather(*(run(sibling, turns) for sibling, turns in enumerate(group)))

    async def _turns(
        self, session: str, prompt: list[int], turns: list[Turn], lanes: CallLanes
    ) -> None:
        rng = random.Random(session)  # noqa: S311 no secret
        ids, num_known, version = list(prompt), 0, self._version
        for turn in turns:
            if num_known:
                ids += [rng.randrange(*_TOKENS) for _ in range(turn.num_new)]
            params = SamplingParams(
                temperature=1.0,
                max_new_tokens=turn.num_reply,
                min_new_tokens=turn.num_reply,
                session=session,
            )
            async with lanes.call():
                num_known, version = num_known if version == self._version else 0, self._version
                reply, num_cached = await self._engine.ask(ids, params)
            if version == self._version:  # else it was computed under both
                self._found.calls.append(Call(len(ids), num_known, num_cached))
            version = self._version
            ids += reply
            num_known = len(ids) - 1  # the next call computes keys and values of the last one
            lanes.hold(len(ids))
            await asyncio.sleep(turn.think_s)

    async def _poll(self) -> None:
        while True:
            self._lanes.observe(await self._engine.load())
            await asyncio.sleep(REPORT_EVERY_S)


@dataclass(slots=True)
class Prefix:
    """Tokens of one trajectory in a simulated cache."""

    parts: list[int] = field(default_factory=list)  # tokens of each call, the newest last
    used_s: float = 0.0
    is_running: bool = False
    is_live: bool = True


class SimulatedEngine:
    """A cache that gives up the newest tokens of the prefix that was used least recently."""

    def __init__(self, *, knows_live: bool, clock: Callable[[], float]) -> None:
        self._knows_live = knows_live
        self._clock = clock
        self._prefixes: dict[str, Prefix] = {}
        self._freed = asyncio.Event()
        self._prefills = asyncio.Lock()
        self._num_waiting = 0

    async def ask(self, ids: list[int], params: SamplingParams) -> tuple[list[int], int]:
        prefix = self._prefixes.setdefault(params.session, Prefix())
        prefix.is_running, prefix.used_s = True, self._clock()
        num_cached = sum(prefix.parts)
        num_new = len(ids) - num_cached + params.max_new_tokens - 1
        self._num_waiting += 1
        while not self._make_room(num_new):
            self._freed.clear()
            await self._freed.wait()
        self._num_waiting -= 1
        prefix.parts.append(num_new)
        async with self._prefills:
            await asyncio.sleep((len(ids) - num_cached) / _PREFILL_PER_S)
        await asyncio.sleep(params.max_new_tokens * _STEP_S)
        prefix.is_running, prefix.used_s = False, self._clock()
        self._freed.set()
        return [3] * params.max_new_tokens, num_cached

    def _make_room(self, num_tokens: int) -> bool:
        """Evict, ended trajectories first if they are known."""
        room = CACHED_TOKENS - sum(sum(prefix.parts) for prefix in self._prefixes.values())
        idle = [prefix for prefix in self._prefixes.values() if not prefix.is_running]
        idle.sort(key=lambda prefix: (prefix.is_live and self._knows_live, prefix.used_s))
        for prefix in idle:
            while room < num_tokens and prefix.parts:
                room += prefix.parts.pop()
        return room >= num_tokens

    async def load(self) -> EngineLoad:
        running = [prefix for prefix in self._prefixes.values() if prefix.is_running]
        return EngineLoad(
            num_running=len(running) - self._num_waiting,
            num_waiting=self._num_waiting,
            used_tokens=sum(sum(prefix.parts) for prefix in running),
            capacity_tokens=CACHED_TOKENS,
            num_retractions=0,
        )

    def end_session(self, session: str) -> None:
        self._prefixes[session].is_live = False

    async def adopt(self, version: int) -> None:
        del version
        for prefix in self._prefixes.values():
            if not prefix.is_running:
                prefix.parts.clear()


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

    knows_live = True
    folder = Path()  # weights

    async def ask(self, ids: list[int], params: SamplingParams) -> tuple[list[int], int]:
        if not self.knows_live:
            params = replace(params, session="")
        (answer,) = await self._answers(self._question(ids, params, count=1, seeds=()), 1)
        return answer["output_ids"], answer["meta_info"]["cached_tokens"]

    @override
    def end_session(self, session: str) -> None:
        if self.knows_live:
            super().end_session(session)

    async def adopt(self, version: int) -> None:
        await self.adopt_folder(self.folder, PolicyVersion(0, version), digest="")


def lanes_of(*, counts_live: bool, clock: Callable[[], float]) -> Lanes:
    """Return adaptive lanes, with or without the tokens of live trajectories."""
    return Lanes(
        Range(lowest=GROUP_SIZE, highest=MOST_SEQUENCES, step=GROUP_SIZE),
        longest_tokens=LONGEST,
        most_outside=MOST_OUTSIDE,
        live=LiveTokens(LONGEST) if counts_live else None,
        now=clock,
    )


def simulated(groups: Sequence[list[list[Turn]]], *, counts_live: bool, knows_live: bool) -> Found:
    """Run trajectories in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        clock = runner.get_loop().time
        engine = SimulatedEngine(knows_live=knows_live, clock=clock)
        lanes = lanes_of(counts_live=counts_live, clock=clock)
        return runner.run(Measurement(engine, lanes, clock=clock).run(groups))


def measured(
    process: SglangProcess, folder: Path, groups: Sequence[list[list[Turn]]], *, steered: bool
) -> Found:
    """Run trajectories in a real engine."""

    async def run() -> Found:
        engine = RealEngine(
            process.url, process.api_key, request_timeout_s=_TIMEOUT_S, control_timeout_s=_TIMEOUT_S
        )
        engine.knows_live, engine.folder = steered, folder
        try:
            await engine.adopt(0)
            lanes = lanes_of(counts_live=steered, clock=time.monotonic)
            return await Measurement(engine, lanes, clock=time.monotonic).run(groups)
        finally:
            await engine.close()

    return asyncio.run(run())


def _settings(folder: Path) -> GeneratorSettings:
    write_inputs(folder, hidden=_HIDDEN, layers=_LAYERS)
    config = folder / "model" / "config.json"
    positions = {"max_position_embeddings": LONGEST}
    config.write_text(json.dumps(json.loads(config.read_bytes()) | positions))
    return generator_settings(
        {
            "run": {"name": "p", "dir": str(folder), "model": str(folder / "model")},
            "sampling": {"max_prompt_tokens": LONGEST // 2, "max_response_tokens": LONGEST // 2},
            "environment": {"function": "none.py:None", "max_tokens": LONGEST},
            "generators": {
                "device": "cpu",
                "max_sequences": MOST_SEQUENCES,
                "max_cached_tokens": CACHED_TOKENS,
            },
        }
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench_prefixes",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--groups", type=int, default=_GROUPS, help=f"of {GROUP_SIZE}")
    parser.add_argument("--simulated", action="store_true", help="without a real engine")
    arguments = parser.parse_args()
    bars = Bars()
    _simulate(bars, list(trajectories_of(_SIMULATED * arguments.groups)))
    if not arguments.simulated:
        groups = list(trajectories_of(arguments.groups, of_recorded=_OF_RECORDED))
        with work_folder() as folder, sglang_server(_settings(folder)) as process:
            before, after = (
                measured(process, folder / "model", groups, steered=steered)
                for steered in (False, True)
            )
        _judge(bars, "real", before, after)
    return bars.exit_code


def _simulate(bars: Bars, groups: Sequence[list[list[Turn]]]) -> None:
    for title, counts_live in (("a cache", False), ("lanes", True)):
        found = simulated(groups, counts_live=counts_live, knows_live=not counts_live)
        _show(f"simulated, {title} of live ones alone", found)
    before = simulated(groups, counts_live=False, knows_live=False)
    _judge(bars, "simulated", before, simulated(groups, counts_live=True, knows_live=True))


def _judge(bars: Bars, kind: str, before: Found, after: Found) -> None:
    _show(f"{kind}, before", before)
    _show(f"{kind}, after", after)
    bars.at_most(f"{kind}_lru_hit_rate", before.lowest_hit_rate, "share", needs=LRU_BELOW)
    bars.at_least(f"{kind}_hit_rate", after.lowest_hit_rate, "share", needs=NEEDS_HIT_RATE)
    bars.at_most(f"{kind}_prefilled", after.prefilled, "x unavoidable", needs=NEEDS_PREFILLED)


def _show(title: str, found: Found) -> None:
    print(
        f"  {title}: {found.prefilled:.2f} x the unavoidable prefilled, hit rate never below "
        f"{found.lowest_hit_rate:.2f}, {found.most_live} live at most, {found.seconds:.0f} s",
        flush=True,
    )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)

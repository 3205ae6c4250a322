"""Adaptive concurrency against fixed numbers of sequences, on a real SGLang with a small KV cache.

One server, one thread, a random tiny policy. Groups of answers with long-tailed lengths (a
lognormal number of tokens before an answer may end, then a geometric one) are given to it through
the lanes that a generator's worker uses: adaptive, or a fixed number. Every setting does the same
groups in alternating turns; medians.
The cache holds a fraction of the largest number. SGLang keeps most of the others waiting in its
queue, and throws some out of the cache (retracts them) and computes them again, as its log reports.
"""

import argparse
import asyncio
import math
import random
import re
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.bars import Bars
from benchmarks.broker.process import work_folder
from benchmarks.run_measurement import write_inputs
from benchmarks.sglang_server import sglang_server
from slipstream.generators.config import GeneratorSettings, generator_settings
from slipstream.generators.engine import SamplingParams
from slipstream.generators.lanes.concurrency import Range
from slipstream.generators.lanes.lanes import Booking, Lanes
from slipstream.generators.sglang.engine import SglangEngine
from slipstream.generators.sglang.process import SglangProcess
from slipstream.wire.messages.status import REPORT_EVERY_S
from slipstream.wire.messages.versions import PolicyVersion

GROUP_SIZE = 4
MOST_SEQUENCES = 256
FIXED = (32, 40, 48, 64, MOST_SEQUENCES)  # some forty fit
MAX_PROMPT_TOKENS, MAX_RESPONSE_TOKENS = 16, 896
CACHED_TOKENS = 12_288
NEEDS_OF_BEST = 0.9
NEEDS_OF_TOO_MANY = 1.2
NEEDS_RECOMPUTED = 0.01
_MEDIAN_LEAST = 150  # tokens before an answer may end; after them one token in 96 ends it
_LONGEST_LEAST = 800
_TURNS = 3
_GROUPS = 100
_HIDDEN, _LAYERS = 64, 2  # many steps in little time: SGLang's admission adapts over 600
_TIMEOUT_S = 600.0
_RETRACTED = re.compile(r"#retracted_reqs: (\d+), #new_tokens_gained: (-?\d+)")
_EXAMPLES = """examples:
  python -m benchmarks.bench_concurrency
  python -m benchmarks.bench_concurrency --conservativeness 0.3 --turns 1"""


@dataclass(frozen=True, slots=True)
class Turn:
    """What one setting did with all groups."""

    tokens_per_s: float
    retractions: int
    recomputed: float  # tokens given up, as a share of those generated
    mean_in_flight: float


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer to be generated."""

    prompt_ids: list[int]
    params: SamplingParams
    seed: int


def groups_of(count: int) -> Iterator[list[Answer]]:
    """Yield the same groups in every turn."""
    rng = random.Random(0)  # noqa: S311 no secret
    for _ in range(count):
        prompt_ids = [rng.randrange(3, 30) for _ in range(MAX_PROMPT_TOKENS)]
        yield [Answer(prompt_ids, _params(rng), rng.getrandbits(60)) for _ in range(GROUP_SIZE)]


def _params(rng: random.Random) -> SamplingParams:
    least = min(_LONGEST_LEAST, int(rng.lognormvariate(math.log(_MEDIAN_LEAST), 1.0)))
    return SamplingParams(temperature=1.0, max_new_tokens=MAX_RESPONSE_TOKENS, min_new_tokens=least)


class Turning:
    """Gives all groups of one turn to the engine."""

    def __init__(self, engine: SglangEngine, lanes: Lanes) -> None:
        self._engine = engine
        self._lanes = lanes
        self._num_tokens = 0
        self._in_flight: list[int] = []

    async def run(self, count: int, log_file: Path) -> Turn:
        logged = len(_from(log_file, 0))
        before = await self._engine.load()
        began_s = time.perf_counter()
        polling = asyncio.create_task(self._poll())
        async with asyncio.TaskGroup() as tasks:
            for group in groups_of(count):
                while self._lanes.free < GROUP_SIZE:
                    await self._lanes.until_changed()
                booking = self._lanes.book(GROUP_SIZE)
                await booking.enter()
                for answer in group:
                    tasks.create_task(self._answer(answer, booking))
        seconds = time.perf_counter() - began_s
        polling.cancel()
        given_up = sum(int(m[2]) for m in _RETRACTED.finditer(_from(log_file, logged)))
        return Turn(
            tokens_per_s=self._num_tokens / seconds,
            retractions=(await self._engine.load()).num_retractions - before.num_retractions,
            recomputed=given_up / self._num_tokens,
            mean_in_flight=statistics.fmean(self._in_flight),
        )

    async def _answer(self, answer: Answer, booking: Booking) -> None:
        (completion,) = await self._engine.sample(
            answer.prompt_ids, answer.params, count=1, seeds=[answer.seed]
        )
        self._num_tokens += len(completion.token_ids)
        booking.leave(1)

    async def _poll(self) -> None:
        while True:
            self._lanes.observe(await self._engine.load())
            self._in_flight.append(self._lanes.in_flight)
            await asyncio.sleep(REPORT_EVERY_S)


def _from(log_file: Path, offset: int) -> str:
    return log_file.read_text(errors="replace")[offset:]


def lanes_for(setting: str) -> Lanes:
    """Return adaptive lanes, or a fixed number."""
    if setting == "adaptive":
        within = Range(lowest=GROUP_SIZE, highest=MOST_SEQUENCES, step=GROUP_SIZE)
        return Lanes(within, longest_tokens=MAX_PROMPT_TOKENS + MAX_RESPONSE_TOKENS)
    return Lanes(Range(lowest=GROUP_SIZE, highest=int(setting), step=GROUP_SIZE))


def _settings(folder: Path, *, conservativeness: float) -> GeneratorSettings:
    write_inputs(folder, hidden=_HIDDEN, layers=_LAYERS)
    return generator_settings(
        {
            "run": {"name": "c", "dir": str(folder), "model": str(folder / "model")},
            "sampling": {
                "max_prompt_tokens": MAX_PROMPT_TOKENS,
                "max_response_tokens": MAX_RESPONSE_TOKENS,
            },
            "generators": {
                "device": "cpu",
                "max_sequences": MOST_SEQUENCES,
                "max_cached_tokens": CACHED_TOKENS,
                "sglang": {"schedule_conservativeness": conservativeness},
            },
        }
    )


async def _measure(process: SglangProcess, setting: str, count: int) -> Turn:
    engine = SglangEngine(
        process.url, process.api_key, request_timeout_s=_TIMEOUT_S, control_timeout_s=_TIMEOUT_S
    )
    try:
        await engine.label(PolicyVersion(0, 0))
        return await Turning(engine, lanes_for(setting)).run(count, process.log_file)
    finally:
        await engine.close()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench_concurrency",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--groups", type=int, default=_GROUPS, help=f"of {GROUP_SIZE}, to a turn")
    parser.add_argument("--turns", type=int, default=_TURNS, help="of each setting")
    parser.add_argument(
        "--conservativeness",
        type=float,
        default=1.0,
        help="SGLang's schedule_conservativeness: below 1 it admits more, and retracts more",
    )
    arguments = parser.parse_args()
    turns: dict[str, list[Turn]] = {"adaptive": [], **{str(number): [] for number in FIXED}}
    with work_folder() as folder:
        settings = _settings(folder, conservativeness=arguments.conservativeness)
        with sglang_server(settings) as process:
            asyncio.run(_measure(process, str(FIXED[0]), 8))  # warm
            for turn in range(arguments.turns):
                for setting in list(turns)[:: 1 if turn % 2 == 0 else -1]:
                    measured = asyncio.run(_measure(process, setting, arguments.groups))
                    turns[setting].append(measured)
                    _show(f"turn {turn} {setting}", measured)
    return _judge({setting: _median(done) for setting, done in turns.items()})


def _judge(medians: dict[str, Turn]) -> int:
    for setting, turn in medians.items():
        _show(f"median {setting}", turn)
    adaptive, too_many = medians["adaptive"], medians[str(MOST_SEQUENCES)]
    best = max(FIXED, key=lambda number: medians[str(number)].tokens_per_s)
    print(f"best fixed number: {best}")
    bars = Bars()
    bars.at_least(
        "adaptive_vs_best_fixed",
        adaptive.tokens_per_s / medians[str(best)].tokens_per_s,
        "x",
        needs=NEEDS_OF_BEST,
    )
    bars.at_least(
        "adaptive_vs_too_many",
        adaptive.tokens_per_s / too_many.tokens_per_s,
        "x",
        needs=NEEDS_OF_TOO_MANY,
    )
    bars.at_most("adaptive_computed_again", adaptive.recomputed, "share", needs=NEEDS_RECOMPUTED)
    return bars.exit_code


def _median(turns: list[Turn]) -> Turn:
    return Turn(
        tokens_per_s=statistics.median(turn.tokens_per_s for turn in turns),
        retractions=int(statistics.median(turn.retractions for turn in turns)),
        recomputed=statistics.median(turn.recomputed for turn in turns),
        mean_in_flight=statistics.median(turn.mean_in_flight for turn in turns),
    )


def _show(title: str, turn: Turn) -> None:
    print(
        f"  {title}: {turn.tokens_per_s:.0f} tokens/s, {turn.retractions} retractions, "
        f"{turn.recomputed:.1%} computed again, {turn.mean_in_flight:.1f} in flight on average",
        flush=True,
    )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)

"""Several turns with tools against one turn: tokens per second of a real SGLang.

One server, one thread, a random policy. As many sequences are in the engine at a time in every
setting, through the lanes that a generator's worker uses. A trajectory is one reply, or several of
the same length together with an environment's answer between them, which takes 0 or 200 ms. Lengths
are fixed before, from half to one and a half of the mean, so that trajectories do not go in step.
The environment has a process for each trajectory, as in a run. Trajectories are begun without end,
as in a run: those that end first are not counted, then the same number of them in every setting, in
alternating turns; medians. The server forgets its cache before each, or the later of two would pay
for what the earlier left there; a first measurement, which is not counted, warms it up.
"""

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import time
from contextlib import AsyncExitStack
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple

import aiohttp

from benchmarks.bars import Bars
from benchmarks.broker.process import work_folder
from benchmarks.run_measurement import write_inputs
from benchmarks.sglang_server import sglang_server
from slipstream.generators.config import GeneratorSettings, generator_settings
from slipstream.generators.engine import SamplingParams
from slipstream.generators.environments.turn_sampler import TurnSampler
from slipstream.generators.lanes.concurrency import Range
from slipstream.generators.lanes.lanes import Booking, Lanes
from slipstream.generators.rollout import Sampler, run_rollouts
from slipstream.generators.sglang.engine import SglangEngine
from slipstream.generators.sglang.process import SglangProcess
from slipstream.generators.text.codec import TextCodec
from slipstream.wire.messages.broker import LeasedGroup
from slipstream.wire.messages.trajectory import Prompt
from slipstream.wire.messages.versions import PolicyVersion

ENVIRONMENT = Path(__file__).with_name("scripted_environment.py")
NEEDS = {0: 0.95, 200: 0.9}  # of one turn's tokens per second, by milliseconds of latency
_TIMEOUT_S = 600.0
_PROMPT = Prompt(prompt="12+34=")
_POSITIONS = 4096
_LOOK_S = 0.02
_LENGTHS = 8  # of replies; an item of the run has one
_EXAMPLES = """examples:
  python -m benchmarks.bench_agents
  python -m benchmarks.bench_agents --trajectories 32 --rounds 1"""


def settings_of(folder: Path, arguments: argparse.Namespace, latency_ms: int) -> GeneratorSettings:
    """Return the settings of a generator whose environment takes this long to answer."""
    longest = max(lengths(arguments.reply_tokens, arguments.turns))
    environment = {
        "function": f"{ENVIRONMENT}:Scripted",
        "options": {"turns": arguments.turns, "latency_s": latency_ms / 1e3},
        "max_turns": arguments.turns,
        "max_tokens": longest + 40 * arguments.turns,  # what is said between replies
        "max_outside": 4 * arguments.sequences,
        "sandbox": arguments.sandbox,
    }
    return generator_settings(
        {
            "run": {"name": "agents", "dir": str(folder), "model": str(folder / "model")},
            "sampling": {"max_prompt_tokens": 16, "max_response_tokens": longest},
            "environment": environment,
            "generators": {
                "device": arguments.device,
                "max_sequences": arguments.sequences,
                "max_cached_tokens": 4096 * arguments.sequences,
                "sglang": arguments.sglang,
            },
        }
    )


def lengths(mean: int, turns: int) -> list[int]:
    """Return how many tokens replies have, from half to one and a half of ``turns`` * ``mean``."""
    return [turns * round(mean * (0.5 + item / (_LENGTHS - 1))) for item in range(_LENGTHS)]


class Measured(NamedTuple):
    """What one setting did."""

    rate: float  # tokens per second
    used: float  # share of the lanes that a sequence of the engine had


class Setting:
    """Trajectories of one kind, through the lanes of an engine."""

    def __init__(
        self, settings: GeneratorSettings, sampler: Sampler, turn_sampler: TurnSampler | None
    ) -> None:
        self._sampler = sampler
        self._turn_sampler = turn_sampler
        most = settings.generators.max_sequences
        outside = settings.most_outside if turn_sampler is not None else 0
        self._lanes = Lanes(Range(lowest=1, highest=most, step=1), most_outside=outside)
        self._num_tokens = self._num_ended = 0
        self._seen: list[int] = []
        self._has_ended = asyncio.Event()

    async def measure(self, warm: int, count: int) -> Measured:
        """Measure while lanes are never without work.

        Args:
            warm: trajectories that end before any is counted.
            count: those that end afterwards, from the end of the last of the former on.
        """
        feeding = asyncio.create_task(self._feed())
        try:
            await self._until(warm, feeding)
            tokens, began_s = self._num_tokens, time.perf_counter()
            looking = asyncio.create_task(self._look())
            await self._until(warm + count, feeding)
            seconds = time.perf_counter() - began_s
            looking.cancel()
            used = statistics.mean(self._seen) / self._lanes.limit
            return Measured((self._num_tokens - tokens) / seconds, used)
        finally:
            feeding.cancel()
            await asyncio.wait({feeding})

    async def _look(self) -> None:
        """Count what the engine has, again and again."""
        self._seen = []
        while True:
            lanes = self._lanes
            self._seen.append(lanes.in_flight if self._turn_sampler is None else lanes.calling)
            await asyncio.sleep(_LOOK_S)

    async def _until(self, num_ended: int, feeding: asyncio.Task[None]) -> None:
        while self._num_ended < num_ended:
            self._has_ended.clear()
            ended = asyncio.create_task(self._has_ended.wait())
            await asyncio.wait({ended, feeding}, return_when=asyncio.FIRST_COMPLETED)
            ended.cancel()
            if feeding.done():
                feeding.result()

    async def _feed(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in itertools.count():
                await self._lanes.until_free()
                booking = self._lanes.book(1)
                await booking.enter()
                tasks.create_task(self._one(number, booking))

    async def _one(self, number: int, booking: Booking) -> None:
        work = LeasedGroup(
            group_id=number,
            lease_id=0,
            item=str(number * 5 % _LENGTHS),
            position=number,
            prompt=_PROMPT,
            siblings=(0,),
        )
        if self._turn_sampler is None:
            ids = self._sampler.codec.encode(_PROMPT)
            ((message, _),) = await run_rollouts(self._sampler, work, (0,), ids)
        else:
            async with booking.by_call() as lanes:
                message, _ = await self._turn_sampler.run(work, 0, lanes)
        self._num_tokens += message.header.num_response_tokens
        self._num_ended += 1
        self._has_ended.set()
        booking.leave(1)


async def _measure(
    process: SglangProcess,
    settings: GeneratorSettings,
    arguments: argparse.Namespace,
    *,
    is_agent: bool,
) -> Measured:
    async with AsyncExitStack() as cleanup:
        engine = SglangEngine(
            process.url, process.api_key, request_timeout_s=_TIMEOUT_S, control_timeout_s=_TIMEOUT_S
        )
        cleanup.push_async_callback(engine.close)
        await _forget(process)
        await engine.label(PolicyVersion(0, 0))
        replies = lengths(arguments.reply_tokens, 1 if is_agent else arguments.turns)
        params = {
            str(item): SamplingParams(temperature=1.0, max_new_tokens=one, min_new_tokens=one)
            for item, one in enumerate(replies)
        }
        codec = TextCodec(settings.model, settings.sampling)
        sampler = Sampler(engine, codec, params, run_seed=1)
        turn_sampler: TurnSampler | None = None
        if is_agent:
            running = TurnSampler.running(settings.environment, settings.sampling, sampler, hide=())
            turn_sampler = await cleanup.enter_async_context(running)
        setting = Setting(settings, sampler, turn_sampler)
        return await setting.measure(2 * arguments.sequences, arguments.trajectories)


async def _forget(process: SglangProcess) -> None:
    """Empty the server's cache, which it refuses as long as it has a sequence."""
    headers = {"Authorization": f"Bearer {process.api_key}"}
    async with asyncio.timeout(_TIMEOUT_S), aiohttp.ClientSession(headers=headers) as http:
        while True:
            async with http.post(f"{process.url}/flush_cache") as answer:
                if answer.status == HTTPStatus.OK:
                    return
            await asyncio.sleep(_LOOK_S)


def parser() -> argparse.ArgumentParser:
    """Return the arguments; ``sglang`` are flags of the server, from programs alone."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench_agents",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--sequences", type=int, default=16, help="in the engine at a time")
    parser.add_argument("--trajectories", type=int, default=24, help="that each measurement counts")
    parser.add_argument("--turns", type=int, default=4, help="replies of a trajectory")
    parser.add_argument("--reply-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each setting")
    parser.add_argument("--hidden", type=int, default=256, help="size of the policy")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4, help="of the policy, half of them for keys")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--sandbox", choices=("namespaces", "none"), default="namespaces")
    parser.set_defaults(sglang={})
    return parser


def measured(arguments: argparse.Namespace) -> dict[str, Measured]:
    """Print every measurement and return the medians of each setting."""
    names = {"one turn": 0, **{f"{ms} ms": ms for ms in NEEDS}}
    found: dict[str, list[Measured]] = {name: [] for name in names}
    with work_folder() as folder:
        write_inputs(folder, hidden=arguments.hidden, layers=arguments.layers)
        config = folder / "model" / "config.json"
        own = {
            "max_position_embeddings": _POSITIONS,
            "num_attention_heads": arguments.heads,
            "num_key_value_heads": arguments.heads // 2,
            "head_dim": arguments.hidden // arguments.heads,
        }
        config.write_text(json.dumps(json.loads(config.read_text()) | own))
        with sglang_server(settings_of(folder, arguments, 0)) as process:
            order = [
                (number, name)
                for number in range(arguments.rounds)
                for name in list(names)[:: 1 if number % 2 == 0 else -1]
            ]
            for number, name in [(-1, "one turn"), *order]:
                settings = settings_of(folder, arguments, names[name])
                is_agent = name != "one turn"
                one = asyncio.run(_measure(process, settings, arguments, is_agent=is_agent))
                when = f"round {number}" if number >= 0 else "warm-up"
                words = f"{one.rate:.0f} tokens/s, {one.used:.1%} of the lanes in use"
                print(f"  {when} {name}: {words}", flush=True)
                if number >= 0:
                    found[name].append(one)
    medians = {
        name: Measured(*map(statistics.median, zip(*ones, strict=True)))
        for name, ones in found.items()
    }
    for name, one in medians.items():
        print(f"  median {name}: {one.rate:.0f} tokens/s, {one.used:.1%} of the lanes", flush=True)
    return medians


def share_of_one_turn(medians: dict[str, Measured], latency_ms: int) -> float:
    """Return the tokens per second of agents over those of one turn."""
    return medians[f"{latency_ms} ms"].rate / medians["one turn"].rate


def main() -> int:
    medians = measured(parser().parse_args())
    bars = Bars()
    for ms, needs in NEEDS.items():
        share = share_of_one_turn(medians, ms)
        bars.at_least(f"agents_{ms}_ms_vs_one_turn", share, "x", needs=needs)
    return bars.exit_code


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)

"""Several turns with tools against one turn: tokens per second of a real SGLang.

One server, one thread, a random policy; replies have a fixed length. As many sequences are in the
engine at a time in every setting, through the lanes that a generator's worker uses. A trajectory is
one reply, or several of the same length together with an environment's answer between them, which
takes 0 or 200 ms. The environment has a process for each trajectory, as in a run. Every setting
does the same number of trajectories in alternating turns; medians.
"""

import argparse
import asyncio
import statistics
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path

from benchmarks.bars import Bars
from benchmarks.broker.process import work_folder
from benchmarks.run_measurement import write_inputs
from benchmarks.sglang_server import sglang_server
from slipstream.generators.concurrency import Range
from slipstream.generators.config import GeneratorSettings, generator_settings
from slipstream.generators.engine import SamplingParams
from slipstream.generators.environments.turn_sampler import TurnSampler
from slipstream.generators.lanes import Booking, Lanes
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
_EXAMPLES = """examples:
  python -m benchmarks.bench_agents
  python -m benchmarks.bench_agents --trajectories 32 --rounds 1"""


def settings_of(folder: Path, arguments: argparse.Namespace, latency_ms: int) -> GeneratorSettings:
    """Return the settings of a generator whose environment takes this long to answer."""
    environment = {
        "function": f"{ENVIRONMENT}:Scripted",
        "options": {"turns": arguments.turns, "latency_s": latency_ms / 1e3},
        "max_turns": arguments.turns,
        "max_tokens": 1000,
        "max_outside": 4 * arguments.sequences,
    }
    longest = arguments.turns * arguments.reply_tokens
    return generator_settings(
        {
            "run": {"name": "agents", "dir": str(folder), "model": str(folder / "model")},
            "sampling": {"max_prompt_tokens": 16, "max_response_tokens": longest},
            "environment": environment,
            "generators": {
                "device": "cpu",
                "max_sequences": arguments.sequences,
                "max_cached_tokens": 65_536,
            },
        }
    )


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
        self._num_tokens = 0

    async def tokens_per_s(self, count: int) -> float:
        """Return the tokens that the policy chose per second over ``count`` trajectories."""
        began_s = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for number in range(count):
                await self._lanes.until_free()
                booking = self._lanes.book(1)
                await booking.enter()
                tasks.create_task(self._one(number, booking))
        return self._num_tokens / (time.perf_counter() - began_s)

    async def _one(self, number: int, booking: Booking) -> None:
        work = LeasedGroup(
            group_id=number,
            lease_id=0,
            item="train",
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
        booking.leave(1)


async def _measure(
    process: SglangProcess,
    settings: GeneratorSettings,
    arguments: argparse.Namespace,
    *,
    is_agent: bool,
) -> float:
    async with AsyncExitStack() as cleanup:
        engine = SglangEngine(
            process.url, process.api_key, request_timeout_s=_TIMEOUT_S, control_timeout_s=_TIMEOUT_S
        )
        cleanup.push_async_callback(engine.close)
        await engine.label(PolicyVersion(0, 0))
        length = arguments.reply_tokens * (1 if is_agent else arguments.turns)
        params = SamplingParams(temperature=1.0, max_new_tokens=length, min_new_tokens=length)
        codec = TextCodec(settings.model, settings.sampling)
        sampler = Sampler(engine, codec, {"train": params}, run_seed=1)
        turn_sampler: TurnSampler | None = None
        if is_agent:
            running = TurnSampler.running(settings.environment, settings.sampling, sampler, hide=())
            turn_sampler = await cleanup.enter_async_context(running)
        return await Setting(settings, sampler, turn_sampler).tokens_per_s(arguments.trajectories)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench_agents",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--sequences", type=int, default=16, help="in the engine at a time")
    parser.add_argument("--trajectories", type=int, default=64, help="of each measurement")
    parser.add_argument("--turns", type=int, default=4, help="replies of a trajectory")
    parser.add_argument("--reply-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each setting")
    parser.add_argument("--hidden", type=int, default=512, help="size of the policy")
    parser.add_argument("--layers", type=int, default=8)
    arguments = parser.parse_args()
    names = {"one turn": 0, **{f"{ms} ms": ms for ms in NEEDS}}
    found: dict[str, list[float]] = {name: [] for name in names}
    with work_folder() as folder:
        write_inputs(folder, hidden=arguments.hidden, layers=arguments.layers)
        with sglang_server(settings_of(folder, arguments, 0)) as process:
            for number in range(-1, arguments.rounds):  # the first one warms
                for name in list(names)[:: 1 if number % 2 == 0 else -1]:
                    settings = settings_of(folder, arguments, names[name])
                    is_agent = name != "one turn"
                    rate = asyncio.run(_measure(process, settings, arguments, is_agent=is_agent))
                    print(f"  round {number} {name}: {rate:.0f} tokens/s", flush=True)
                    if number >= 0:
                        found[name].append(rate)
    return _judge({name: statistics.median(rates) for name, rates in found.items()})


def _judge(medians: dict[str, float]) -> int:
    for name, rate in medians.items():
        print(f"  median {name}: {rate:.0f} tokens/s", flush=True)
    bars = Bars()
    for ms, needs in NEEDS.items():
        share = medians[f"{ms} ms"] / medians["one turn"]
        bars.at_least(f"agents_{ms}_ms_vs_one_turn", share, "x", needs=needs)
    return bars.exit_code


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)

"""Several turns with tools against one turn: tokens per second of a real SGLang.

One server, one thread, a random policy so small that steps, batches and scheduling take the time.
A trajectory is some replies with an environment's answer between them, which takes 0 or 200 ms, or
one turn of as many tokens. A reply is longer than x times the shortest with a chance of 1/x, up to
the longest: of 64 to 2,000 tokens, half have less than 124, one in thirty more than 1,000, and the
mean is 228. The environment has a process for each trajectory, as in a run. Beside both, a plain
client (bare) asks SGLang the same: what it has more is the price of the generator's layer.

As many sequences as possible are in the engine, and trajectories are begun without end, through
the lanes of a generator's worker. Measuring begins when as many have ended as are in the engine at
a time, lasts a fixed time, and takes tokens of unfinished replies into account. All settings take
alternating turns; medians. CPU seconds of the server say more than tokens per second where others
use the cores. The server forgets its cache before each measurement, or the later of two would pay
for what the earlier left there; a first one, which is not counted, warms it up. Each number of
sequences is a part with a server of its own.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, closing
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple

import aiohttp

from benchmarks.agent_trajectories import (
    ITEM,
    TIMEOUT_S,
    BareFeed,
    LanesFeed,
    Measured,
    Replies,
    ScriptedEngine,
    Tally,
    measured_between,
)
from benchmarks.bars import Bars
from benchmarks.broker.process import work_folder
from benchmarks.run_measurement import CpuMeter, write_inputs
from benchmarks.sglang_server import sglang_server
from slipstream.generators.config import GeneratorSettings, generator_settings
from slipstream.generators.engine import SamplingParams
from slipstream.generators.environments.turn_sampler import TurnSampler
from slipstream.generators.rollout import Sampler
from slipstream.generators.sglang.process import SglangProcess
from slipstream.generators.text.codec import TextCodec
from slipstream.wire.messages.versions import PolicyVersion

ENVIRONMENT = Path(__file__).with_name("scripted_environment.py")
SEQUENCES = (16, 128, 256)
LATENCIES_MS = (0, 200)
NEEDS = 0.95  # share of one turn's tokens per second
_BETWEEN_TURNS = 64  # tokens at most
_CACHED = 4096  # tokens for each sequence
_LOOK_S = 0.02
_EXAMPLES = """examples:
  python -m benchmarks.bench_agents
  python -m benchmarks.bench_agents --sequences 16
  python -m benchmarks.bench_agents --sequences 128,256 --rounds 1 --seconds 10"""


class Setting(NamedTuple):
    """One way to have trajectories."""

    latency_ms: int | None  # None: one turn
    is_bare: bool = False  # asked by a plain client

    @property
    def name(self) -> str:
        kind = "one turn" if self.latency_ms is None else f"{self.latency_ms} ms"
        return f"bare {kind}" if self.is_bare else kind


ONE_TURN = Setting(None)
SETTINGS = (
    ONE_TURN,
    *map(Setting, LATENCIES_MS),  # before bare ones, which say the same
    Setting(0, is_bare=True),
    Setting(None, is_bare=True),
)


def settings_of(
    folder: Path, arguments: argparse.Namespace, sequences: int, latency_ms: int
) -> GeneratorSettings:
    """Return the settings of a generator whose environment takes this long to answer."""
    longest = arguments.turns * arguments.longest
    environment = {
        "function": f"{ENVIRONMENT}:Scripted",
        "options": {"turns": arguments.turns, "latency_s": latency_ms / 1e3},
        "max_turns": arguments.turns,
        "max_tokens": longest + arguments.turns * _BETWEEN_TURNS,
        "max_outside": 4 * sequences,
        "sandbox": arguments.sandbox,
    }
    return generator_settings(
        {
            "run": {"name": "agents", "dir": str(folder), "model": str(folder / "model")},
            "sampling": {"max_prompt_tokens": 16, "max_response_tokens": longest},
            "environment": environment,
            "generators": {
                "device": arguments.device,
                "max_sequences": sequences,
                "max_cached_tokens": _CACHED * sequences,
                "sglang": arguments.sglang(sequences),
            },
        }
    )


class Bench:
    """One number of sequences: a server, and its measurements."""

    def __init__(self, arguments: argparse.Namespace, sequences: int) -> None:
        self._arguments = arguments
        self._sequences = sequences
        self._replies = Replies(arguments.turns, arguments.shortest, arguments.longest)
        self._said: dict[bool, list[list[int]]] = {}  # new tokens of prompts; key: one turn or not

    def measurements(self) -> Iterator[tuple[Setting, Measured]]:
        """Yield every measurement, printed; the server ends with the last one or with a close."""
        arguments = self._arguments
        with work_folder() as folder:
            write_policy(folder, arguments)
            settings = settings_of(folder, arguments, self._sequences, 0)
            with sglang_server(settings) as process:
                self._one(process, folder, ONE_TURN, "warm-up")
                for number in range(arguments.rounds):
                    for setting in SETTINGS[:: 1 if number % 2 == 0 else -1]:
                        yield setting, self._one(process, folder, setting, f"round {number}")

    def _one(self, process: SglangProcess, folder: Path, setting: Setting, when: str) -> Measured:
        settings = settings_of(folder, self._arguments, self._sequences, setting.latency_ms or 0)
        found = asyncio.run(self._measured(process, settings, setting, is_short=when == "warm-up"))
        print(f"  {self._sequences} sequences, {when}, {setting.name}: {found}", flush=True)
        return found

    async def _measured(
        self,
        process: SglangProcess,
        settings: GeneratorSettings,
        setting: Setting,
        *,
        is_short: bool,
    ) -> Measured:
        tally = Tally()
        headers = {"Authorization": f"Bearer {process.api_key}"}
        async with AsyncExitStack() as cleanup:
            opening = aiohttp.ClientSession(
                headers=headers, connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)
            )
            http = await cleanup.enter_async_context(opening)
            await _forget(process, http)
            feed = await self._feed(cleanup, process, http, settings, setting, tally)
            async with asyncio.TaskGroup() as tasks:
                feeding = tasks.create_task(feed.run())
                found = await self._window(tally, process, http, is_short=is_short)
                feeding.cancel()
            self._said.setdefault(setting.latency_ms is None, tally.said)
            return found

    async def _window(
        self, tally: Tally, process: SglangProcess, http: aiohttp.ClientSession, *, is_short: bool
    ) -> Measured:
        async def abort() -> None:
            await http.post(f"{process.url}/abort_request", json={"abort_all": True})

        await tally.until_ended(1 if is_short else self._sequences)
        meter = CpuMeter(process.process.pid)
        first_s, before_s = time.perf_counter(), meter.read()
        await asyncio.sleep(1.0 if is_short else self._arguments.seconds)
        last_s, cpu_s = time.perf_counter(), meter.read() - before_s
        await tally.end(abort)
        return measured_between(
            tally.calls, first_s, last_s, sequences=self._sequences, cpu_s=cpu_s
        )

    async def _feed(
        self,
        cleanup: AsyncExitStack,
        process: SglangProcess,
        http: aiohttp.ClientSession,
        settings: GeneratorSettings,
        setting: Setting,
        tally: Tally,
    ) -> LanesFeed | BareFeed:
        if setting.is_bare:
            said = self._said[setting.latency_ms is None]
            return BareFeed(process, http, self._replies, tally, said, sequences=self._sequences)
        engine = ScriptedEngine(process, tally)
        cleanup.push_async_callback(engine.close)
        await engine.label(PolicyVersion(0, 0))
        longest = settings.sampling.max_response_tokens
        params = {ITEM: SamplingParams(temperature=1.0, max_new_tokens=longest)}
        codec = TextCodec(settings.model, settings.sampling)
        sampler = Sampler(engine, codec, params, run_seed=None)
        turn_sampler: TurnSampler | None = None
        if setting.latency_ms is not None:
            running = TurnSampler.running(settings.environment, settings.sampling, sampler, hide=())
            turn_sampler = await cleanup.enter_async_context(running)
        return LanesFeed(settings, self._replies, tally, sampler, turn_sampler)


def write_policy(folder: Path, arguments: argparse.Namespace) -> None:
    """Write a random policy for the longest trajectory into ``folder``/model."""
    write_inputs(folder, hidden=arguments.hidden, layers=arguments.layers)
    config = folder / "model" / "config.json"
    own = {
        "max_position_embeddings": arguments.turns * (arguments.longest + 2 * _BETWEEN_TURNS),
        "num_attention_heads": arguments.heads,
        "num_key_value_heads": arguments.heads // 2,
        "head_dim": arguments.hidden // arguments.heads,
    }
    config.write_text(json.dumps(json.loads(config.read_text()) | own))


async def _forget(process: SglangProcess, http: aiohttp.ClientSession) -> None:
    """Empty the server's cache, which it refuses as long as it has a sequence."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            async with http.post(f"{process.url}/flush_cache") as answer:
                if answer.status == HTTPStatus.OK:
                    return
            await asyncio.sleep(_LOOK_S)


def medians_of(found: Sequence[tuple[Setting, Measured]]) -> dict[Setting, Measured]:
    """Return the medians of each setting that was measured."""
    by_setting = {
        setting: [one for other, one in found if other == setting] for setting, _ in found
    }
    return {
        setting: Measured(*map(statistics.median, zip(*measurements, strict=True)))
        for setting, measurements in by_setting.items()
    }


def share_of_one_turn(medians: dict[Setting, Measured], latency_ms: int) -> float:
    """Return the tokens per second of agents over those of one turn."""
    return medians[Setting(latency_ms)].rate / medians[ONE_TURN].rate


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def parser() -> argparse.ArgumentParser:
    """Return the arguments; ``sglang`` returns flags of the server, from programs alone."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench_agents",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--sequences",
        type=_numbers,
        default=list(SEQUENCES),
        metavar="N,N",
        help="in the engine at a time, a part each; default: 16,128,256",
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each setting")
    parser.add_argument("--turns", type=int, default=4, help="replies of a trajectory")
    parser.add_argument("--shortest", type=int, default=64, help="tokens of a reply")
    parser.add_argument("--longest", type=int, default=2000, help="tokens of a reply")
    parser.add_argument("--hidden", type=int, default=64, help="size of the policy")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4, help="of the policy, half of them for keys")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--sandbox", choices=("namespaces", "none"), default="namespaces")
    parser.set_defaults(sglang=lambda _sequences: {})
    return parser


def main() -> int:
    arguments = parser().parse_args()
    bars = Bars()
    for sequences in arguments.sequences:
        began_s = time.perf_counter()
        with closing(Bench(arguments, sequences).measurements()) as measurements:
            medians = medians_of(list(measurements))
        for setting, one in medians.items():
            print(f"{sequences} sequences, median, {setting.name}: {one}")
        for ms in LATENCIES_MS:
            share = share_of_one_turn(medians, ms)
            bars.at_least(f"agents_{sequences}_{ms}_ms_vs_one_turn", share, "x", needs=NEEDS)
        print(f"{sequences} sequences took {time.perf_counter() - began_s:.0f} s", flush=True)
    return bars.exit_code


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)

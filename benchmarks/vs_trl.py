"""Slipstream against TRL's GRPOTrainer: same policy, prompts, lengths and answers per step.

Measured after the first steps: CPU seconds of all processes, and wall time. Each system gets the
threads at which it does best in CPU seconds (one per process), and TRL a second wall time with two.

usage: pip install --target DIR --no-deps trl==1.16.0 datasets accelerate multiprocess pandas \
           python-dateutil pytz six tzdata
       python -m benchmarks.vs_trl --path DIR [--steps 12] [--repeats 3]
"""

import argparse
import itertools
import sys
import tempfile
from pathlib import Path

from benchmarks.bars import Bars
from benchmarks.measured_runs import (
    MAX_TOKENS,
    TAIL,
    Reading,
    median,
    per_step,
    run_command,
    run_slipstream,
    write_inputs,
)

_SAMPLES = 64  # per step: 8 groups of 8
_FIXED = 64
_SKIPPED = 4
_SIZES = {"0.8M": 128, "3M": 256}  # parameters -> width
_BARS = (("fixed", 0.7), ("long-tailed", 1.0))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--path", default="", help="folder with trl and datasets")
    arguments = parser.parse_args()
    steps = arguments.steps
    bars = Bars()
    with tempfile.TemporaryDirectory(prefix="vs-trl-") as name:
        for size, (lengths, needs) in itertools.product(_SIZES, _BARS):
            if (size, lengths) == ("3M", "long-tailed"):
                continue  # TRL takes half a minute a step
            folder = Path(name) / size
            if not folder.exists():
                folder.mkdir()
                write_inputs(folder, hidden=_SIZES[size], layers=4)
            title = f"{size} {lengths}"
            ours: list[tuple[float, float]] = []
            theirs: list[tuple[float, float]] = []
            once = lengths == "long-tailed"  # TRL takes minutes
            for repeat in range(1 if once else arguments.repeats):
                ours.append(_steady(_slipstream(folder, lengths, repeat, steps), steps))
                theirs.append(_steady(_trl(folder, lengths, arguments, threads=1), steps))
                for system, (wall, cpu) in (("slipstream", ours[-1]), ("trl", theirs[-1])):
                    print(
                        f"{title} {system} {repeat}: {_SAMPLES / cpu:.1f} samples per CPU "
                        f"second, {wall:.2f} s a step",
                        flush=True,
                    )
            two_threads, _ = _steady(_trl(folder, lengths, arguments, threads=2), steps)
            ratio = median([cpu for _, cpu in theirs]) / median([cpu for _, cpu in ours])
            walls = [median([wall for wall, _ in one]) for one in (ours, theirs)]
            print(
                f"{title} wall per step: slipstream {walls[0]:.2f} s, trl {walls[1]:.2f} s with "
                f"one thread, {two_threads:.2f} s with two"
            )
            bars.at_least(
                f"samples_per_cpu_second_{lengths}_{size}", ratio, "of TRL's", needs=needs
            )
    return bars.exit_code


def _steady(readings: list[Reading], steps: int) -> tuple[float, float]:
    return per_step(readings, skip=_SKIPPED, until=steps)


def _slipstream(folder: Path, lengths: str, repeat: int, steps: int) -> list[Reading]:
    limit = _FIXED if lengths == "fixed" else MAX_TOKENS
    return run_slipstream(
        folder,
        f"{lengths}-{repeat}",
        {
            "run.steps": steps + TAIL,
            "run.group_size": 8,
            "run.groups_per_step": 8,
            "sampling.max_response_tokens": limit,
            "sampling.min_response_tokens": limit if lengths == "fixed" else 0,
            "generators.max_sequences": 192,
            "generators.max_cached_tokens": 192 * (limit // 2 + 64),
            "generators.siblings_together": "true" if lengths == "fixed" else "false",
        },
    )


def _trl(
    folder: Path, lengths: str, arguments: argparse.Namespace, *, threads: int
) -> list[Reading]:
    limit = _FIXED if lengths == "fixed" else MAX_TOKENS
    minimum = limit if lengths == "fixed" else 0
    command = [sys.executable, "-m", "benchmarks.trl_grpo", str(folder), str(arguments.steps)]
    command += [str(minimum), str(limit), str(threads), arguments.path]
    return run_command(command, {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"})


if __name__ == "__main__":
    raise SystemExit(main())

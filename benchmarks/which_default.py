"""Which estimator should be the default: an exact study, and real runs of several seeds.

    python -m benchmarks.which_default exact           every length, lag and mismatch (5 minutes)
    python -m benchmarks.which_default runs --out F    real runs, one line of F each (an hour)
    python -m benchmarks.which_default report [F]      what the runs show, with tests

exact: the errors of ``bench_corrections`` over a grid of lengths, lags and mismatches. Of each
candidate: the geometric mean over cells of its error over the least error in the cell (1 is best
everywhere), the worst such ratio, and the share of cells in which it is within 2% of the best.

runs: the quickstart's task with every role real. The learner is slowed down (few tokens a
microbatch), so that generators run ahead as far as the staleness bound lets them and tokens are as
stale as they may be. All candidates train with the same advantages, learning rate and seeds. What
is compared is the share of right answers to held-out problems at the end, and its mean over the
evaluations on the way.

report: differences from decoupled PPO, paired by seed; p is of the exact sign-flip test over all
2^n signs (two-sided), after Holm's correction over candidates; *detectable* is the difference that
a paired t-test with as many seeds and as large a deviation would find with a chance of 80% at a
level of 5%.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

import msgspec
import torch

from benchmarks.bench_corrections import (
    DECOUPLED,
    ESTIMATORS,
    Case,
    estimate,
    on_policy_variance,
    problem,
)
from benchmarks.run_measurement import ROOT, toml
from slipstream.deploy.examples.addition import prepare

RECORDED = ROOT / "benchmarks" / "recorded" / "which_default.jsonl"  # what docs/staleness.md shows
# ---- the exact study ---------------------------------------------------------

WIDTHS = {4: 3, 6: 3, 8: 2, 10: 2, 12: 2}  # tokens of a sequence -> tokens to choose from
LAGS = (1, 2, 4, 8, 16)
MISMATCHES = (0.02, 0.3, 1.0)
NUM_PROBLEMS = 5
_NEAR = 1.02  # of the least error: as good as the best
CANDIDATES = (
    DECOUPLED,
    "none",
    "token, cap 2",
    "sequence, cap 2",
    "sequence, cap 5",
    "geometric, cap 2",
    "ppo-clip at mu",
    "cispo at mu",
    "m2po",
    "dppo at mu",
    "drpo at mu",
    "topr at mu",
)


class Standing(msgspec.Struct, frozen=True):
    """How a candidate does over the grid."""

    name: str
    mean: float  # geometric, of its error over the least in the cell
    worst: float
    near_best: float  # share of cells


def errors(
    widths: dict[int, int] = WIDTHS,
    lags: Sequence[int] = LAGS,
    mismatches: Sequence[float] = MISMATCHES,
    num_problems: int = NUM_PROBLEMS,
    show: Callable[[str], None] = lambda _: None,
) -> dict[tuple[int, Case], dict[str, float]]:
    """Return (length, case) -> candidate -> error, means over random problems."""
    found: dict[tuple[int, Case], dict[str, float]] = {}
    for length, width in widths.items():
        problems = [
            problem(length, seed, width=width, num_versions=max(lags) + 1)
            for seed in range(num_problems)
        ]
        least = [on_policy_variance(one) for one in problems]
        for lag, mismatch in product(lags, mismatches):
            case = Case(lag, mismatch)
            found[length, case] = {
                name: statistics.fmean(
                    estimate(ESTIMATORS[name], one, case, least=variance).error
                    for one, variance in zip(problems, least, strict=True)
                )
                for name in CANDIDATES
            }
        show(f"{length} tokens: done")
    return found


def standings(found: dict[tuple[int, Case], dict[str, float]]) -> list[Standing]:
    """Return how the candidates do, the best mean first."""
    result = []
    for name in CANDIDATES:
        ratios = [cell[name] / min(cell.values()) for cell in found.values()]
        result.append(
            Standing(
                name,
                mean=math.exp(statistics.fmean(math.log(ratio) for ratio in ratios)),
                worst=max(ratios),
                near_best=statistics.fmean(float(ratio <= _NEAR) for ratio in ratios),
            )
        )
    return sorted(result, key=lambda one: one.mean)


def exact_tables(found: dict[tuple[int, Case], dict[str, float]]) -> str:
    """Return the standings, then the means by length, lag and mismatch, as the page has them."""
    order = standings(found)
    lines = ["| estimator | mean | worst | near the best |", "|---|---:|---:|---:|"]
    lines += [
        f"| {one.name} | {one.mean:.2f} | {one.worst:.2f} | {one.near_best:.0%} |" for one in order
    ]
    by: list[tuple[str, Callable[[tuple[int, Case]], float]]] = [
        ("tokens", lambda at: at[0]),
        ("lag", lambda at: at[1].lag),
        ("mismatch", lambda at: at[1].mismatch),
    ]
    columns: dict[str, dict[str, float]] = {}
    for title, key in by:
        for value in sorted({key(at) for at in found}):
            cells = {at: cell for at, cell in found.items() if key(at) == value}
            columns[f"{title} {value:g}"] = {one.name: one.mean for one in standings(cells)}
    lines += ["", f"| mean | {' | '.join(columns)} |", "|---" + "|---:" * len(columns) + "|"]
    for one in order:
        means = [f"{column[one.name]:.2f}" for column in columns.values()]
        lines.append(f"| {one.name} | {' | '.join(means)} |")
    return "\n".join(lines)


# ---- real runs ---------------------------------------------------------------

SEEDS = range(8)
STEPS = 60
EVERY = 12  # steps between evaluations
BOUND = 6  # of staleness
COMMON = {
    "run.steps": STEPS,
    "run.max_staleness_steps": BOUND,
    "run.groups_per_step": 16,
    "eval.every_steps": EVERY,
    "learner.max_tokens_per_microbatch": 48,
    "learner.lr": 2e-4,
    "learner.rollouts_per_step": 0,
    "checkpoint.at_end": "false",
    "logging.trackers": "[]",
}
_PLAIN = {"preset": DECOUPLED, "correction": "none"}
RUNS: dict[str, dict[str, object]] = {  # all with the same advantages and the same reduction
    DECOUPLED: {"preset": DECOUPLED},
    "none": {**_PLAIN, "surrogate": "policy-gradient"},
    "sequence, cap 2": {
        **_PLAIN,
        "surrogate": "policy-gradient",
        "correction": {"importance-sampling": {"level": "sequence", "high": 2.0}},
    },
    "ppo-clip at mu": {**_PLAIN, "anchor": "behavior"},
    "dppo at mu": {**_PLAIN, "surrogate": "dppo-tv", "anchor": "behavior"},
}


class Result(msgspec.Struct, frozen=True):
    """What one run came to."""

    candidate: str
    seed: int
    final: float  # share of right answers at the end
    mean: float  # over the evaluations after the start
    staleness: float  # mean of the trained tokens, in steps


def run_all(out: Path, show: Callable[[str], None]) -> None:
    """Do every run that the file does not have yet: seed by seed, candidates in turn."""
    prepare(ROOT / ".cache" / "addition")
    done = {(one.candidate, one.seed) for one in read(out)}
    for seed in SEEDS:
        for name, algo in RUNS.items():
            if (name, seed) in done:
                continue
            result = run(name, algo, seed)
            with out.open("ab") as file:
                file.write(msgspec.json.encode(result) + b"\n")
            show(
                f"{name}, seed {seed}: {result.final:.3f} at the end, {result.mean:.3f} on the "
                f"way, staleness {result.staleness:.2f}"
            )


def run(name: str, algo: dict[str, object], seed: int) -> Result:
    """Train once; raise what it printed if it fails."""
    with tempfile.TemporaryDirectory(prefix="which-default-") as folder:
        settings = COMMON | {"run.dir": folder, "run.name": "run", "run.seed": seed}
        overrides = [f"{key}={value}" for key, value in settings.items()]
        overrides += [f"algo.{key}={toml(value)}" for key, value in algo.items()]
        command = [sys.executable, "-m", "slipstream.deploy.main", "run"]
        command += ["--config", str(ROOT / "configs" / "quickstart.toml"), *overrides]
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, errors="replace", check=False
        )
        if done.returncode != 0:
            raise RuntimeError(f"{name}, seed {seed} ended with {done.returncode}:\n{done.stdout}")
        summary = json.loads((Path(folder) / "run" / "summary.json").read_text())
    tokens = {int(lag): count for lag, count in summary["staleness_histogram"].items()}
    points = {p["step"]: p["overall"]["metrics"]["mean@1"] for p in summary["eval"]}
    return Result(
        name,
        seed,
        final=points[STEPS],
        mean=statistics.fmean(value for step, value in points.items() if step > 0),
        staleness=sum(lag * n for lag, n in tokens.items()) / sum(tokens.values()),
    )


def read(path: Path) -> list[Result]:
    """Return the results in a file, none if there is no file."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [msgspec.json.decode(line, type=Result) for line in lines]


# ---- results -----------------------------------------------------------------


def sign_flip_p(differences: Sequence[float]) -> float:
    """Return the two-sided p of the exact sign-flip test of a mean of 0 (Fisher, 1935)."""
    observed = abs(sum(differences))
    sums = [
        abs(sum(sign * d for sign, d in zip(signs, differences, strict=True)))
        for signs in product((1, -1), repeat=len(differences))
    ]
    return sum(one >= observed * (1 - 1e-12) for one in sums) / len(sums)


def holm(ps: dict[str, float]) -> dict[str, float]:
    """Return p values corrected for their number (Holm, 1979)."""
    corrected, highest = {}, 0.0
    for rank, name in enumerate(sorted(ps, key=ps.__getitem__)):
        highest = max(highest, min(1.0, (len(ps) - rank) * ps[name]))
        corrected[name] = highest
    return corrected


def detectable(differences: Sequence[float]) -> float:
    """Return the mean difference that a paired t-test finds with a chance of 80% at 5%."""
    size = len(differences)
    degrees = size - 1
    quantiles = student_t(0.975, degrees) + student_t(0.8, degrees)
    return quantiles * statistics.stdev(differences) / math.sqrt(size)


def student_t(share: float, degrees: int) -> float:
    """Return the quantile of Student's t, by bisection of its integral (Simpson's rule)."""
    scale = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2))
    scale /= math.sqrt(degrees * math.pi)

    def density(x: float) -> float:
        return scale * math.pow(1 + x * x / degrees, -(degrees + 1) / 2)

    def below(x: float) -> float:
        steps = 2000
        width = x / steps
        inner = sum((4 if i % 2 else 2) * density(i * width) for i in range(1, steps))
        return 0.5 + (density(0) + inner + density(x)) * width / 3

    low, high = 0.0, 100.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) < share else (low, middle)
    return low


def report(results: Sequence[Result]) -> str:
    """Return the table of docs/staleness.md."""
    seeds = sorted({one.seed for one in results})
    by_run = {(one.candidate, one.seed): one for one in results}
    names = [name for name in RUNS if all((name, seed) in by_run for seed in seeds)]

    def values(name: str, figure: str) -> list[float]:
        return [float(getattr(by_run[name, seed], figure)) for seed in seeds]

    figures = ("at the end", "on the way")
    titles = " | ".join(f"{one}: mean, difference, p, detectable" for one in figures)
    lines = [f"| estimator | staleness | {titles} |", "|---|---:|---:|---:|"]
    cells: dict[str, list[str]] = {name: [] for name in names}
    for figure in ("final", "mean"):
        base = values(DECOUPLED, figure)
        differences = {
            name: [a - b for a, b in zip(values(name, figure), base, strict=True)]
            for name in names
            if name != DECOUPLED
        }
        ps = holm({name: sign_flip_p(each) for name, each in differences.items()})
        for name in names:
            text = f"{statistics.fmean(values(name, figure)):.3f}"
            if name in ps:
                each = differences[name]
                text += f", {statistics.fmean(each):+.3f}, {ps[name]:.3f}, {detectable(each):.3f}"
            cells[name].append(text)
    for name in names:
        staleness = statistics.fmean(values(name, "staleness"))
        lines.append(f"| {name} | {staleness:.2f} | " + " | ".join(cells[name]) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("exact", help="the exact study")
    runs = commands.add_parser("runs", help="real runs; resumes where it was stopped")
    runs.add_argument("--out", type=Path, required=True, metavar="FILE")
    report_command = commands.add_parser("report", help="what the runs of a file show")
    report_command.add_argument("file", type=Path, nargs="?", default=RECORDED, help="%(default)s")
    arguments = parser.parse_args()

    def show(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    torch.set_num_threads(1)  # tensors are small
    if arguments.command == "exact":
        print(exact_tables(errors(show=show)))
    elif arguments.command == "runs":
        run_all(arguments.out, show)
    else:
        print(report(read(arguments.file)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

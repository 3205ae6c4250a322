"""Learning per sample at staleness bounds of 1, 2 and 4 steps, against synchronous training.

Many runs of the quickstart's task and policy, every role real and settings the same but the bound:
each trains STEPS steps of 8 groups of 8 answers, then answers 256 held-out problems. A pair is a
seed of a bound and of synchronous training (bound 0); bounds are in turns within a seed. The
learner is slowed down (few tokens a microbatch), so that generation runs ahead as far as the bound
lets it: the mean staleness of the trained tokens says how far, and a bar holds it to most of the
bound. STEPS was chosen by synchronous runs of seeds below FIRST_SEED, which are not compared: 0.42
are right at the start, some 0.59, 0.76, 0.84 and 0.87 after 10, 20, 30 and 40 steps. After 20 a
loss of learning shows. MARGIN is 15% of what was gained by then.

Each bound is a claim and a sequential test of its own (``sequential``): its runs end when it is
decided. Power is the chance to find a bound equivalent that is, with differences as spread as the
observed ones; *false* is that chance where the true difference is MARGIN.

usage: python -m benchmarks.staleness_learning --out FILE [--minutes 90] [--report]
"""

import argparse
import statistics
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.bars import Bars, NotRun
from benchmarks.parts import Run, changed, ended, paired, read, run_part, turns
from benchmarks.run_measurement import ROOT, run_slipstream, summary_of
from benchmarks.sequential import EQUIVALENT, OPEN, Plan, Verdict, chance, decide
from benchmarks.weightbus.figures import table
from slipstream.deploy.examples.addition import prepare

BOUNDS = (1, 2, 4)  # staleness, in learner steps
STEPS = 20
FIRST_SEED = 100
MARGIN = 0.05  # share of right answers
PLAN = Plan(margin=MARGIN, level=0.05, looks=(12, 24, 36, 48))
SYNCHRONOUS = "bound-0"
_REACHED = 0.6  # share of the bound
_SECTIONS = ("sampling", "generators", "reward", "learner", "algo")  # sections of the quickstart
_CHANGED = {
    "run.group_size": 8,
    "run.groups_per_step": 8,
    "broker.drop_zero_variance": "false",  # each sample is trained
    "generators.count": 1,
    "learner.max_tokens_per_microbatch": 32,
    "logging.trackers": "[]",
}


class Outcome(msgspec.Struct, frozen=True):
    """What a run came to."""

    accuracy: float  # share of right answers to held-out problems
    staleness: float  # mean of the trained tokens, in steps
    wall_s: float  # from the first step to the last one


def name_of(bound: int) -> str:
    return f"bound-{bound}"


def train(bound: int, seed: int, steps: int) -> Outcome:
    """Train once; raise what the run printed if it fails."""
    with tempfile.TemporaryDirectory(prefix="staleness-learning-") as name:
        folder = Path(name)
        prepare(folder)
        (folder / "run.toml").touch()
        config = tomllib.loads((ROOT / "configs" / "quickstart.toml").read_text())
        shipped = {
            f"{section}.{key}": str(value).lower() if isinstance(value, bool) else value
            for section in _SECTIONS
            for key, value in config[section].items()
        }
        settings = {
            "run.max_staleness_steps": bound,
            "run.seed": FIRST_SEED + seed,
            "run.steps": steps,
            "eval.file": folder / "held_out.jsonl",
            "eval.every_steps": steps,
        }
        readings = run_slipstream(folder, "run", shipped | _CHANGED | settings)
        return outcome_of(summary_of(folder, "run"), readings[-1].wall_s - readings[0].wall_s)


def outcome_of(summary: Mapping[str, Any], wall_s: float) -> Outcome:
    tokens = {int(lag): count for lag, count in summary["staleness_histogram"].items()}
    last = max(summary["eval"], key=lambda point: int(point["step"]))
    return Outcome(
        accuracy=last["overall"]["metrics"]["mean@1"],
        staleness=sum(lag * count for lag, count in tokens.items()) / sum(tokens.values()),
        wall_s=wall_s,
    )


def verdict_of(runs: Sequence[Run[Outcome]], bound: int) -> tuple[Verdict, list[float]]:
    """Return what is decided about a bound, and the differences of its pairs by seed."""
    done, (seeds, _) = ended(runs), paired(runs, (SYNCHRONOUS, name_of(bound)))
    differences = [
        done[name_of(bound)][seed].accuracy - done[SYNCHRONOUS][seed].accuracy for seed in seeds
    ]
    return decide(differences, PLAN), differences


def jobs(file: Path, settings: str = "") -> Iterator[tuple[str, int]]:
    """Yield system and seed of the runs to be made, until each bound is decided."""
    for seed in range(PLAN.looks[-1]):
        runs = read(file, Outcome, settings)
        names = [name_of(bound) for bound in BOUNDS if verdict_of(runs, bound)[0].decision == OPEN]
        yield from turns([SYNCHRONOUS, *names], [seed]) if names else ()


def report(runs: Sequence[Run[Outcome]], bars: Bars) -> str:
    """Print the bars; return a row for each bound, and the seeds that are no pairs."""
    done, rows, lines = ended(runs), [], list[str]()
    for bound in BOUNDS:
        name = name_of(bound)
        seeds, unfinished = paired(runs, (SYNCHRONOUS, name))
        verdict, differences = verdict_of(runs, bound)
        if verdict.decision == OPEN:
            lines += [f"not a pair: {name}, seed {seed}" for seed in unfinished]
        if len(seeds) < 2:
            bars.at_most(f"difference_{name}", NotRun("there are no two pairs"), "", needs=MARGIN)
            continue
        ours, theirs = ([done[system][seed] for seed in seeds] for system in (name, SYNCHRONOUS))
        staleness = statistics.fmean(outcome.staleness for outcome in ours)
        spread = statistics.stdev(differences)
        figures = (
            staleness,
            *(statistics.fmean(run.accuracy for run in side) for side in (theirs, ours)),
            statistics.fmean(differences),
            spread,
            verdict.low,
            verdict.high,
            *(chance(EQUIVALENT, PLAN, difference=d, spread=spread) for d in (0.0, -MARGIN)),
        )
        counts = (str(bound), str(len(seeds)), str(verdict.pairs), verdict.decision)
        rows.append((*counts, *(f"{figure:.3f}" for figure in figures)))
        bars.at_least(f"staleness_{name}", staleness, "steps", needs=_REACHED * bound)
        bars.at_most(
            f"difference_{name}",
            max(-verdict.low, verdict.high) if verdict.pairs else NotRun("no look was reached"),
            f"of accuracy at most, {verdict.decision}",
            needs=MARGIN,
        )
    titles = ("bound", "pairs", "tested", "decision", "staleness", "synchronous", "accuracy")
    more = ("difference", "spread", "low", "high", "power", "false")
    return "\n".join([table((*titles, *more), rows), *lines])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="file of the results")
    parser.add_argument("--minutes", type=float, default=90.0, help="of this part")
    parser.add_argument("--steps", type=int, default=STEPS, help="of a run; fewer to rehearse")
    parser.add_argument("--report", action="store_true", help="table and bars alone")
    arguments = parser.parse_args()
    settings = changed(parser, arguments, "steps")

    def work(system: str, seed: int) -> Outcome:
        outcome = train(int(system.removeprefix("bound-")), seed, arguments.steps)
        print(f"{system}, seed {seed}: {outcome}", flush=True)
        return outcome

    if not arguments.report:
        asked = jobs(arguments.out, settings)
        run_part(arguments.out, Outcome, arguments.minutes, asked, work, settings=settings)
    bars = Bars()
    print(f"margin {MARGIN:g}, level {PLAN.level:g}, looks after {PLAN.looks} pairs")
    print(report(read(arguments.out, Outcome, settings), bars))
    return bars.exit_code


if __name__ == "__main__":
    raise SystemExit(main())

"""What asynchrony brings on this machine, against what it could bring, at three balances.

Generator on core 0, learner on core 1, in both modes: each pool has hardware of its own, as on a
cluster. No asynchronous step can be shorter than max(g, t), of what each side takes for a step's
answers when it runs alone and full: t is the training of synchronous runs, in which the generator
stands still; g is a step's tokens by the seconds of a token in the difference of two synchronous
runs of one long step each, the second twice the first, so that the end of a step, in which lanes
run empty, is left out. The bar is max(g, t) as a share of an asynchronous step. Runs of both modes
alternate; medians are compared.

The balance is set by what the learner computes. A step has 48 answers in groups of 8 to prompts of
6 tokens; lengths are geometric with mean 96, up to 512. They are trained as they are, or with a
reference policy and full recomputation, or with a critic besides. The measured g / t is printed
next to the one aimed at. A repeat that was not ended in both modes is named, and is in no figure.

usage: python -m benchmarks.async_vs_sync --out FILE [--minutes 90] [--repeats 5] [--steps 8]
       python -m benchmarks.async_vs_sync --out FILE --report
"""

import argparse
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from benchmarks.bars import Bars, NotRun
from benchmarks.parts import Run, changed, ended, mixed, paired, read, run_part, turns
from benchmarks.run_measurement import (
    MAX_TOKENS,
    TAIL,
    Reading,
    median,
    per_step,
    run_slipstream,
    summary_of,
    write_inputs,
)
from benchmarks.weightbus.figures import table

_SKIPPED = 3  # steps until the pipeline is filled
_TRAIN_PHASES = ("fetch", "pack", "proximal", "train", "critic", "commit", "export")
MODES = ("sync", "async", "full")  # full: the difference of two long steps
_NEEDS = 0.85  # share of the ceiling


class Step(msgspec.Struct, frozen=True):
    """What a run did in a step."""

    wall_s: float
    generate_s: float  # seconds with something to generate
    train_s: float
    tokens: float  # generated


class Balance(NamedTuple):
    """Settings of the learner, and the balance they are meant for."""

    aimed: float  # g / t
    settings: Mapping[str, object]


_MORE = {"learner.recompute": "full", "algo.kl": "{ coefficient = 0.01 }"}
BALANCES = {
    "generation_heavy": Balance(2.0, {}),
    "even": Balance(1.0, _MORE),
    "training_heavy": Balance(0.5, _MORE | {"algo.preset": "ppo"}),
}
_GROUPS, _GROUP_SIZE = 6, 8  # answers of a step
_HIDDEN, _LAYERS = 320, 4


def report(runs: Sequence[Run[Step]], bars: Bars) -> str:
    """Print the bars; return a row for each balance, and the repeats that are in no figure."""
    done, rows, lines = ended(runs), [], list[str]()
    for name, balance in BALANCES.items():
        systems = [f"{name}-{mode}" for mode in MODES]
        repeats, unfinished = paired(runs, systems)
        lines += [f"not ended: {name}, repeat {repeat}" for repeat in unfinished]
        lines += [f"{name}, {line}" for line in mixed(runs, systems)]
        if not repeats:
            missing = NotRun("no repeat was ended in both modes")
            bars.at_least(f"async_efficiency_{name}", missing, "", needs=_NEEDS)
            continue
        sync, asynchronous, full = ([done[s][repeat] for repeat in repeats] for s in systems)
        token_s = median([step.generate_s / step.tokens for step in full])
        g = token_s * median([step.tokens for step in asynchronous])
        t = median([step.train_s for step in sync])
        walls = [median([step.wall_s for step in steps]) for steps in (sync, asynchronous)]
        ceiling = max(g, t)
        figures = (g, t, g / t, *walls, ceiling, walls[0] / walls[1], walls[0] / ceiling)
        counts = (name, str(len(repeats)), f"{balance.aimed:g}")
        rows.append((*counts, *(f"{figure:.2f}" for figure in figures)))
        share = ceiling / walls[1]
        bars.at_least(f"async_efficiency_{name}", share, "of the ceiling", needs=_NEEDS)
    titles = ("balance", "repeats", "aimed g/t", "g", "t", "g/t", "sync s", "async s")
    return "\n".join([table((*titles, "max(g, t)", "speed-up", "of at most"), rows), *lines])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="file of the results")
    parser.add_argument("--minutes", type=float, default=90.0, help="of this part")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="that are measured in a run")
    parser.add_argument("--balance", action="append", choices=BALANCES, help="this one alone")
    parser.add_argument("--report", action="store_true", help="table and bars alone")
    arguments = parser.parse_args()
    settings = changed(parser, arguments, "steps")
    systems = [f"{name}-{mode}" for name in arguments.balance or BALANCES for mode in MODES]

    def work(system: str, repeat: int) -> Step:
        name, mode = system.rsplit("-", 1)
        with tempfile.TemporaryDirectory(prefix="async-vs-sync-") as folder:
            step = _measure(Path(folder), BALANCES[name], mode, arguments.steps)
        print(f"{system} {repeat}: {step}", flush=True)
        return step

    if not arguments.report:
        jobs = turns(systems, range(arguments.repeats))
        run_part(arguments.out, Step, arguments.minutes, jobs, work, settings=settings)
    bars = Bars()
    print(report(read(arguments.out, Step, settings), bars))
    return bars.exit_code


def _measure(folder: Path, balance: Balance, mode: str, steps: int) -> Step:
    """Return a step's share of what a run did."""
    write_inputs(folder, hidden=_HIDDEN, layers=_LAYERS)
    if mode == "full":
        return _full_step(folder, balance, steps)
    readings, totals = _run(folder, mode, balance, steps=steps + TAIL)
    wall_s, _ = per_step(readings, skip=_SKIPPED, until=steps)
    step = _share(totals, steps + TAIL)
    return msgspec.structs.replace(step, wall_s=wall_s)


def _full_step(folder: Path, balance: Balance, steps: int) -> Step:
    """Return a step in which lanes never run empty."""
    _, shorter = _run(folder, "sync", balance, steps=1, batches=steps // 2)
    _, longer = _run(folder, "sync", balance, steps=1, batches=steps)
    before, after = msgspec.structs.astuple(shorter), msgspec.structs.astuple(longer)
    added = Step(*(b - a for a, b in zip(before, after, strict=True)))
    return _share(added, steps - steps // 2)


def _share(totals: Step, steps: int) -> Step:
    return Step(*(total / steps for total in msgspec.structs.astuple(totals)))


def _run(
    folder: Path,
    mode: str,
    balance: Balance,
    *,
    steps: int,
    batches: int = 1,  # number for each step
) -> tuple[list[Reading], Step]:
    """Do a run; return its readings, and what it did in all, seconds from the launch included."""
    answers, began_s, name = _GROUPS * _GROUP_SIZE, time.monotonic(), f"{mode}-{batches}"
    settings = {
        "run.mode": mode,
        "run.steps": steps,
        "run.group_size": _GROUP_SIZE,
        "run.groups_per_step": batches * _GROUPS,
        "generators.max_sequences": answers,
        "generators.max_cached_tokens": answers * MAX_TOKENS // 2,
        "generators.siblings_together": "true",
        "deploy.cores": "{ generator = [0], learner = [1] }",
    }
    readings = run_slipstream(folder, name, settings | dict(balance.settings))
    summary: Any = summary_of(folder, name)
    spent = {role["name"]: role["phase_seconds"] for role in summary["roles"]}
    return readings, Step(
        wall_s=readings[-1].wall_s - began_s,
        generate_s=spent["generator-0"]["generate"],
        train_s=sum(spent["learner"].get(phase, 0.0) for phase in _TRAIN_PHASES),
        tokens=sum(summary["staleness_histogram"].values()),  # all are trained
    )


if __name__ == "__main__":
    raise SystemExit(main())

"""What asynchrony brings on this machine, against what it could bring.

Generator on core 0, learner on core 1, in both modes: each pool has hardware of its own, as on a
cluster. No asynchronous step can be shorter than max(g, t), of what each side takes for a step's
answers when it runs alone and full: t is the training of synchronous runs, in which the generator
stands still; g is a step's tokens by the seconds of a token in the difference of two synchronous
runs of one long step each, the second twice the first, so that the end of a step, in which lanes
run empty, is left out. The bar is max(g, t) as a share of an asynchronous step. Runs of both modes
alternate; medians are compared.

usage: python -m benchmarks.async_vs_sync [--repeats 5] [--steps 8] [--groups 6] [--hidden 320]
"""

import argparse
import tempfile
from pathlib import Path
from typing import NamedTuple

from benchmarks.bars import Bars
from benchmarks.run_measurement import (
    MAX_TOKENS,
    MEAN_TOKENS,
    TAIL,
    Reading,
    median,
    per_step,
    run_slipstream,
    summary_of,
    write_inputs,
)

_SKIPPED = 3  # steps until the pipeline is filled
_TRAIN_PHASES = ("fetch", "pack", "proximal", "train", "commit", "export")


class Totals(NamedTuple):
    """What a run did, or a step of it."""

    generate_s: float  # seconds with something to generate
    train_s: float
    tokens: float  # generated


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--groups", type=int, default=6, help="groups of 8 answers per step")
    parser.add_argument("--hidden", type=int, default=320)
    parser.add_argument("--layers", type=int, default=4)
    arguments = parser.parse_args()
    print(
        f"{arguments.groups} groups of 8 answers a step, lengths geometric with mean "
        f"{MEAN_TOKENS}, at most {MAX_TOKENS}; {arguments.layers} layers, width {arguments.hidden}"
    )
    walls: dict[str, list[float]] = {"sync": [], "async": []}
    shares: dict[str, list[Totals]] = {"sync": [], "async": []}
    full: list[float] = []
    with tempfile.TemporaryDirectory(prefix="async-vs-sync-") as name:
        folder = Path(name)
        write_inputs(folder, hidden=arguments.hidden, layers=arguments.layers)
        for repeat in range(arguments.repeats):
            for mode in ("sync", "async"):
                wall, step = _measure(folder, f"{mode}-{repeat}", mode, arguments)
                walls[mode].append(wall)
                shares[mode].append(step)
                print(
                    f"{mode} {repeat}: {wall:.3f} s a step; g {step.generate_s:.3f} s, "
                    f"t {step.train_s:.3f} s, {step.tokens:.0f} tokens",
                    flush=True,
                )
            full.append(_full_lanes_s(folder, repeat, arguments))
            print(f"full lanes {repeat}: {1000 * full[-1]:.3f} ms a token", flush=True)
    g = median(full) * median([step.tokens for step in shares["async"]])
    t = median([step.train_s for step in shares["sync"]])
    sync, asynchronous = median(walls["sync"]), median(walls["async"])
    print(f"alone and full: generation g {g:.3f} s, training t {t:.3f} s per step")
    print(
        f"sync {sync:.3f} s, async {asynchronous:.3f} s per step: speed-up "
        f"{sync / asynchronous:.3f} of at most {sync / max(g, t):.3f}"
    )
    bars = Bars()
    bars.at_least("async_efficiency", max(g, t) / asynchronous, "of the ceiling", needs=0.85)
    return bars.exit_code


def _measure(
    folder: Path, name: str, mode: str, arguments: argparse.Namespace
) -> tuple[float, Totals]:
    """Return the wall seconds of a step, and a step's share of what the run did."""
    steps = arguments.steps + TAIL
    readings = _run(folder, name, mode, arguments, steps=steps)
    wall, _ = per_step(readings, skip=_SKIPPED, until=arguments.steps)
    return wall, Totals(*(value / steps for value in _totals(folder, name)))


def _full_lanes_s(folder: Path, repeat: int, arguments: argparse.Namespace) -> float:
    """Return the seconds of a token where lanes never run empty."""
    done = []
    for batches in (arguments.steps, 2 * arguments.steps):
        name = f"full-{repeat}-{batches}"
        _run(folder, name, "sync", arguments, steps=1, batches=batches)
        done.append(_totals(folder, name))
    shorter, longer = done
    return (longer.generate_s - shorter.generate_s) / (longer.tokens - shorter.tokens)


def _totals(folder: Path, name: str) -> Totals:
    roles = {role["name"]: role for role in summary_of(folder, name)["roles"]}
    trained = roles["learner"]["phase_seconds"]
    generator = roles["generator-0"]
    return Totals(
        generate_s=generator["phase_seconds"]["generate"],
        train_s=sum(trained.get(phase, 0.0) for phase in _TRAIN_PHASES),
        tokens=generator["pace"]["tokens"],
    )


def _run(
    folder: Path,
    name: str,
    mode: str,
    arguments: argparse.Namespace,
    *,
    steps: int,
    batches: int = 1,  # number for each step
) -> list[Reading]:
    settings = {
        "run.mode": mode,
        "run.steps": steps,
        "run.group_size": 8,
        "run.groups_per_step": batches * arguments.groups,
        "generators.max_sequences": 8 * arguments.groups,
        "generators.max_cached_tokens": 8 * arguments.groups * (MAX_TOKENS // 2),
        "deploy.cores": "{ generator = [0], learner = [1] }",
    }
    return run_slipstream(folder, name, settings)


if __name__ == "__main__":
    raise SystemExit(main())

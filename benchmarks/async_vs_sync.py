"""What asynchrony brings on this machine, against what it could bring.

Generator on core 0, learner on core 1, in both modes: each pool has hardware of its own, as on a
cluster. Synchronous training alternates: a step takes the time to generate, g, and the time to
train, t. Ideal asynchronous training takes max(g, t), a speed-up of (g + t) / max(g, t). The bar
is the share of that speed-up which is reached. Runs of both modes alternate; medians are compared.

usage: python -m benchmarks.async_vs_sync [--repeats 5] [--steps 8] [--groups 6] [--hidden 320]
"""

import argparse
import tempfile
from pathlib import Path

from benchmarks.bars import Bars
from benchmarks.run_measurement import (
    MAX_TOKENS,
    MEAN_TOKENS,
    TAIL,
    median,
    per_step,
    run_slipstream,
    summary_of,
    write_inputs,
)

_SKIPPED = 3  # steps until the pipeline is filled
_TRAIN_PHASES = ("fetch", "pack", "proximal", "train", "commit", "export")


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
    phases: dict[str, list[tuple[float, float]]] = {"sync": [], "async": []}
    with tempfile.TemporaryDirectory(prefix="async-vs-sync-") as name:
        folder = Path(name)
        write_inputs(folder, hidden=arguments.hidden, layers=arguments.layers)
        for repeat in range(arguments.repeats):
            for mode in ("sync", "async"):
                wall, g, t = _measure(folder, f"{mode}-{repeat}", mode, arguments)
                walls[mode].append(wall)
                phases[mode].append((g, t))
                print(f"{mode} {repeat}: {wall:.3f} s a step; g {g:.3f} s, t {t:.3f} s", flush=True)
    g, t = (median([pair[i] for pair in phases["sync"]]) for i in (0, 1))
    sync, asynchronous = median(walls["sync"]), median(walls["async"])
    speed_up, ideal = sync / asynchronous, (g + t) / max(g, t)
    print(f"generation g {g:.3f} s, training t {t:.3f} s per step (synchronous runs)")
    print(f"sync {sync:.3f} s, async {asynchronous:.3f} s per step: speed-up {speed_up:.3f}")
    print(f"ideal speed-up (g + t) / max(g, t) = {ideal:.3f}")
    bars = Bars()
    bars.at_least("async_efficiency", speed_up / ideal, "of the ideal speed-up", needs=0.85)
    return bars.exit_code


def _measure(
    folder: Path, name: str, mode: str, arguments: argparse.Namespace
) -> tuple[float, float, float]:
    readings = run_slipstream(
        folder,
        name,
        {
            "run.mode": mode,
            "run.steps": arguments.steps + TAIL,
            "run.group_size": 8,
            "run.groups_per_step": arguments.groups,
            "generators.max_sequences": 8 * arguments.groups,
            "generators.max_cached_tokens": 8 * arguments.groups * (MAX_TOKENS // 2),
            "deploy.cores": "{ generator = [0], learner = [1] }",
        },
    )
    wall, _ = per_step(readings, skip=_SKIPPED, until=arguments.steps)
    seconds = {role["name"]: role["phase_seconds"] for role in summary_of(folder, name)["roles"]}
    steps = arguments.steps + TAIL
    g = seconds["generator-0"]["generate"] / steps
    t = sum(seconds["learner"].get(phase, 0.0) for phase in _TRAIN_PHASES) / steps
    return wall, g, t


if __name__ == "__main__":
    raise SystemExit(main())

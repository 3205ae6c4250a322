"""Held-out score over seconds, against TRL's GRPOTrainer: same policy, data, reward, algorithm.

Both sample at temperature 1 from all tokens and train with DAPO's reduction (mean over tokens),
clipping of 0.2, advantages divided by the deviation of the group (plus 1e-6, TRL's 1e-4), no KL,
one update a step by AdamW (0.9, 0.95) at a constant rate without weight decay, gradients clipped to
1, and answer held-out prompts greedily at intervals; the reward of the settings scores all answers.
Our answers are as stale as the settings let them, TRL's never. Weights are float32 on both sides:
bfloat16 rounds most updates away. Seconds count from the launch of the command. Our evaluations are
in them, where the engine answers during training; what TRL's take, in padded batches, is left out
and recorded. TRL runs in the ways of vs_trl, and with products in bfloat16 (autocast), and the best
way is the baseline. The control is ours with a learning rate of 0, for one seed.

A run that a part had no time to end is a line without points, made again by the next part. A pair
is a seed that both ended. The other seeds are named and are in no figure.

usage: python -m benchmarks.learning_vs_trl --path DIR [--minutes 90] [--tiny]
       python -m benchmarks.learning_vs_trl --system slipstream --system slipstream-lr0
       python -m benchmarks.learning_vs_trl --report
"""

import argparse
import statistics
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from benchmarks.bars import Bars, NotRun
from benchmarks.parts import Run, absent, changed, ended, read, run_part, turns
from benchmarks.pictures import Panel
from benchmarks.recording import RECORDED
from benchmarks.run_measurement import ROOT, Reading, run_slipstream, summary_of, toml
from benchmarks.vs_trl import OURS, WAYS, Way, missing_smollm2, missing_trl, run_trl
from benchmarks.weightbus.figures import table
from slipstream.broker.config import DataSection
from slipstream.broker.data.sources import eval_sources, load_source, training_sources
from slipstream.deploy.examples.addition import prepare, write_rows
from slipstream.wire.settings.sections import EvalSection

GAIN = 0.2
CONTROL = "slipstream-lr0"
_WAYS = (*WAYS, Way(continuous=False, threads=2, autocast=True))
SYSTEMS = (OURS, CONTROL, *(way.name for way in _WAYS))
SEEDS = 3
_NEEDS = 0.8  # share of TRL's seconds
_FLAT = 0.02  # between evaluations of the control
_STARTS = (0.1, 0.4)  # least and most right at the start
_MINUTES = 60


class Point(msgspec.Struct, frozen=True, array_like=True):
    """What the policy of a step scored, and when it was there."""

    step: int
    wall_s: float  # since the launch
    cpu_s: float  # CPU seconds of all processes
    score: float  # share of right answers
    left_out_wall_s: float = 0.0  # what evaluations before it took beyond these seconds
    left_out_cpu_s: float = 0.0

    @property
    def whole_wall_s(self) -> float:
        return self.wall_s + self.left_out_wall_s

    @property
    def whole_cpu_s(self) -> float:
        return self.cpu_s + self.left_out_cpu_s


Runs: TypeAlias = Sequence[Run[list[Point]]]


def seconds_to(points: Sequence[Point], figure: str, gain: float = GAIN) -> float | None:
    """Return when the score was first ``gain`` above its start, by interpolation; None if never.

    Args:
        points: Points of one run by step.
        figure: Name of the seconds, ``wall_s`` or ``cpu_s``.
        gain: Gain in the share of right answers.
    """
    wanted = points[0].score + gain
    for before, after in pairwise(points):
        if before.score < wanted <= after.score:
            part = (wanted - before.score) / (after.score - before.score)
            start, end = getattr(before, figure), getattr(after, figure)
            return float(start + part * (end - start))
    return None


def ratio(
    ours: Mapping[int, Sequence[Point]], theirs: Mapping[int, Sequence[Point]], figure: str
) -> float | NotRun:
    """Return the median over pairs of our seconds to the gain as a part of theirs.

    Each of our seeds has to gain, also one that is no pair. Where theirs has no such gain, the
    seconds of its whole run count: it takes longer than they.
    """
    parts = []
    for seed, points in sorted(ours.items()):
        reached = seconds_to(points, figure)
        if reached is None:
            return NotRun(f"seed {seed} of {OURS} did not gain {GAIN:g}")
        if seed in theirs:
            theirs_s = seconds_to(theirs[seed], figure)
            parts.append(reached / (theirs_s or getattr(theirs[seed][-1], figure)))
    return statistics.median(parts) if parts else NotRun("no seed was ended by both")


def learning_bars(runs: Runs, bars: Bars) -> None:
    """Print the bars of ours and its control."""
    done = ended(runs)
    ours, control = list(done.get(OURS, {}).values()), done.get(CONTROL, {})
    nothing = NotRun(f"{OURS} has ended no run")
    starts = [points[0].score for points in ours]
    gains = [points[-1].score - points[0].score for points in ours]
    of_seeds = f"of {len(ours)} seeds"
    bars.at_least("lowest_start", min(starts, default=nothing), of_seeds, needs=_STARTS[0])
    bars.at_most("highest_start", max(starts, default=nothing), of_seeds, needs=_STARTS[1])
    bars.at_least("lowest_gain", min(gains, default=nothing), of_seeds, needs=GAIN)
    minutes = [points[-1].wall_s / 60 for points in ours]
    bars.at_most("longest_run", max(minutes, default=nothing), "minutes", needs=_MINUTES)
    scores = [[point.score for point in points] for points in control.values()]
    moved = max((max(each) - min(each) for each in scores), default=NotRun(f"no {CONTROL}"))
    bars.at_most("control_moves", moved, "between evaluations", needs=_FLAT)


def trl_bars(runs: Runs, bars: Bars) -> list[str]:
    """Print the bars against TRL; return what they would be with its evaluations counted."""
    done, notes = ended(runs), []
    ours, names = done.get(OURS, {}), [way.name for way in _WAYS if way.name in done]
    for figure in ("wall_s", "cpu_s"):
        values = {name: ratio(ours, done[name], figure) for name in names}
        known = {name: value for name, value in values.items() if isinstance(value, float)}
        best = max(known, key=known.__getitem__) if known else ""  # best of TRL's ways
        missing = next(iter(values.values()), NotRun("TRL has ended no run"))
        name = f"{figure[:-2]}_seconds_to_gain"
        pairs = f", pairs: {len(set(ours) & set(done[best]))}" if best else ""
        bars.at_most(name, known.get(best, missing), f"of {best or 'TRL'}'s{pairs}", needs=_NEEDS)
        if best and isinstance(whole := ratio(ours, done[best], f"whole_{figure}"), float):
            notes.append(f"{name}: {whole:.3f} of {best}'s with its evaluations")
    return notes


def runs_table(runs: Runs) -> str:
    """Return a table of all runs that ended."""
    rows = []
    for system, seeds in sorted(ended(runs).items()):
        for seed, points in sorted(seeds.items()):
            last = points[-1]
            reached = [seconds_to(points, figure) for figure in ("wall_s", "cpu_s")]
            texts = ["-" if second is None else f"{second:.0f}" for second in reached]
            taken = last.wall_s, last.cpu_s, last.left_out_wall_s, last.left_out_cpu_s
            scores = f"{points[0].score:.3f}", f"{last.score:.3f}"
            rows.append((system, str(seed), *scores, *texts, *(f"{value:.0f}" for value in taken)))
    gain = f"+{GAIN:g}"
    titles = ("system", "seed", "start", "end", f"wall s to {gain}", f"CPU s to {gain}")
    return table((*titles, "wall s", "CPU s", "left out: wall s", "CPU s"), rows)


def jobs_of(systems: Sequence[str], count: int = SEEDS) -> list[tuple[str, int]]:
    """Return all runs, systems in turns within a seed; the control has one seed."""
    return [job for job in turns(systems, range(count)) if job[0] != CONTROL or job[1] == 0]


def panels(runs: Runs, systems: Sequence[str], figures: Sequence[str]) -> list[Panel]:
    """Return scores over seconds, or over minutes where runs are long; none without runs."""
    done = {system: seeds for system, seeds in ended(runs).items() if system in systems}
    last = [points[-1] for seeds in done.values() for points in seeds.values()]
    if not last:
        return []
    unit, name = (60, "minutes") if last[0].wall_s > 600 else (1, "seconds")
    titles = {"wall_s": "wall time", "cpu_s": "CPU time of all processes"}
    return [
        Panel(
            title=titles[figure],
            x=name,
            y="right answers, share of those held out",
            curves={
                f"{system}, seeds: {len(done[system])}": [
                    [(getattr(point, figure) / unit, point.score) for point in points]
                    for points in done[system].values()
                ]
                for system in systems
                if system in done
            },
        )
        for figure in figures
    ]


# ---- runs --------------------------------------------------------------------


class Task:
    """Shipped settings and their data, as files that both sides read."""

    def __init__(self, name: str, folder: Path, *, steps: int, every: int) -> None:
        """Write policy and prompts.

        Args:
            name: Name of a file in configs.
            folder: Folder to be made.
            steps: Number in a run; 0 is as the file says.
            every: Steps between evaluations; 0 is as the file says.
        """
        self.config = tomllib.loads((ROOT / "configs" / f"{name}.toml").read_text())
        self.folder = folder
        self.every: int = every or self.config["eval"]["every_steps"]
        self.run: dict[str, Any] = self.config["run"]
        self.steps: int = steps or self.run["steps"]
        folder.mkdir(parents=True)
        if "file" in self.config["data"]:
            prepare(folder)
        else:
            (folder / "model").symlink_to(ROOT / self.run["model"])
            write_gym(folder, self.config)
        (folder / "run.toml").write_text("")

    def slipstream(self, seed: int, *, is_control: bool = False) -> list[Point]:
        settings = {
            f"{section}.{key}": value if isinstance(value, str) else toml(value)
            for section in ("sampling", "generators", "learner", "reward")
            for key, value in self.config[section].items()
        } | {
            "run.seed": seed,
            "run.steps": self.steps,
            "run.group_size": self.run["group_size"],
            "run.groups_per_step": self.run["groups_per_step"],
            "run.max_staleness_steps": self.run["max_staleness_steps"],
            "algo.preset": "async-default",
            "broker.drop_zero_variance": "false",
            "eval.file": self.folder / "held_out.jsonl",
            "eval.every_steps": self.every,
            "deploy.time_limit_s": 100_000,
        }
        if is_control:
            settings["learner.lr"] = 0
        began_s, name = time.monotonic(), f"seed-{seed}-{time.time_ns()}"
        readings = run_slipstream(self.folder, name, settings)
        rounds: Any = summary_of(self.folder, name)["eval"]
        scores = {point["step"]: point["overall"]["metrics"]["mean@1"] for point in rounds}
        return points_of(readings, began_s, scores, {})

    def trl(self, seed: int, way: Way, path: str) -> list[Point]:
        samples = self.run["group_size"] * self.run["groups_per_step"]
        job = {
            "steps": self.steps,
            "limits": (0, self.config["sampling"]["max_response_tokens"]),
            "prompt_tokens": self.config["sampling"]["max_prompt_tokens"],
            "threads": way.threads,
            "continuous": way.continuous,
            "samples": samples,
            "microbatch": min(64, samples // 2),
            "dtype": "float32",
            "autocast": way.autocast,
            "path": path,
            "reward": self.config["reward"],
            "seed": seed,
            "lr": self.config["learner"]["lr"],
            "group_size": self.run["group_size"],
            "evaluate_every": self.every,
        }
        scores, spent = dict[int, float](), dict[int, tuple[float, float]]()

        def hear(line: str) -> None:
            if line.startswith("scored "):
                _, step, score, wall_s, cpu_s = line.split()
                scores[int(step)], spent[int(step)] = float(score), (float(wall_s), float(cpu_s))

        began_s = time.monotonic()
        readings = run_trl(self.folder, job, hear)
        return points_of(readings, began_s, scores, spent)


def write_gym(folder: Path, config: Mapping[str, Any]) -> None:
    """Write the problems of shipped settings as texts in the chat template of folder/model."""
    from transformers import AutoTokenizer

    template = AutoTokenizer.from_pretrained(folder / "model").apply_chat_template
    data = msgspec.convert(config["data"], DataSection)
    evaluation = msgspec.convert(config["eval"], EvalSection)
    parts = {"train": training_sources(data), "held_out": eval_sources(evaluation)}
    for name, (source,) in parts.items():
        rows = []
        for problem in load_source(source, data, keep_going=False).prompts:
            asked = msgspec.to_builtins(problem.prompt)
            prompt = template(asked, tokenize=False, add_generation_prompt=True)
            rows.append({"prompt": prompt, "ground_truth": problem.ground_truth})
        write_rows(folder / f"{name}.jsonl", rows)


def points_of(
    readings: Sequence[Reading],
    began_s: float,
    scores: Mapping[int, float],
    spent: Mapping[int, tuple[float, float]],
) -> list[Point]:
    """Return a point for each evaluated step; what evaluations before it took is left out.

    Args:
        readings: Readings after each step.
        began_s: Time of the launch, by the clock of the readings.
        scores: Score by step.
        spent: Wall and CPU seconds of all evaluations up to a step's, by step.
    """
    points = [Point(0, 0.0, 0.0, scores[0])]
    left_out = spent.get(0, (0.0, 0.0))
    for reading in readings:
        if reading.step in scores:
            wall_s, cpu_s = reading.wall_s - began_s - left_out[0], reading.cpu_s - left_out[1]
            points.append(Point(reading.step, wall_s, cpu_s, scores[reading.step], *left_out))
            left_out = spent.get(reading.step, left_out)
    return points


def _run_part(
    name: str, file: Path, systems: Sequence[str], arguments: argparse.Namespace, settings: str
) -> None:
    packages, jobs = arguments.path, jobs_of(systems, arguments.seeds)
    ways = {way.name: way for way in _WAYS}
    with tempfile.TemporaryDirectory(prefix="learning-vs-trl-") as folder:
        task = Task(name, Path(folder) / name, steps=arguments.steps, every=arguments.every)

        def work(system: str, seed: int) -> list[Point]:
            if system in ways:
                return task.trl(seed, ways[system], packages)
            return task.slipstream(seed, is_control=system == CONTROL)

        run_part(
            file, list[Point], arguments.minutes, jobs, work, packages=packages, settings=settings
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RECORDED, help="folder of the results")
    parser.add_argument("--report", action="store_true", help="table and bars alone")
    parser.add_argument("--tiny", action="store_true", help="the quickstart's policy and task")
    parser.add_argument("--path", default="", help="folder with trl and datasets")
    parser.add_argument("--minutes", type=float, default=90.0, help="of this part")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--steps", type=int, default=0, help="of a run; 0: as the settings say")
    parser.add_argument("--every", type=int, default=0, help="steps between evaluations; 0: so")
    parser.add_argument("--system", action="append", choices=SYSTEMS, help="this one alone")
    arguments = parser.parse_args()
    settings = changed(parser, arguments, "steps", "every")
    name = "quickstart" if arguments.tiny else "smollm2"
    file = arguments.out / f"learning_{name}.jsonl"
    systems = [system for system in SYSTEMS if system in (arguments.system or SYSTEMS)]
    if not arguments.report:
        missing = missing_trl(arguments.path)
        if missing is not None:
            print(missing.reason)
            systems = [system for system in systems if system in {OURS, CONTROL}]
        no_model = None if arguments.tiny else missing_smollm2()
        if no_model is not None:
            print(no_model.reason)
        else:
            _run_part(name, file, systems, arguments, settings)
    bars, runs = Bars(), read(file, list[Point], settings)
    print(runs_table(runs))
    learning_bars(runs, bars)
    print("\n".join([*trl_bars(runs, bars), *absent(runs, jobs_of(SYSTEMS))]))
    return bars.exit_code


if __name__ == "__main__":
    raise SystemExit(main())

"""Held-out score over seconds, against TRL's GRPOTrainer: same policy, data and algorithm.

Both train with DAPO's reduction (mean over tokens), clipping of 0.2, advantages divided by the
deviation of the group, no KL, one update a step by AdamW (0.9, 0.95), and answer held-out prompts
greedily at intervals; one function scores them. Weights of TRL are float32, since it rounds most
updates of bfloat16 away; ours are of the folder's type, with float32 copies in the optimizer.
Seconds count from the launch of the command. Evaluations are in ours, and left out of TRL's. TRL
runs in the ways of vs_trl, and the best one is the baseline.

A run that a part had no time to end is a line without points, made again by the next part. A pair
is a seed that both ended. The other seeds are named and are in no figure.

usage: python -m benchmarks.learning_vs_trl --out FOLDER --path DIR [--minutes 90] [--tiny]
       python -m benchmarks.learning_vs_trl --out FOLDER --report
"""

import argparse
import json
import signal
import statistics
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from benchmarks.bars import Bars, NotRun
from benchmarks.run_measurement import ROOT, Reading, run_slipstream, summary_of
from benchmarks.vs_trl import WAYS, Way, missing_trl, run_trl
from benchmarks.weightbus.figures import table
from slipstream.broker.data.gym import gym_rows
from slipstream.deploy.examples.addition import prepare, write_rows

GAIN = 0.2
OURS = "slipstream"
_NEEDS = 0.8  # share of TRL's seconds
_COLORS = {OURS: "#0b62c4", "trl": "#b3003c"}


class Point(msgspec.Struct, frozen=True, array_like=True):
    """What the policy of a step scored, and when it was there."""

    step: int
    wall_s: float  # since the launch
    cpu_s: float  # CPU seconds of all processes
    score: float  # share of right answers


class Run(msgspec.Struct, frozen=True):
    """A line of the results."""

    system: str
    seed: int
    points: list[Point] | None  # None where the part had no time to end it


def read(path: Path) -> list[Run]:
    """Return a line of each system and seed: the newest that ended, or one that did not."""
    newest: dict[tuple[str, int], Run] = {}
    for line in path.read_bytes().splitlines() if path.exists() else []:
        run = msgspec.json.decode(line, type=Run)
        before = newest.get((run.system, run.seed))
        if run.points is not None or before is None:
            newest[run.system, run.seed] = run
    return list(newest.values())


def ended(runs: Sequence[Run]) -> dict[str, dict[int, list[Point]]]:
    """Return system -> seed -> points of the runs that ended."""
    found: dict[str, dict[int, list[Point]]] = {}
    for run in runs:
        if run.points is not None:
            found.setdefault(run.system, {})[run.seed] = run.points
    return found


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

    Where theirs has no such gain, the seconds of its whole run count: it takes longer than they.
    """
    pairs = sorted(set(ours) & set(theirs))
    if not pairs:
        return NotRun("no seed was ended by both")
    parts = []
    for seed in pairs:
        a, b = seconds_to(ours[seed], figure), seconds_to(theirs[seed], figure)
        if a is None:
            return NotRun(f"seed {seed} of {OURS} did not gain {GAIN:g}")
        parts.append(a / (getattr(theirs[seed][-1], figure) if b is None else b))
    return statistics.median(parts)


def report(runs: Sequence[Run], bars: Bars) -> str:
    """Print the bars; return a table of all pairs and the seeds that are none."""
    done, rows = ended(runs), []
    ours = done.get(OURS, {})
    for system, seeds in sorted(done.items()):
        for seed, points in sorted(seeds.items()):
            reached = [seconds_to(points, figure) for figure in ("wall_s", "cpu_s")]
            scores = f"{points[0].score:.3f}", f"{points[-1].score:.3f}"
            texts = ["-" if s is None else f"{s:.0f}" for s in reached]
            rows.append((system, str(seed), *scores, *texts))
    for figure in ("wall_s", "cpu_s"):
        values = {
            system: ratio(ours, seeds, figure) for system, seeds in done.items() if system != OURS
        }
        known = {system: value for system, value in values.items() if isinstance(value, float)}
        best = max(known, key=known.__getitem__) if known else ""  # best of TRL's ways
        missing = next(iter(values.values()), NotRun("TRL has ended no run"))
        name = f"{figure[:-2]}_seconds_to_gain"
        bars.at_most(name, known.get(best, missing), f"of {best or 'TRL'}'s", needs=_NEEDS)
    titles = ("system", "seed", "start", "end", f"wall s to +{GAIN:g}", f"CPU s to +{GAIN:g}")
    lines = [table(titles, rows)]
    lines += [f"not ended: {run.system}, seed {run.seed}" for run in runs if run.points is None]
    return "\n".join(lines)


# ---- the picture -------------------------------------------------------------

_PANEL = (440, 300)  # pixels
_MARGIN = (56, 44)
_GRID = 60  # points of a curve


def score_at(points: Sequence[Point], figure: str, second: float) -> float:
    """Return the score at a second, by interpolation; the last one after the end."""
    for before, after in pairwise(points):
        start, end = getattr(before, figure), getattr(after, figure)
        if start <= second <= end:
            part = (second - start) / (end - start) if end > start else 1.0
            return before.score + part * (after.score - before.score)
    return points[-1].score


def svg(runs: Sequence[Run]) -> str:
    """Return mean scores over seconds; a band from the lowest seed to the highest."""
    done = ended(runs)
    width, height = 2 * (_PANEL[0] + _MARGIN[0]) + 20, _PANEL[1] + 2 * _MARGIN[1]
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="12" '
        'fill="#1a1a1a">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for number, (figure, title) in enumerate((("wall_s", "wall s"), ("cpu_s", "CPU s"))):
        left, top = _MARGIN[0] + number * (_PANEL[0] + _MARGIN[0]), _MARGIN[1]
        longest = max(getattr(p[-1], figure) for seeds in done.values() for p in seeds.values())
        lines += [
            f'<rect x="{left}" y="{top}" width="{_PANEL[0]}" height="{_PANEL[1]}" fill="none" '
            'stroke="#1a1a1a"/>',
            f'<text x="{left}" y="{top + _PANEL[1] + 18}">0</text>',
            f'<text x="{left + _PANEL[0]}" y="{top + _PANEL[1] + 18}" text-anchor="end">'
            f"{longest:.0f} {title}</text>",
            f'<text x="{left - 6}" y="{top + _PANEL[1]}" text-anchor="end">0</text>',
            f'<text x="{left - 6}" y="{top + 10}" text-anchor="end">1</text>',
        ]
        for row, (system, seeds) in enumerate(sorted(done.items())):
            lines += _curve(list(seeds.values()), figure, longest, (left, top), system)
            lines.append(
                f'<text x="{left + 8}" y="{top + 18 + 16 * row}" fill="{_color(system)}">'
                f"{system}, {len(seeds)} seeds</text>"
            )
    return "\n".join([*lines, "</svg>", ""])


def _color(system: str) -> str:
    return _COLORS[OURS if system == OURS else "trl"]


def _curve(
    seeds: list[list[Point]], figure: str, longest: float, corner: tuple[int, int], system: str
) -> list[str]:
    """Draw as far as the shortest run goes."""
    last = min(getattr(points[-1], figure) for points in seeds)
    drawn: dict[str, list[str]] = {"low": [], "mean": [], "high": []}
    for number in range(_GRID + 1):
        second = last * number / _GRID
        x = corner[0] + _PANEL[0] * second / longest
        scores = [score_at(points, figure, second) for points in seeds]
        values = {"low": min(scores), "mean": statistics.fmean(scores), "high": max(scores)}
        for name, value in values.items():
            drawn[name].append(f"{x:.1f} {corner[1] + _PANEL[1] * (1 - value):.1f}")
    color, band = _color(system), drawn["low"] + drawn["high"][::-1]
    return [
        f'<path d="M{"L".join(band)}Z" fill="{color}" fill-opacity="0.15"/>',
        f'<path d="M{"L".join(drawn["mean"])}" fill="none" stroke="{color}" stroke-width="2"/>',
    ]


# ---- runs --------------------------------------------------------------------

_REWARD = """
def score(data_source, solution_str, ground_truth, extra_info):
    \"\"\"1.0 if the answer is the truth and nothing else.\"\"\"
    return float(solution_str.strip() == ground_truth)
"""
_LEAST_HELD_OUT = 128


class Task:
    """Shipped settings and their data, as files that both sides read."""

    def __init__(self, name: str, folder: Path, *, steps: int, every: int) -> None:
        """Write policy, prompts and reward.

        Args:
            name: of a file in configs.
            folder: to be made.
            steps: of a run; 0 is as the file says.
            every: steps between evaluations.
        """
        self.config = tomllib.loads((ROOT / "configs" / f"{name}.toml").read_text())
        self.folder, self.every = folder, every
        self.run: dict[str, Any] = self.config["run"]
        self.steps: int = steps or self.run["steps"]
        folder.mkdir(parents=True)
        if "file" in self.config["data"]:
            prepare(folder)
        else:
            (folder / "model").symlink_to(ROOT / self.run["model"])
            self._write_gym()
        (folder / "reward.py").write_text(_REWARD)
        (folder / "run.toml").write_text("")

    def _write_gym(self) -> None:
        """Write problems as texts in the chat template."""
        from transformers import AutoTokenizer

        template = AutoTokenizer.from_pretrained(self.folder / "model").apply_chat_template
        system = {"role": "system", "content": self.config["data"]["system_prompt"]}
        parts = {"train": self.config["data"]["sources"], "held_out": self.config["eval"]["sets"]}
        for name, tables in parts.items():
            (source,) = tables.values()
            size = max(_LEAST_HELD_OUT, source["size"])
            made = gym_rows(
                source["reasoning_gym"],
                size=size,
                seed=source["seed"],
                options=source.get("options", {}),
                setting=name,
            )
            rows = []
            for row in made:
                asked = [system, {"role": "user", "content": row.values["prompt"]}]
                prompt = template(asked, tokenize=False, add_generation_prompt=True)
                rows.append({"prompt": prompt, "ground_truth": row.values["ground_truth"]})
            write_rows(self.folder / f"{name}.jsonl", rows)

    def slipstream(self, seed: int) -> list[Point]:
        plain = (str, int, float)
        settings = {
            f"{section}.{key}": value if type(value) in plain else json.dumps(value)
            for section in ("sampling", "generators", "learner")
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
            "path": path,
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


def points_of(
    readings: Sequence[Reading],
    began_s: float,
    scores: Mapping[int, float],
    spent: Mapping[int, tuple[float, float]],
) -> list[Point]:
    """Return a point for each evaluated step; what evaluations before it took is left out.

    Args:
        readings: after each step.
        began_s: of the launch, by the clock of the readings.
        scores: by step.
        spent: wall and CPU seconds of all evaluations up to a step's, by step.
    """
    points = [Point(0, 0.0, 0.0, scores[0])]
    left_out = spent.get(0, (0.0, 0.0))
    for reading in readings:
        if reading.step in scores:
            wall_s, cpu_s = reading.wall_s - began_s - left_out[0], reading.cpu_s - left_out[1]
            points.append(Point(reading.step, wall_s, cpu_s, scores[reading.step]))
            left_out = spent.get(reading.step, left_out)
    return points


def run_part(task: Task, file: Path, arguments: argparse.Namespace) -> None:
    """Do what the file lacks, systems in turns within a seed, until the minutes are over."""
    deadline_s = time.monotonic() + 60 * arguments.minutes

    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, stop)
    ways: dict[str, Way | None] = {OURS: None, **{way.name: way for way in WAYS}}
    for seed in range(arguments.seeds):
        done = ended(read(file))
        order = list(ways)[:: 1 if seed % 2 == 0 else -1]
        for system in [name for name in order if name in (arguments.system or ways)]:
            left_s = int(deadline_s - time.monotonic())
            if seed in done.get(system, {}):
                continue
            if left_s < 1:
                return
            signal.alarm(left_s)
            way, points = ways[system], None
            try:
                points = task.trl(seed, way, arguments.path) if way else task.slipstream(seed)
            except TimeoutError:
                print(f"{system}, seed {seed} was not ended", flush=True)
            signal.alarm(0)
            with file.open("ab") as lines:
                lines.write(msgspec.json.encode(Run(system, seed, points)) + b"\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--report", action="store_true", help="table, bars and picture alone")
    parser.add_argument("--tiny", action="store_true", help="the quickstart's policy and task")
    parser.add_argument("--path", default="", help="folder with trl and datasets")
    parser.add_argument("--minutes", type=float, default=90.0, help="of this part")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=0, help="of a run; 0: as the settings say")
    parser.add_argument("--every", type=int, default=5, help="steps between evaluations")
    names = [OURS, *(way.name for way in WAYS)]
    parser.add_argument("--system", action="append", choices=names, help="this one alone")
    arguments = parser.parse_args()
    name = "quickstart" if arguments.tiny else "smollm2"
    arguments.out.mkdir(parents=True, exist_ok=True)
    file = arguments.out / f"learning_{name}.jsonl"
    missing = missing_trl(arguments.path)
    if not arguments.report and missing is None:
        with tempfile.TemporaryDirectory(prefix="learning-vs-trl-") as folder:
            task = Task(name, Path(folder) / name, steps=arguments.steps, every=arguments.every)
            run_part(task, file, arguments)
    elif missing is not None and not arguments.report:
        print(missing.reason)
    bars, runs = Bars(), read(file)
    print(report(runs, bars))
    if ended(runs):
        file.with_suffix(".svg").write_text(svg(runs), "utf-8")
    return bars.exit_code


if __name__ == "__main__":
    raise SystemExit(main())

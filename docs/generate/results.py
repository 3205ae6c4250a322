"""The figures and pictures of docs/results.md, computed from what benchmarks recorded.

Run as a program, this writes them into the page and into docs/images:

    python -m docs.generate.results --write
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from benchmarks import (
    async_vs_sync,
    bench_engine,
    bench_learner,
    learning_vs_trl,
    parts,
    staleness_learning,
    vs_trl,
)
from benchmarks.async_vs_sync import BALANCES, MODES
from benchmarks.bars import Bars
from benchmarks.learning_vs_trl import CONTROL, SYSTEMS
from benchmarks.parts import Run
from benchmarks.pictures import Panel, Track, svg
from benchmarks.recording import RECORDED, Line, lines_of, origins
from benchmarks.staleness_learning import BOUNDS
from benchmarks.vs_trl import OURS
from docs.generate.page_parts import generated

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "results.md"
R = TypeVar("R")
IMAGES = ROOT / "docs" / "images"


class Figures(NamedTuple):
    """What a file of results shows."""

    lines: Sequence[Line]  # none: it was not measured
    text: str  # tables
    notes: Sequence[str] = ()  # bars, and what is not there
    panels: Sequence[Panel] = ()


class Part(NamedTuple):
    """A part of the page."""

    command: str
    caption: str
    figures: Callable[[Path], Figures]  # reads a folder


def _learning(name: str, systems: Sequence[str], seconds: Sequence[str], folder: Path) -> Figures:
    runs = parts.read(folder / f"learning_{name}.jsonl", list[learning_vs_trl.Point])
    runs = [run for run in runs if run.system in systems]
    notes = list[str]()
    bars = Bars(notes.append)
    if CONTROL in systems:
        learning_vs_trl.learning_bars(runs, bars)
    else:
        notes += learning_vs_trl.trl_bars(runs, bars)
    notes += parts.absent(runs, learning_vs_trl.jobs_of(systems))
    panels = learning_vs_trl.panels(runs, systems, seconds)
    return Figures(_ended(runs), learning_vs_trl.runs_table(runs), notes, panels)


def _balances(folder: Path) -> Figures:
    runs = parts.read(folder / "async_vs_sync.jsonl", async_vs_sync.Step)
    figures, done = _reported(runs, async_vs_sync.report), parts.ended(runs)
    tracks: dict[str, list[Track]] = {}
    for repeat in parts.paired(runs, [f"{n}-{m}" for n in BALANCES for m in MODES])[0]:
        walls: dict[str, list[tuple[float, float]]] = {}
        for name, balance in sorted(BALANCES.items(), key=lambda item: item[1].aimed):
            sync, asynchronous, full = (done[f"{name}-{mode}"][repeat] for mode in MODES)
            longer = max(full.generate_s / full.tokens * asynchronous.tokens, sync.train_s)
            values = (sync.wall_s, asynchronous.wall_s, longer)
            for title, value in zip(
                ("synchronous", "asynchronous, bound 2", "max(g, t)"), values, strict=True
            ):
                walls.setdefault(title, []).append((balance.aimed, value))
        for title, track in walls.items():
            tracks.setdefault(title, []).append(track)
    axes = {"title": "a step", "x": "generation over training, as aimed at", "y": "seconds"}
    return figures._replace(panels=[Panel(curves=tracks, **axes)] if tracks else [])


def _bounds(folder: Path) -> Figures:
    runs = parts.read(folder / "staleness_learning.jsonl", staleness_learning.Outcome)
    figures, plan = _reported(runs, staleness_learning.report), staleness_learning.PLAN
    looks = ", ".join(map(str, plan.looks))
    stated = f"stated before: margin {plan.margin:g}, level {plan.level:g}, looks at {looks} pairs"
    systems = {bound: staleness_learning.name_of(bound) for bound in (0, *BOUNDS)}
    done, (seeds, _) = parts.ended(runs), parts.paired(runs, list(systems.values()))
    tracks = [
        [(bound, done[system][seed].accuracy) for bound, system in systems.items()]
        for seed in seeds
    ]
    panel = Panel(
        title=f"after {staleness_learning.STEPS} steps",
        x="bound of staleness, steps; 0 is synchronous",
        y="right answers, share of those held out",
        curves={f"seeds: {len(seeds)}": tracks},
    )
    return figures._replace(notes=[stated, *figures.notes], panels=[panel] if seeds else [])


def _reported(runs: Sequence[Run[R]], report: Callable[[Sequence[Run[R]], Bars], str]) -> Figures:
    """Return what a report prints of runs: its table, and other lines among the notes."""
    notes = list[str]()
    lines = report(runs, Bars(notes.append)).splitlines()
    rows = [line for line in lines if line.startswith("|")]
    return Figures(
        _ended(runs), "\n".join(rows), [*notes, *(line for line in lines if line not in rows)]
    )


def _ended(runs: Sequence[Run[R]]) -> list[Run[R]]:
    return [run for run in runs if run.result is not None]


def _throughput(folder: Path) -> Figures:
    notes = list[str]()
    runs = parts.read(folder / "vs_trl.jsonl", vs_trl.Took)
    asked = [(policy, lengths) for policy in vs_trl.POLICIES for lengths in policy.needs]
    text = vs_trl.compare(runs, Bars(notes.append), asked)
    for policy, lengths in asked:
        notes += parts.absent(runs, vs_trl.jobs_of(policy, lengths))
    return Figures(_ended(runs), text, notes)


def _learner(folder: Path) -> Figures:
    newest = {
        line.case: line for line in lines_of(folder / "learner.jsonl", bench_learner.Measured)
    }
    reports = {
        name: partial(bench_learner.report, steps=line.steps) for name, line in newest.items()
    }
    return _cases(newest, bench_learner.CASES, reports)


def _engine(folder: Path) -> Figures:
    newest = {line.case: line for line in lines_of(folder / "engine.jsonl", bench_engine.Measured)}
    reports = {
        name: partial(bench_engine.report, turns=line.turns) for name, line in newest.items()
    }
    return _cases(newest, bench_engine.CASES, reports)


def _cases(
    newest: Mapping[str, Line], known: Iterable[str], reports: Mapping[str, Callable[..., str]]
) -> Figures:
    """Return the newest line of each case."""
    notes = list[str]()
    bars = Bars(notes.append)
    tables = [f"{name}:\n\n{report(bars, name)}" for name, report in reports.items()]
    notes += [f"not there: {name}" for name in known if name not in newest]
    return Figures(list(newest.values()), "\n\n".join(tables), notes)


_FOLDER = RECORDED.relative_to(ROOT)
_LEARNING = "python -m benchmarks.learning_vs_trl"
_AGAINST = [system for system in SYSTEMS if system != CONTROL]
_BOTH = ("wall_s", "cpu_s")
PARTS = {
    "learning": Part(
        f"{_LEARNING} --system {OURS} --system {CONTROL}",
        "Right answers of SmolLM2-135M-Instruct over minutes",
        partial(_learning, "smollm2", [OURS, CONTROL], ["wall_s"]),
    ),
    "learning-against-trl": Part(
        f"{_LEARNING} --path DIR",
        "Right answers of SmolLM2-135M-Instruct over wall and CPU time, with those of TRL",
        partial(_learning, "smollm2", _AGAINST, _BOTH),
    ),
    "tiny-against-trl": Part(
        f"{_LEARNING} --path DIR --tiny",
        "Right answers of the quickstart's policy over wall and CPU time, with those of TRL",
        partial(_learning, "quickstart", _AGAINST, _BOTH),
    ),
    "throughput": Part(f"python -m benchmarks.vs_trl --out {_FOLDER} --path DIR", "", _throughput),
    "balances": Part(
        f"python -m benchmarks.async_vs_sync --out {_FOLDER}/async_vs_sync.jsonl",
        "Seconds of a step over the balance",
        _balances,
    ),
    "bounds": Part(
        f"python -m benchmarks.staleness_learning --out {_FOLDER}/staleness_learning.jsonl",
        "Right answers over the bound",
        _bounds,
    ),
    "learner": Part(f"python -m benchmarks.bench_learner --out {_FOLDER}", "", _learner),
    "engine": Part(f"python -m benchmarks.bench_engine --out {_FOLDER}", "", _engine),
}


def shown(folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Return the texts of all parts, and pictures by their file names.

    Args:
        folder: Files of results, as ``benchmarks/recorded``.
    """
    texts, pictures = {}, {}
    for name, part in PARTS.items():
        figures = part.figures(folder)
        if not figures.lines:
            texts[name] = f"Not measured yet: `{part.command}`\n"
            continue
        blocks = [f"`{part.command}`: {origins(figures.lines)}.", figures.text]
        if figures.panels:
            file = f"results-{name}.svg"
            pictures[file] = svg(figures.panels)
            blocks.append(f"![{part.caption}](images/{file})")
        blocks.append("\n".join(["```", *figures.notes, "```"]))
        texts[name] = "\n\n".join(blocks) + "\n"
    return texts, pictures


def page(before: str, texts: dict[str, str]) -> str:
    """Return the page with these texts in their places."""
    return generated(before, {name: partial(str, text) for name, text in texts.items()})


def main(arguments: list[str]) -> None:
    """Print the page, or write it and its pictures."""
    texts, pictures = shown(RECORDED)
    text = page(PAGE.read_text("utf-8"), texts)
    if "--write" not in arguments:
        sys.stdout.write(text)
        return
    PAGE.write_text(text, "utf-8")
    for file in (IMAGES / f"results-{name}.svg" for name in PARTS):
        file.unlink(missing_ok=True)
        if file.name in pictures:
            file.write_text(pictures[file.name], "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

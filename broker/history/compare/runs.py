"""Run folders that are compared: what each is, how it ended, and its final evaluation."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from slipstream.broker.history.compare.run_table import RunTable, read_rounds
from slipstream.broker.history.compare.settings_diff import read_settings
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.run_folder import BROKER_LOCK, SETTINGS, SUMMARY, answers_file
from slipstream.wire.messages.status import EvalPoint
from slipstream.wire.process.processes import is_locked
from slipstream.wire.unreadable import UNREADABLE

MAX_RUNS = 200  # in a list, the newest
ProblemKey = tuple[str, int, str]  # data source, position, prompt


class _Summary(msgspec.Struct, frozen=True):
    """What the list shows of summary.json."""

    outcome: str = ""
    stop_reason: str = ""
    steps: int = 0
    total_steps: int = 0
    elapsed_s: float = 0.0


class _Answer(msgspec.Struct, frozen=True):
    """A line of eval/step-000040.jsonl, as far as it counts here."""

    problem: int
    reward: float
    data_source: str = ""
    prompt: str = ""


_summaries = msgspec.json.Decoder(_Summary)
_answers = msgspec.json.Decoder(_Answer)


class RunRow(msgspec.Struct, frozen=True, kw_only=True):
    """One run in the list."""

    name: str  # unique on the page
    folder: str
    state: str  # running, interrupted, finished, or why it ended
    stop_reason: str
    steps: int
    total_steps: int
    elapsed_s: float
    eval_step: int | None  # step of the newest evaluation
    eval_mean: float | None
    eval_first: float | None  # mean of the first one, if there are more
    eval_problems: int
    eval_sampling: str  # greedy, or sampled at temperature 1


@dataclass(frozen=True, slots=True)
class FinalScores:
    """Mean reward of each problem in the newest evaluation."""

    step: int
    by_problem: dict[ProblemKey, float]


@dataclass(frozen=True, slots=True)
class Missing:
    """In place of scores that are not recorded."""

    reason: str


class ComparedRun:
    """One run folder."""

    def __init__(self, name: str, folder: Path) -> None:
        """Name a run folder."""
        self.name = name
        self.folder = folder
        self.table = RunTable(folder)
        self.settings = read_settings(folder)

    def row(self) -> RunRow:
        """Return what the list shows, as of now."""
        summary = self._summary()
        rounds = read_rounds(self.folder)
        newest = rounds[-1] if rounds else None
        return RunRow(
            name=self.name,
            folder=str(self.folder),
            state=self._state(summary),
            stop_reason=summary.stop_reason,
            steps=summary.steps,
            total_steps=summary.total_steps,
            elapsed_s=summary.elapsed_s,
            eval_step=newest.step if newest else None,
            eval_mean=newest.mean if newest else None,
            eval_first=rounds[0].mean if len(rounds) > 1 else None,
            eval_problems=newest.overall.num_problems if newest else 0,
            eval_sampling=sampling_of(self.settings.get("eval.temperature", "")),
        )

    def final_scores(self) -> FinalScores | Missing:
        """Return the scores of the newest evaluation by problem, or why there are none."""
        rounds = read_rounds(self.folder)
        if not rounds:
            return Missing(f"{self.name} has no evaluation (eval.file)")
        return scores_of(self.name, self.folder, rounds[-1])

    def _summary(self) -> _Summary:
        try:
            return _summaries.decode((self.folder / SUMMARY).read_bytes())
        except (OSError, *UNREADABLE):
            return _Summary()

    def _state(self, summary: _Summary) -> str:
        if summary.outcome not in {"", "running"}:
            return summary.outcome
        if is_locked(self.folder / BROKER_LOCK):
            return "running"
        return "interrupted" if summary.outcome else "not begun"


def scores_of(name: str, folder: Path, final: EvalPoint) -> FinalScores | Missing:
    """Return the recorded scores of one evaluation by problem, if they are all there."""
    path = answers_file(folder, final.step)
    try:
        answers = _answers.decode_lines(path.read_bytes())
    except (OSError, *UNREADABLE):
        return Missing(
            f"{name} has no answers recorded of its evaluation at step {final.step} "
            "(eval.keep_answers)"
        )
    rewards: dict[ProblemKey, list[float]] = {}
    for answer in answers:
        key = (answer.data_source, answer.problem, answer.prompt)
        rewards.setdefault(key, []).append(answer.reward)
    answered = final.overall.num_problems - final.overall.num_dropped
    if len(rewards) < answered or not rewards:
        return Missing(
            f"{name} has the answers to {len(rewards)} of {answered} problems recorded of its "
            f"evaluation at step {final.step}: the first that were ready, which are no fair "
            "sample (eval.keep_answers)"
        )
    means = {key: sum(values) / len(values) for key, values in rewards.items()}
    return FinalScores(final.step, means)


def sampling_of(temperature: str) -> str:
    """Return how the answers of an evaluation were chosen, given eval.temperature as text."""
    try:
        value = float(temperature)
    except ValueError:
        return ""
    return f"sampled at temperature {value:g}" if value else "greedy"


def is_run(folder: Path) -> bool:
    """Return whether a folder is that of a run."""
    return (folder / SETTINGS).is_file() or (folder / SUMMARY).is_file()


def runs_in(folder: Path) -> list[Path]:
    """Return the run folders in a folder, the newest first, as many as a list shows."""
    found = [path for path in folder.iterdir() if path.is_dir() and is_run(path)]
    return sorted(found, key=_begun_s, reverse=True)[:MAX_RUNS]


def named(folders: Sequence[Path]) -> list[ComparedRun]:
    """Return runs under names that differ, as short as they can be.

    Raises:
        ConfigError: one is no run folder, or named twice.
    """
    whole = [folder.resolve() for folder in folders]
    for folder, path in zip(folders, whole, strict=True):
        if not is_run(path):
            raise ConfigError(
                f"{folder} is no run folder: expected {SETTINGS} or {SUMMARY} in it, found neither"
            )
        if whole.count(path) > 1:
            raise ConfigError(f"{folder} is named twice: a comparison needs different runs")
    short = [path.name for path in whole]
    names = [
        path.name if short.count(path.name) == 1 else f"{path.parent.name}/{path.name}"
        for path in whole
    ]
    names = [
        name if names.count(name) == 1 else str(path)
        for name, path in zip(names, whole, strict=True)
    ]
    return [ComparedRun(name, path) for name, path in zip(names, whole, strict=True)]


def _begun_s(folder: Path) -> float:
    path = folder / SETTINGS
    return (path if path.exists() else folder).stat().st_mtime

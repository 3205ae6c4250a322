"""`slipstream reward test`: score answers with a reward function, without a run."""

import argparse
import asyncio
import os
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby, islice
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from slipstream.broker.config import DataSection, RewardSection, private_paths
from slipstream.broker.data.files import RawRow, read_rows
from slipstream.broker.data.gym import gym_rows
from slipstream.broker.data.images import RowImages
from slipstream.broker.data.plain import BadRowError
from slipstream.broker.data.rows import TRUTH_COLUMN, RowRules, prompt_from_row
from slipstream.broker.data.sources import image_columns
from slipstream.broker.images import with_files
from slipstream.broker.reward_worker.pool import RewardPool
from slipstream.deploy.commands.options import add_config, add_json, add_overrides
from slipstream.deploy.terminal.console import make_console
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.image_folder import ImageFolder
from slipstream.wire.messages.broker import ScoringItem
from slipstream.wire.messages.trajectory import Json, Prompt, Transcript
from slipstream.wire.process.command_line import print_json
from slipstream.wire.settings.load import Table, load_table, section
from slipstream.wire.unreadable import UNREADABLE

EXIT_UNAVAILABLE = 1
_ANSWER_COLUMNS = ("response", "solution")
_GYM = "reasoning_gym:"
_SHOWN_CHARACTERS = 60
_Sample = tuple[ScoringItem, Transcript]  # one answer to score
EXAMPLES = """examples:
  slipstream reward test --reward my.py:score --data train.parquet    score rows without a run
  slipstream reward test --reward my.py:score --data train.jsonl --answers answers.jsonl
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument("action", choices=("test",), help="what to do with the function")
    parser.add_argument(
        "--reward",
        default="",
        metavar="MODULE:NAME",
        help="the function, or FILE.py:NAME; default: reward.function",
    )
    parser.add_argument(
        "--data",
        required=True,
        metavar="FILE",
        help="file of the rows to score, or reasoning_gym:NAME",
    )
    parser.add_argument(
        "--answers",
        type=Path,
        metavar="FILE",
        help="JSONL with the answers to score; default: the ground truths",
    )
    parser.add_argument("--n", type=int, default=20, metavar="N", help="rows to score (20)")
    add_config(parser, required=False, text="settings of a run, for [reward] and [data]")
    add_json(parser)
    add_overrides(parser)


def main(arguments: argparse.Namespace) -> int:
    """Score answers to the first rows of a file, print them; return the exit code.

    Answers are in the file of --answers (one per line and row: text, or an object with response or
    solution, and row where they are not in order), or in a column response or solution, or else are
    the ground truth and an empty text.

    Raises:
        ConfigError: a file, function or setting that cannot be used.
    """
    if arguments.n < 1:
        raise ConfigError(f"--n must be at least 1, got {arguments.n}")
    table = load_table(arguments.config or Path(os.devnull), arguments.overrides)
    settings = section(table, "reward", RewardSection)
    hide = [path for path in private_paths(table) if path.exists()]  # none is made for a trial
    with TemporaryDirectory(prefix="slipstream-images-") as name:
        images = ImageFolder(Path(name))
        samples = _samples(table, arguments.data, arguments.n, arguments.answers, images)
        tested, seconds = asyncio.run(_score(settings, arguments.reward, hide, samples))
    if arguments.json:
        print_json({"answers": tested, "seconds": seconds, **_summary(tested)})
    else:
        _show(tested, seconds, make_console())
    return EXIT_UNAVAILABLE if any(answer.reward is None for answer in tested) else 0


class TestedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One answer and its score."""

    __test__ = False  # no test of pytest

    row: int
    data_source: str
    answer: str
    reward: float | None
    parts: dict[str, float]
    unavailable: str
    function: str
    version: str
    ms: float  # since its group was submitted, so the time of others is in it


# ---- samples -------------------------------------------------------------------


def _samples(
    table: Table, where: str, count: int, answers: Path | None, images: ImageFolder
) -> list[_Sample]:
    """Return answers to the first ``count`` rows of a file, or of reasoning_gym:NAME.

    Answers to the same row are siblings.
    """
    section_ = section(table, "data", DataSection)
    gym = where.removeprefix(_GYM) if where.startswith(_GYM) else ""
    rules = RowRules(
        data_source=gym or "default",
        prompt_column="prompt" if gym else section_.prompt_column,
        ground_truth_column=TRUTH_COLUMN if gym else section_.ground_truth_column,
        as_chat=section_.as_chat,
        system_prompt=section_.system_prompt,
        image_columns=() if gym else image_columns(section_),
        max_images=section_.max_images,
    )
    take = RowImages(Path(where).parent, images).take
    given = _answers_by_row(answers) if answers else None
    samples: list[_Sample] = []
    num_rows = 0
    rows: Iterable[RawRow] = (
        read_rows(Path(where), "--data", rules.columns.union(_ANSWER_COLUMNS))
        if not gym
        else gym_rows(gym, size=count, seed=0, options={}, setting="--data")
    )
    for group, raw in enumerate(islice(rows, count)):
        num_rows = group + 1
        try:
            if raw.values is None:
                raise BadRowError(raw.problem)  # noqa: TRY301 one way out for all bad rows
            prompt = prompt_from_row(raw.values, rules, number=raw.number, take_image=take)
        except BadRowError as error:
            raise ConfigError(f"--data {where}: row {raw.number}: {error}") from error
        own = [
            raw.values[column]
            for column in _ANSWER_COLUMNS
            if column in raw.values and column != rules.ground_truth_column
        ]
        texts = [answer for answer in own if isinstance(answer, str)][:1]
        truth = prompt.ground_truth
        if given is not None:
            texts = given.pop(group, [])
        elif not texts:  # a right one, if it is known, and an empty one
            is_plain = isinstance(truth, str | int | float) and not isinstance(truth, bool)
            texts = [str(truth), ""] if is_plain and truth != "" else [""]
        samples += [_sample(group, i, prompt, text, images) for i, text in enumerate(texts)]
    if given:
        first = min(given)
        if first < 0 or num_rows < count:
            raise ConfigError(f"--answers {answers}: no row {first}: {where} has {num_rows} rows")
        note = f"--answers {answers}: answers from row {first} on are not scored (--n {count})"
        make_console(stderr=True).print(Text(note), soft_wrap=True)
    if not samples:
        raise ConfigError(f"--data {where} holds no rows, or none with an answer")
    return samples


def _sample(group: int, sibling: int, prompt: Prompt, answer: str, images: ImageFolder) -> _Sample:
    transcript = Transcript(
        prompt=prompt,
        response=answer,
        num_response_tokens=max(1, len(answer.split())),
        finish_reason="stop",
    )
    files = [images.file_of(image.digest) for image in prompt.images]
    item = ScoringItem(group_id=group, sibling=sibling, lease_id=0)
    return item, with_files(transcript, files)


def _answers_by_row(path: Path) -> dict[int, list[str]]:
    """Return the answers of a file by the position of their rows."""
    try:
        lines = [line for line in path.read_bytes().splitlines() if line.strip()]
    except OSError as error:
        raise ConfigError(f"cannot read --answers {path}: {error.strerror}") from error
    found: dict[int, list[str]] = {}
    for number, line in enumerate(lines):
        try:
            value: Json = msgspec.json.decode(line)
        except UNREADABLE as error:
            raise ConfigError(f"--answers {path}: line {number + 1}: {error}") from error
        row, answer = number, value
        if isinstance(value, dict):
            row = value.get("row", number)
            answer = next((value[c] for c in _ANSWER_COLUMNS if c in value), None)
        if not isinstance(answer, str) or type(row) is not int:
            raise ConfigError(
                f"--answers {path}: line {number + 1}: expected text, or an object with "
                f"{' or '.join(_ANSWER_COLUMNS)} and perhaps row, got {line[:80]!r}"
            )
        found.setdefault(row, []).append(answer)
    return found


# ---- scoring -------------------------------------------------------------------


async def _score(
    settings: RewardSection, function: str, hide: Sequence[Path], samples: Sequence[_Sample]
) -> tuple[list[TestedAnswer], float]:
    """Return the scores of the answers, in order, and the seconds that it took."""
    pool = await RewardPool.start(settings, function=function, hide=hide)
    try:
        run_start_s = time.perf_counter()
        tested: list[TestedAnswer] = []
        # One group after the other, so that times mean something.
        for _, siblings in groupby(samples, key=lambda sample: sample[0].group_id):
            group = list(siblings)
            start_s = time.perf_counter()
            found: dict[int, TestedAnswer] = {}
            async for score in pool.score(group):
                _, transcript = group[score.sibling]
                found[score.sibling] = TestedAnswer(
                    row=transcript.prompt.row,
                    data_source=transcript.prompt.data_source,
                    answer=transcript.response,
                    reward=score.reward,
                    parts=score.parts,
                    unavailable=score.unavailable,
                    function=score.function,
                    version=score.version,
                    ms=1e3 * (time.perf_counter() - start_s),
                )
            tested += [found[item.sibling] for item, _ in group]
        return tested, time.perf_counter() - run_start_s
    finally:
        await pool.close()


# ---- printing ------------------------------------------------------------------


def _summary(tested: Sequence[TestedAnswer]) -> dict[str, Json]:
    rewards = [answer.reward for answer in tested if answer.reward is not None]
    functions = sorted({(answer.function, answer.version) for answer in tested})
    return {
        "count": len(tested),
        "mean": sum(rewards) / len(rewards) if rewards else None,
        "unavailable": dict(Counter(a.unavailable for a in tested if a.reward is None)),
        "functions": [{"name": name, "version": version} for name, version in functions],
    }


def _show(tested: Sequence[TestedAnswer], seconds: float, console: Console) -> None:
    table = RichTable()
    for title in ("row", "data source", "answer", "score", "parts", "ms"):
        table.add_column(title, justify="right" if title in {"row", "score", "ms"} else "left")
    for answer in tested:
        line = " ".join("".join(c if c.isprintable() else " " for c in answer.answer).split())
        if len(line) > _SHOWN_CHARACTERS:
            line = line[: _SHOWN_CHARACTERS - 3] + "..."
        score = "unavailable" if answer.reward is None else f"{answer.reward:g}"
        parts = ", ".join(f"{k} {v:g}" for k, v in answer.parts.items() if k != "score")
        table.add_row(
            str(answer.row),
            Text(answer.data_source),
            Text(line),
            Text(score, style="red" if answer.reward is None else ""),
            Text(parts or answer.unavailable),
            f"{answer.ms:.1f}",
        )
    console.print(table)
    summary = _summary(tested)
    mean = "-" if summary["mean"] is None else f"{summary['mean']:.3f}"
    num_failed = sum(summary["unavailable"].values())
    ms = 1e3 * seconds / len(tested)
    console.print(
        f"{len(tested)} answers, mean {mean}, {num_failed} unavailable, {ms:.1f} ms per answer"
    )
    for reason, count in summary["unavailable"].items():
        console.print(Text(f"unavailable {count} times: {reason}", style="red"), soft_wrap=True)
    for function in summary["functions"]:
        console.print(Text(f"{function['name']}, version {function['version']}"), soft_wrap=True)

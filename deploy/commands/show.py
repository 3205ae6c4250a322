"""`slipstream show`: read the policy's answers in a terminal."""

import argparse
import json
import re
import sys
from collections import deque
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rich.color import Color
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.style import Style
from rich.text import Text

from slipstream.deploy.commands.options import add_json, add_run, chosen_run
from slipstream.deploy.terminal.console import make_console
from slipstream.wire.errors import ConfigError, ImageError
from slipstream.wire.files.image_folder import ImageFolder
from slipstream.wire.files.run_folder import IMAGES, TRAINED, answers_files
from slipstream.wire.files.trained_parts import (
    TrajectoryPart,
    called_tools,
    excerpt,
    parts_of,
    versions_of,
)
from slipstream.wire.messages.images import is_digest
from slipstream.wire.models.pixels import BadImageError, thumbnail
from slipstream.wire.process.safe_text import visible

Row = dict[str, Any]
_MOST_PROMPT = 20_000  # characters
_MOST_PIXELS = 48  # pixels of a side of an image
_MOST_CONTEXT = 2_000  # characters of one piece of context
_REPLY = re.compile(r"^assistant: ", re.MULTILINE)  # start of a reply in the full text
_OTHER = re.compile(r"^(?:user|tool|system|developer|function): ", re.MULTILINE)
EXAMPLES = """examples:
  slipstream show                          the newest recorded trajectories of the newest run
  slipstream show runs/demo --last 3       the three newest of a run
  slipstream show runs/demo --eval         its answers in the newest evaluation
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    add_run(parser)
    parser.add_argument("--last", type=int, default=5, metavar="N", help="show at most N (5)")
    parser.add_argument(
        "--step", type=int, metavar="N", help="those of this learner step, or evaluation, alone"
    )
    parser.add_argument(
        "--group", type=int, metavar="N", help="those of this group, or evaluation problem, alone"
    )
    parser.add_argument(
        "--eval", action="store_true", help="answers to held-out problems, of the newest evaluation"
    )
    add_json(parser, "the whole rows, one a line, for programs")


def main(arguments: argparse.Namespace) -> int:
    """Print the newest recorded trajectories, or answers of the newest evaluation.

    Raises:
        ConfigError: nothing was recorded there.
    """
    run, console = chosen_run(arguments.folder), make_console()
    step, group = arguments.step, arguments.group
    if arguments.eval:
        found = answers_files(run)
        newest = max(found, default=0) if step is None else step
        if newest not in found:
            raise ConfigError(f"{run} holds no answers of an evaluation (eval.keep_answers)")
        path, panel = found[newest], _answer
    else:
        path, panel = run / TRAINED, _trajectory
    wanted: deque[Row] = deque(maxlen=arguments.last)
    try:
        lines = path.open()
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}; learner.rollouts_per_step records trajectories"
        ) from error
    with lines:
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ConfigError(f"row {number} of {path} is damaged: {error}") from error
            is_of_step = arguments.eval or step is None or row["step"] == step
            if is_of_step and (group is None or row.get("group_id", row.get("problem")) == group):
                wanted.append(row)
    if not wanted:
        raise ConfigError(f"{path} holds none of these")
    if arguments.json:
        sys.stdout.writelines(json.dumps(row) + "\n" for row in wanted)
        return 0
    for row in wanted:
        console.print(panel(row))
        for shown in _images(row, run / IMAGES, in_color=console.color_system is not None):
            console.print(shown, soft_wrap=True)
    console.print(f"{len(wanted)} of {path}", style="dim", soft_wrap=True)
    return 0


def _trajectory(row: Row) -> RenderableType:
    starts = [run["first_token"] for run in row["version_runs"]]
    ends = [*starts[1:], len(row["token_ids"])]
    turns = _turns_of(row)
    chosen = sum(count for _, count in turns) or ends[-1] - starts[0]
    runs = ", ".join(
        f"{run['version']}: {_chosen_within(turns, start, end)} tokens, "
        f"|difference| {difference:.2g}"
        for run, start, end, difference in zip(
            row["version_runs"], starts, ends, row["logprob_abs_diff_by_run"], strict=True
        )
    )
    largest = max((abs(value) for value in row["logprob_diffs"]), default=0.0)
    details = [
        ("reward", _reward(row)),
        ("ended by", _ended(row, chosen)),
        ("chosen by", runs),
        ("logprobs", f"largest |proximal - behavior| {largest:.2g} nats"),
    ]
    title = f"step {row['step']}, group {row['group_id']}, sibling {row['sibling']}"
    said = list(_recorded_turns(row)) if len(turns) > 1 else None
    return _panel(title, row, details, said)


def _answer(row: Row) -> RenderableType:
    details = [
        ("reward", _reward(row)),
        ("ground truth", visible(json.dumps(row["ground_truth"], ensure_ascii=False))),
        ("ended by", _ended(row, row["response_tokens"])),
        ("chosen by", ", ".join(dict.fromkeys(row["versions"]))),
    ]
    title = f"{row['data_source']}, problem {row['problem']}, sample {row['sample']}"
    said = list(_replies(row)) if len(row.get("replies", ())) > 1 else None
    return _panel(title, row, details, said)


def _reward(row: Row) -> str:
    parts = ", ".join(f"{name} {value:g}" for name, value in row["parts"].items())
    return f"{row['reward']:g}" + (f" ({parts})" if parts else "")


def _ended(row: Row, num_chosen: int) -> str:
    turns, branches = len(row.get("turns", ())), 1 + len(row.get("branches", ()))
    of = f" in {turns} turns" if turns > 1 else ""
    return f"{row['finish_reason']} after {num_chosen}{of}" + (
        f" and {branches} branches" if branches > 1 else ""
    )


def _turns_of(row: Row) -> list[tuple[int, int]]:
    """Return first token and number of tokens of each; none in a row of before there were turns."""
    return [(turn["first_token"], turn["num_tokens"]) for turn in row.get("turns", ())]


def _chosen_within(turns: list[tuple[int, int]], start: int, end: int) -> int:
    """Return how many tokens of turns there are between two tokens."""
    if not turns:
        return end - start
    return sum(max(0, min(first + n, end) - max(first, start)) for first, n in turns)


def _images(row: Row, folder: Path, *, in_color: bool) -> Iterator[Text]:
    """Yield each image of an answer: its file, and with colors a small copy of it."""
    images = ImageFolder(folder)
    for digest in dict.fromkeys(image["digest"] for image in row.get("images", ())):
        if not is_digest(digest):
            continue
        shown = Text().append(f"image {images.file_of(digest)}\n", style="dim")
        try:
            content = images.read(digest)
            colors = thumbnail(content, _MOST_PIXELS) if in_color else None
        except (ImageError, BadImageError, ConfigError) as error:  # also where there is no pillow
            yield Text(f"image {digest[:8]}: {visible(str(error))}\n", style="dim")
            continue
        if colors is not None:
            shown.append(_in_blocks(colors.tolist()))
        yield shown


def _in_blocks(rows: list[list[list[int]]]) -> Text:
    """Return an image of [rows, columns, 3] colors; each character is two pixels."""
    blank = [[0, 0, 0]] * len(rows[0])
    text = Text()
    for upper, lower in zip_longest(rows[::2], rows[1::2], fillvalue=blank):
        for above, below in zip(upper, lower, strict=True):
            text.append("▀", Style(color=Color.from_rgb(*above), bgcolor=Color.from_rgb(*below)))
        text.append("\n")
    return text


# ---- several turns -----------------------------------------------------------


def _recorded_turns(row: Row) -> Iterator[RenderableType]:
    """Yield each turn of a trained trajectory, and the context before it."""
    texts, first = row["token_texts"], row["num_prompt_tokens"]
    runs = [(run["first_token"], run["version"]) for run in row["version_runs"]]
    for part in parts_of(row["token_ids"], _turns_of(row), row["branches"]):
        own = texts[part.first_token - first : part.end - first]
        if part.turn:
            yield _head(row, part, versions_of(part, runs), "".join(own))
            yield Text(visible("".join(own)), style="bold")
            continue
        if part.branch:
            yield _branch(part.branch, part.num_shared, part.shared_with)
        yield _context("".join(own[part.num_shared :]))


def _replies(row: Row) -> Iterator[RenderableType]:
    """Yield each turn of an answer in an evaluation, which is recorded as text alone.

    The text between two replies is cut out of the full text. Where the full text has another number
    of replies, because the history was rewritten, it is shown whole before them.
    """
    between = _between(row["answer"], row["replies"])
    runs = [(run["first_token"], run["version"]) for run in row["version_runs"]]
    branches = {first: number for number, first in enumerate(row["branches"], start=2)}
    end = 0
    if between is None:
        yield _context(row["answer"])
    for number, (reply, (first, count)) in enumerate(
        zip(row["replies"], _turns_of(row), strict=True), start=1
    ):
        if end in branches:
            yield _branch(branches[end], 0, 0)
        before = between[number - 1].strip() if between else ""
        if before and number > 1:
            yield _context(before)
        end = first + count
        part = TrajectoryPart(first_token=first, end=end, turn=number)
        yield _head(row, part, versions_of(part, runs), reply)
        yield Text(visible(reply), style="bold")


def _between(whole: str, replies: list[str]) -> list[str] | None:
    """Return the text before each reply; None if there are not as many in the whole."""
    before, *said = _REPLY.split(whole)
    if len(said) != len(replies):
        return None
    found = [before]
    for text, reply in zip(said, replies, strict=True):
        after = _OTHER.search(text)  # a call of a tool is written otherwise than it was chosen
        rest = text[after.start() :] if after else ""
        found.append(text.removeprefix(reply) if text.startswith(reply) else rest)
    return found


def _head(row: Row, part: TrajectoryPart, versions: list[str], reply: str) -> Text:
    rewards, number = row.get("turn_rewards") or (), part.turn
    facts = [f"{part.end - part.first_token} tokens by {', '.join(versions)}"]
    if number <= len(rewards):
        facts.append(f"reward {rewards[number - 1]:g}")
    if calls := called_tools(reply):
        often = (f"{name} ({n} times)" if n > 1 else name for name, n in calls.items())
        facts.append(f"calls {visible(', '.join(often))}")
    head = Text(f"turn {number} of {len(row['turns'])}", style="bold cyan")
    return head.append(f"  {', '.join(facts)}", style="not bold dim")


def _branch(number: int, num_shared: int, shared_with: int) -> Text:
    text = f"branch {number} begins"
    if num_shared:
        text += f": its first {num_shared} tokens are those of branch {shared_with}"
    return Text(text, style="bold magenta")


def _context(text: str) -> RenderableType:
    return Padding(_excerpt(text, _MOST_CONTEXT, style="yellow"), (0, 0, 0, 4))


def _excerpt(text: str, most_characters: int, *, style: str = "") -> Text:
    """Return a text, without its middle if it is too long."""
    part = excerpt(text, most_characters)
    shown = Text(visible(part.head), style=style)
    if part.num_cut:
        shown.append(f"\n[{part.num_cut:,} characters are left out]\n", style="dim")
        shown.append(visible(part.tail))
    return shown


def _panel(
    title: str, row: Row, details: list[tuple[str, str]], turns: list[RenderableType] | None
) -> RenderableType:
    """Return one answer; ``turns`` are drawn in its place if it has several."""
    lines = Text()
    for name, value in details:
        lines.append(f"{name} ", style="dim")
        lines.append(f"{value}\n")
    lines.rstrip()
    asked = _excerpt(row["prompt"], _MOST_PROMPT)
    answer = [Text("answer", style="dim"), Text(visible(row["answer"]), style="bold")]
    body = [Text("prompt", style="dim"), asked, Text(), *(turns or answer), Text(), lines]
    return Panel(Group(*body), title=Text(visible(title)), title_align="left")

"""`slipstream show`: read the policy's answers in a terminal."""

import argparse
import json
from collections import deque
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from slipstream.deploy.terminal.console import make_console
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.run_folder import TRAINED, answers_files
from slipstream.wire.process.visible import visible

Row = dict[str, Any]
EXAMPLES = """examples:
  slipstream show runs/demo --last 3       the newest recorded trajectories
  slipstream show runs/demo --eval         its answers in the newest evaluation
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument("folder", type=Path, metavar="runs/NAME")
    parser.add_argument("--last", type=int, default=5, metavar="N", help="at most N (5)")
    parser.add_argument("--step", type=int, help="of this learner step or evaluation")
    parser.add_argument("--group", type=int, help="of this group, or evaluation problem")
    parser.add_argument("--eval", action="store_true", help="answers to held-out problems")


def main(arguments: argparse.Namespace) -> int:
    """Run the command."""
    return show(
        arguments.folder,
        make_console(),
        count=arguments.last,
        step=arguments.step,
        group=arguments.group,
        evaluation=arguments.eval,
    )


def show(
    run: Path,
    console: Console,
    *,
    count: int,
    step: int | None = None,
    group: int | None = None,
    evaluation: bool = False,
) -> int:
    """Print the newest recorded trajectories, or answers of the newest evaluation.

    At most ``count`` are printed, if asked for only those of a learner step (or evaluation) and
    of a group; ``evaluation`` shows answers to held-out problems instead.

    Raises:
        ConfigError: nothing was recorded there.
    """
    if evaluation:
        found = answers_files(run)
        newest = max(found, default=0) if step is None else step
        if newest not in found:
            raise ConfigError(f"{run} holds no answers of an evaluation (eval.keep_answers)")
        path, panel = found[newest], _answer
    else:
        path, panel = run / TRAINED, _trajectory
    wanted: deque[Row] = deque(maxlen=count)
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
            is_of_step = evaluation or step is None or row["step"] == step
            if is_of_step and (group is None or row.get("group_id", row.get("problem")) == group):
                wanted.append(row)
    if not wanted:
        raise ConfigError(f"{path} holds none of these")
    for row in wanted:
        console.print(panel(row))
    console.print(f"{len(wanted)} of {path}", style="dim", soft_wrap=True)
    return 0


def _trajectory(row: Row) -> RenderableType:
    starts = [run["first_token"] for run in row["version_runs"]]
    ends = [*starts[1:], len(row["token_ids"])]
    runs = ", ".join(
        f"{run['version']}: {end - run['first_token']} tokens, |difference| {difference:.2g}"
        for run, end, difference in zip(
            row["version_runs"], ends, row["logprob_abs_diff_by_run"], strict=True
        )
    )
    largest = max((abs(value) for value in row["logprob_diffs"]), default=0.0)
    details = [
        ("reward", _reward(row)),
        ("ended by", f"{row['finish_reason']} after {ends[-1] - starts[0]}"),
        ("chosen by", runs),
        ("logprobs", f"largest |proximal - behavior| {largest:.2g} nats"),
    ]
    title = f"step {row['step']}, group {row['group_id']}, sibling {row['sibling']}"
    return _panel(title, row["prompt"], row["answer"], details)


def _answer(row: Row) -> RenderableType:
    details = [
        ("reward", _reward(row)),
        ("ground truth", visible(json.dumps(row["ground_truth"], ensure_ascii=False))),
        ("ended by", f"{row['finish_reason']} after {row['response_tokens']}"),
        ("chosen by", ", ".join(row["versions"])),
    ]
    title = f"{row['data_source']}, problem {row['problem']}, sample {row['sample']}"
    return _panel(title, row["prompt"], row["answer"], details)


def _reward(row: Row) -> str:
    parts = ", ".join(f"{name} {value:g}" for name, value in row["parts"].items())
    return f"{row['reward']:g}" + (f" ({parts})" if parts else "")


def _panel(title: str, prompt: str, answer: str, details: list[tuple[str, str]]) -> RenderableType:
    lines = Text()
    for name, value in details:
        lines.append(f"{name} ", style="dim")
        lines.append(f"{value}\n")
    lines.rstrip()
    body = [
        *(Text("prompt", style="dim"), Text(visible(prompt)), Text()),
        *(Text("answer", style="dim"), Text(visible(answer), style="bold"), Text()),
    ]
    return Panel(Group(*body, lines), title=Text(visible(title)), title_align="left")

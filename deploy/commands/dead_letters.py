"""`slipstream dead-letters`: list, show, retry or drop groups not answered or scored."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table as RichTable
from rich.text import Text

from slipstream.deploy.commands.options import add_json, chosen_run
from slipstream.deploy.launch.observer import ask_broker
from slipstream.deploy.terminal.console import make_console
from slipstream.deploy.terminal.observe import run_of_folder
from slipstream.wire.errors import ConfigError, PeerLostError
from slipstream.wire.files.run_folder import DEAD_LETTERS
from slipstream.wire.messages.broker import (
    DeadLetters,
    DeadLettersHandled,
    DropDeadLetters,
    GetDeadLetters,
    RetryDeadLetters,
)
from slipstream.wire.messages.dead_letters import DeadLetter
from slipstream.wire.process.command_line import print_json
from slipstream.wire.settings.sections import RunSection
from slipstream.wire.unreadable import UNREADABLE

_SHOWN = 60  # characters of a text in a table
EXAMPLES = """examples:
  slipstream dead-letters list                   of the newest run
  slipstream dead-letters show g17               its prompt, its answers and why they have no reward
  slipstream dead-letters retry all              issue the prompts again, as new items
  slipstream dead-letters drop g17 g21           remove them
  slipstream dead-letters show g17 runs/demo     of another run
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument(
        "action",
        choices=("list", "show", "retry", "drop"),
        help="list: one line of each; show: all about some; retry: issue their prompts again, as "
        "new items; drop: remove them",
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="GROUP|all|RUN",
        help="groups, as g17 or 17, or all; and a run folder, default: the newest one in runs/",
    )
    parser.add_argument("--run", type=Path, metavar="RUN", help="the same as RUN among the words")
    add_json(parser)


def main(arguments: argparse.Namespace) -> int:
    """List, show, retry or drop dead letters of a run; the latter two while it is running."""
    action, as_json = arguments.action, arguments.json
    words, folder = split_words(arguments.words, arguments.run)
    run = run_of_folder(chosen_run(folder))
    console = make_console()
    if action == "list":
        letters, forgotten = _all(run)
        if as_json:
            return print_json({"letters": letters, "forgotten": forgotten})
        _list(letters, forgotten, console)
        return 0
    letters = _chosen(run, words, action)
    if action == "show":
        if as_json:
            return print_json(letters)
        for letter in letters:
            console.print(_shown(letter))
        return 0
    groups = tuple(letter.group_id for letter in letters)
    request = (
        RetryDeadLetters(groups=groups) if action == "retry" else DropDeadLetters(groups=groups)
    )
    handled = ask_broker(run, request, DeadLettersHandled, role="operator")
    if as_json:
        print_json(handled)
    else:
        for group, new in handled.done.items():
            what = "dropped" if new < 0 else f"issued again as g{new}"
            console.print(f"g{group}: {what}")
        for group, reason in handled.refused.items():
            console.print(f"g{group}: refused: {reason}", style="red")
    return 1 if handled.refused else 0


def split_words(words: Sequence[str], run: Path | None) -> tuple[list[str], Path | None]:
    """Return the groups among some words, and the run: the word that names a folder, else ``run``.

    Raises:
        ConfigError: there is more than one run.
    """
    groups = [word for word in words if word == "all" or word.removeprefix("g").isdecimal()]
    folders = [Path(word) for word in words if word not in groups]
    runs = [*folders, *([run] if run is not None else [])]
    if len(runs) > 1:
        raise ConfigError(f"dead letters are of one run, got {', '.join(map(str, runs))}")
    return groups, runs[0] if runs else None


def _list(letters: Sequence[DeadLetter], forgotten: int, console: Console) -> None:
    """Print a line of each dead letter."""
    if not letters:
        console.print("no dead letters")
        return
    table = RichTable("group", "row", "data source", "reason", "prompt", "last failure")
    for letter in letters:
        last = letter.failures[-1].reason if letter.failures else ""
        row = letter.prompt.row if letter.prompt.row >= 0 else letter.position
        texts = (letter.prompt.data_source, letter.reason, letter.prompt.text, last)
        retry = f" (retry of g{letter.retry_of})" if letter.retry_of >= 0 else ""
        lines = (" ".join(text.split()) for text in texts)
        short = (line if len(line) <= _SHOWN else line[: _SHOWN - 3] + "..." for line in lines)
        table.add_row(f"g{letter.group_id}{retry}", str(row), *map(Text, short))
    console.print(table)
    if forgotten:
        console.print(f"{forgotten} older ones were removed: their number is bounded")
    console.print("slipstream dead-letters show|retry|drop GROUP|all")


def _all(run: RunSection) -> tuple[list[DeadLetter], int]:
    """Return every dead letter, and how many older ones were forgotten.

    Of a run without a broker they are those that its broker wrote last.
    """
    letters: list[DeadLetter] = []
    while True:
        after = letters[-1].group_id if letters else -1
        try:
            page = ask_broker(run, GetDeadLetters(after=after), DeadLetters)
        except PeerLostError:
            if letters:
                raise
            page = written_letters(run)
        letters += page.letters
        if not page.letters or len(letters) >= page.total:
            return letters, page.forgotten


def written_letters(run: RunSection) -> DeadLetters:
    """Return the dead letters in a run folder; without a file there were none.

    Raises:
        ConfigError: it cannot be read.
    """
    path = run.folder / DEAD_LETTERS
    try:
        return msgspec.json.decode(path.read_bytes(), type=DeadLetters)
    except FileNotFoundError:
        return DeadLetters(letters=(), total=0, forgotten=0)
    except (OSError, *UNREADABLE) as error:
        raise ConfigError(f"the dead letters in {path} cannot be read: {error}") from error


def _chosen(run: RunSection, words: Sequence[str], action: str) -> list[DeadLetter]:
    if not words:
        raise ConfigError(f"slipstream dead-letters {action} GROUP...: give groups, or all")
    letters, _ = _all(run)
    if list(words) == ["all"]:
        return letters
    by_group = {letter.group_id: letter for letter in letters}
    chosen = []
    for word in words:
        number = word.removeprefix("g")
        if not number.isdecimal():
            raise ConfigError(f"{word!r} is not a group: give g17, 17, or all")
        if int(number) not in by_group:
            raise ConfigError(
                f"there is no dead letter g{number}; see slipstream dead-letters list"
            )
        chosen.append(by_group[int(number)])
    return chosen


def _shown(letter: DeadLetter) -> Panel:
    """Return all facts about one; a model's output is shown as text, never as markup."""
    table = RichTable("answer", "tried by", "function", "outcome", "start of answer")
    for failure in letter.failures:
        table.add_row(
            "all missing" if failure.sibling < 0 else str(failure.sibling),
            Text(failure.by),
            Text(f"{failure.function} {failure.version}".strip()),
            Text(failure.reason),
            Text(failure.excerpt),
        )
    head = Text(
        f"{letter.reason} after learner step {letter.step}; {letter.item} prompt at position "
        f"{letter.position} of {letter.prompt.data_source}\n\n{letter.prompt.text}\n\n"
        f"ground truth: {letter.prompt.ground_truth}"
    )
    return Panel(Group(head, table), title=f"g{letter.group_id}", title_align="left")

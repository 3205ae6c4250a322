"""Guides that are run: the blocks of a page of docs/, followed as printed.

A block of ```bash is commands, run in order in one shell. A block of another language, whose line
before it ends with the name of a file (``... `sums.py`:``), is that file; after "add to" it goes to
the file's end. Any other block is shown only.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from tests.support.waiting import HANG_S

_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)$")
_HEADING = re.compile(r"^(#+) (.+)$")
_FILE = re.compile(r"`([\w./-]+\.\w+)`")
_ADDED = re.compile(r"\badd to `", re.IGNORECASE)
_MARK = "=== step"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_LONGEST_S = 5 * HANG_S


@dataclass(frozen=True)
class Block:
    """A fenced block, and where it stands."""

    language: str
    text: str
    before: str = ""  # the last line above it that is not blank; none where that ends a block
    heading: str = ""


@dataclass(frozen=True)
class Step:
    """What a reader does with a block."""

    text: str
    heading: str = ""
    file: str = ""  # to write; without one the text is commands
    is_added: bool = False  # at the file's end


class GuideFailedError(Exception):
    """A command of a guide failed; the message has its step and what was printed."""


def blocks(page: Path, heading: str = "") -> list[Block]:
    """Return the blocks of a section with its subsections, or of the whole page, in order.

    Raises:
        ValueError: the page has no such section.
    """
    found: list[Block] = []
    level = 0 if not heading else -1  # of the section; -1 before it
    last, under = "", ""
    lines = iter(page.read_text("utf-8").splitlines())
    for line in lines:
        title, fence = _HEADING.match(line), _FENCE.match(line)
        if title is not None:
            under = title[2]
            if level > 0 and len(title[1]) <= level:
                break
            if under == heading:
                level = len(title[1])
        if fence is not None:
            end = f"{fence['indent']}```"
            body = "".join(f"{inner}\n" for inner in iter(lines.__next__, end))
            if level >= 0:
                found.append(Block(fence["language"], textwrap.dedent(body), last, under))
            last = ""
        elif line.strip():
            last = line.strip()
    if level < 0:
        raise ValueError(f"{page.name} has no section {heading!r}")
    return found


def fences(page: Path, heading: str) -> list[tuple[str, str]]:
    """Return (language, text) of the blocks of a section that have a language."""
    return [(block.language, block.text) for block in blocks(page, heading) if block.language]


def steps(parts: Iterable[Block]) -> list[Step]:
    """Return what a reader does with the blocks; those that are shown only are left out."""
    found: list[Step] = []
    for block in parts:
        names = _FILE.findall(block.before) if block.before.endswith(":") else []
        if block.language == "bash":
            found.append(Step(block.text, block.heading))
        elif block.language and names:
            is_added = _ADDED.search(block.before) is not None
            found.append(Step(block.text, block.heading, names[-1], is_added))
    return found


def before_command(words: str, all_steps: Sequence[Step]) -> list[Step]:
    """Return the steps above the first commands with these words.

    Raises:
        ValueError: no command has them.
    """
    first = list(takewhile(lambda step: step.file or words not in step.text, all_steps))
    if len(first) == len(all_steps):
        raise ValueError(f"no command of the guide has {words!r}")
    return first


def script(all_steps: Sequence[Step]) -> str:
    """Return the steps as one bash script, which ends at the first command that fails."""
    lines = ["set -eo pipefail"]
    for number, step in enumerate(all_steps):
        lines.append(f"echo {shlex.quote(f'{_MARK} {number}')}")
        if step.file:
            to = ">>" if step.is_added else ">"
            lines.append(f"cat {to} {shlex.quote(step.file)} <<'END OF {step.file}'")
            lines.append(f"{step.text}END OF {step.file}")
        else:
            lines.append(step.text.rstrip("\n"))
    return "\n".join(lines) + "\n"


def outputs(printed: str) -> list[str]:
    """Return what each step of a script printed."""
    return re.split(rf"^{_MARK} \d+\n", printed, flags=re.MULTILINE)[1:]


def follow(all_steps: Sequence[Step], home: Path) -> list[str]:
    """Do what a guide says, as a user with an empty home and a checkout in which setup is done.

    Args:
        all_steps: in order; the first shell command runs in the checkout.
        home: an empty folder; the checkout is ``home/slipstream``, with this Python as ``.venv``.

    Returns:
        What each step printed.

    Raises:
        GuideFailedError: a command did not end with 0.
    """
    checkout = home / "slipstream"
    checkout.mkdir(parents=True, exist_ok=True)
    if not (checkout / ".venv").exists():
        (checkout / ".venv").symlink_to(sys.prefix)
    log = home / "guide.log"
    with log.open("wb") as output:
        shell = subprocess.Popen(
            ["bash", "-c", script(all_steps)],
            cwd=checkout,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={"PATH": _PATH, "HOME": str(home), "COLUMNS": "200", "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        try:
            shell.wait(_LONGEST_S)
        finally:
            if shell.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(shell.pid, signal.SIGTERM)
                shell.wait(HANG_S)
    printed = log.read_text(errors="replace")
    if shell.returncode != 0:
        at = all_steps[len(outputs(printed)) - 1]
        raise GuideFailedError(
            f"{at.heading}: exit code {shell.returncode} of\n{at.text}\n{printed}"
        )
    return outputs(printed)

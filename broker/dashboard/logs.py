"""The newest lines of each process's log, from the run folder, bounded for a browser."""

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

LOGS = Path("logs")
MAX_LOGS = 64  # the newest
MAX_LINES = 30  # newest lines of each log
MAX_CHARS = 400  # characters of a line
_READ_BYTES = 32 * 1024
_UNSEEN = "\N{REPLACEMENT CHARACTER}"  # in place of what controls a terminal or turns text around


class LogTail(msgspec.Struct, frozen=True, kw_only=True):
    """The end of one log."""

    name: str  # name of the process
    written_s: float  # unix time
    lines: list[str]  # the newest last


def newest_lines(run_folder: Path) -> list[LogTail]:
    """Return the end of each log of a run on this host, in the order of their names."""
    found = sorted(_logs(run_folder / LOGS), key=lambda log: log[1], reverse=True)[:MAX_LOGS]
    return [
        LogTail(name=path.stem, written_s=written_s, lines=lines_of(_end_of(path)))
        for path, written_s in sorted(found)
    ]


def lines_of(data: bytes) -> list[str]:
    """Return the last lines of a log's end as plain text, each cut to what is shown."""
    lines = data.decode(errors="replace").splitlines()[-MAX_LINES:]
    return [_plain(line[: MAX_CHARS + 1]) for line in lines]


def _plain(line: str) -> str:
    cut = line if len(line) <= MAX_CHARS else f"{line[:MAX_CHARS]}..."
    return "".join(char if char.isprintable() or char == "\t" else _UNSEEN for char in cut)


def _logs(folder: Path) -> Iterator[tuple[Path, float]]:
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    for entry in entries:
        if entry.name.endswith(".log") and entry.is_file(follow_symlinks=False):
            yield Path(entry.path), entry.stat(follow_symlinks=False).st_mtime


def _end_of(path: Path) -> bytes:
    """Return the last bytes of a file, from the start of a line on."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            start = max(0, size - _READ_BYTES)
            file.seek(start)
            data = file.read(_READ_BYTES)
    except OSError:
        return b""
    return data.partition(b"\n")[2] if start else data

"""rollouts/trained.jsonl: one JSON object per line, each with the learner step that trained it."""

import shutil
import sys
from pathlib import Path

import msgspec

from slipstream.wire.files.replace import replacing_file
from slipstream.wire.unreadable import UNREADABLE


class _Row(msgspec.Struct, frozen=True):
    """The step of a row, without decoding the rest."""

    step: int


_decoder = msgspec.json.Decoder(_Row)


def cut_rows_from(path: Path, step: int) -> None:
    """Remove the rows of this step and later ones, in one rename.

    A row that a killed writer left half written goes with them.
    """
    if not path.is_file():
        return
    with path.open("rb") as rows, replacing_file(path, durable=False) as kept:
        kept.writelines(row for row in rows if _step_of(row) < step)


def keep_newest_rows(path: Path, max_bytes: int) -> None:
    """Remove the oldest rows until at most ``max_bytes`` are left, in one rename."""
    if not path.is_file():
        return
    with path.open("rb") as rows, replacing_file(path, durable=False) as kept:
        begin = max(0, path.stat().st_size - max_bytes)
        if begin:
            rows.seek(begin - 1)
            rows.readline()  # skips to the start of a row
        shutil.copyfileobj(rows, kept)


def _step_of(row: bytes) -> int:
    """Return the step of a row, a very late one if the row is not whole."""
    try:
        return _decoder.decode(row).step if row.endswith(b"\n") else sys.maxsize
    except UNREADABLE:
        return sys.maxsize

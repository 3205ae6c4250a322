"""Rotates logs that have grown large."""

import os
import shutil
from pathlib import Path


def rotate(folder: Path, *, max_bytes: int, keep: int) -> list[Path]:
    """Move logs larger than ``max_bytes`` to LOG.1; return their paths.

    Processes keep writing to the same file, in append mode: a log is copied, then cut. Text written
    in the microseconds between the two is lost.

    Args:
        folder: Folder of ``*.log``.
        max_bytes: Size limit; 0 rotates nothing.
        keep: Number of older parts of each log; LOG.1 is the newest.
    """
    if not max_bytes:
        return []
    large = [path for path in folder.glob("*.log") if path.stat().st_size > max_bytes]
    for path in large:
        parts = [path.with_name(f"{path.name}.{number}") for number in range(1, keep + 1)]
        for older, newer in zip(reversed(parts), reversed(parts[:-1]), strict=False):
            if newer.exists():
                newer.replace(older)
        with path.open("rb") as log, parts[0].open("wb") as part:
            shutil.copyfileobj(log, part)
            os.truncate(path, 0)
    return large

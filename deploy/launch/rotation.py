"""Begins logs anew that have grown large."""

import os
import shutil
from pathlib import Path


def rotate(folder: Path, *, max_bytes: int, keep: int) -> list[Path]:
    """Move what is in logs larger than ``max_bytes`` to LOG.1; return these.

    Processes go on writing where they did: a log is copied, then cut, and they append to it. Of
    what is written between the two, microseconds, nothing is kept.

    Args:
        folder: of ``*.log``.
        max_bytes: 0 leaves all as they are.
        keep: older parts of each log, LOG.1 the newest.
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

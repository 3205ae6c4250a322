"""Rotates logs that have grown large."""

import os
import shutil
from pathlib import Path

from slipstream.wire.settings.sections import LoggingSection


def rotate(folder: Path, logging: LoggingSection) -> list[Path]:
    """Move logs that are larger than allowed to LOG.1; return their paths.

    Processes keep writing to the same file, in append mode: a log is copied, then cut. Text written
    in the microseconds between the two is lost.
    """
    if not logging.rotate_mb:
        return []
    max_bytes = logging.rotate_mb << 20
    large = [path for path in folder.glob("*.log") if path.stat().st_size > max_bytes]
    for path in large:
        parts = [path.with_name(f"{path.name}.{n + 1}") for n in range(logging.keep_logs)]
        for older, newer in zip(reversed(parts), reversed(parts[:-1]), strict=False):
            if newer.exists():
                newer.replace(older)
        with path.open("rb") as log, parts[0].open("wb") as part:
            shutil.copyfileobj(log, part)
            os.truncate(path, 0)
    return large

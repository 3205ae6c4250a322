"""Files that are whole and on disk once a call returns."""

import os
from pathlib import Path


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file in one rename; whoever reads it sees the old bytes or the new ones."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    with unfinished.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Put a file, or the names in a folder, on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""What all chaos runs need."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def folder() -> Iterator[Path]:
    """A private folder with a path short enough for Unix sockets."""
    with tempfile.TemporaryDirectory(prefix="c-", dir="/tmp") as path:
        yield Path(path)

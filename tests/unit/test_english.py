"""Habits of names and comments that are counted."""

from collections import Counter
from pathlib import Path

import pytest

from tests import english

MODULE = '''"""Answer whoever came, and go on beside it."""

# Of two lines, which are
# of one comment.
LIMIT = 3  # bytes


def sizes(rows):  # for readers
    """Return the sizes.

    Args:
        rows: of a file.
        limit: Bytes of a row.
    """
    return [size for one in rows for size in one]
'''


def test_beginnings_loop_names_and_phrases_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(english, "ROOT", tmp_path)
    (tmp_path / "sizes.py").write_text(MODULE)
    counts = Counter(habit.kind for habit in english.habits_of(tmp_path / "sizes.py"))
    assert counts == {"comments": 2, "arguments": 1, "loops": 1, "phrases": 2}

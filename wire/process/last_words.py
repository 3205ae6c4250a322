"""The last line of a role, kept in memory for its parent: its log may be on a full disk.

A role's log also holds its libraries' output at exit, after the line that counts.
"""

import os
from contextlib import suppress
from pathlib import Path

LAST_WORDS_VARIABLE = "SLIPSTREAM_LAST_WORDS"  # descriptor of the memory, only for the role
_NAME = "slipstream-last-words"
_MOST_BYTES = 16 << 10
_mine: list[int] = []  # descriptor from this process's parent, if any


class LastWords:
    """The parent's end: memory that one child inherits."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create(_NAME)  # the child opens its copy by ``pass_fds``

    def read(self) -> str:
        """Return the child's message; empty if it left no message."""
        return os.pread(self.descriptor, _MOST_BYTES, 0).decode(errors="replace").strip()

    def close(self) -> None:
        """Release the memory."""
        os.close(self.descriptor)


def keep_last_words_from_children() -> None:
    """Call at a role's start: hide the descriptor and its number from its children."""
    descriptor = _inherited(os.environ.pop(LAST_WORDS_VARIABLE, ""))  # noqa: TID251 from our parent
    if descriptor is not None:
        os.set_inheritable(descriptor, False)
        _mine[:] = [descriptor]


def leave_last_words(text: str) -> None:
    """Tell the parent why this process ends, if the parent wants to know."""
    keep_last_words_from_children()
    for descriptor in _mine:
        with suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, text.encode(errors="replace")[:_MOST_BYTES], 0)


def _inherited(number: str) -> int | None:
    """Return the descriptor with that number; None if missing or now used by another file."""
    with suppress(OSError, ValueError):
        memory = Path(f"/proc/self/fd/{int(number)}").readlink()
        if str(memory).startswith(f"/memfd:{_NAME}"):
            return int(number)
    return None

"""The line a role ends with, kept in memory for its parent: its log may be on a disk that is full.

A role's log also holds its libraries' output at exit, after the line that counts.
"""

import os
from contextlib import suppress
from pathlib import Path

LAST_WORDS_VARIABLE = (
    "SLIPSTREAM_LAST_WORDS"  # descriptor of the memory; a role's children have none
)
_NAME = "slipstream-last-words"
_MOST_BYTES = 16 << 10


class LastWords:
    """The parent's end: memory that one child inherits."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create(_NAME)  # the child's copy is opened by ``pass_fds``

    def read(self) -> str:
        """Return the child's message, or nothing."""
        return os.pread(self.descriptor, _MOST_BYTES, 0).decode(errors="replace").strip()

    def close(self) -> None:
        """Release the memory."""
        os.close(self.descriptor)


def leave_last_words(text: str) -> None:
    """Report the reason for this process's end to its parent, if it listens."""
    with suppress(OSError, ValueError):  # no parent reads it, or the descriptor is another's by now
        descriptor = int(os.environ.get(LAST_WORDS_VARIABLE, ""))  # noqa: TID251 from our parent
        memory = Path(f"/proc/self/fd/{descriptor}").readlink()
        if str(memory).startswith(f"/memfd:{_NAME}"):
            os.pwrite(descriptor, text.encode()[:_MOST_BYTES], 0)

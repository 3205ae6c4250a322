"""The lock of a run's only relay."""

import fcntl
import logging
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from slipstream.wire.errors import ConfigError
from slipstream.wire.process.patience import END_AT_MOST, Patience, signs_of

_log = logging.getLogger(__name__)
_POLL_S = 0.1
_SILENT_S = 2.0  # a relay that holds the lock this long without a sign of life is killed
_END_S = 30.0


@contextmanager
def only_relay(path: Path) -> Iterator[None]:
    """Hold the lock; a holder that hangs is killed.

    Raises:
        ConfigError: another relay holds the lock and does not end.
    """

    def holder() -> list[int]:
        words = path.read_text().strip()
        return [int(words)] if words.isdecimal() else []

    with path.open("a+") as file:
        waited = Patience(
            "the previous relay to end", _SILENT_S, signs_of(holder), at_most=END_AT_MOST
        )
        killed: Patience | None = None
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if killed is None and waited.is_over():
                for pid in holder():
                    _log.warning("killing relay %d of this run, which hangs", pid)
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                killed = Patience("the previous relay to be gone", _END_S)
            if killed is not None and killed.is_over():
                raise ConfigError(f"another relay of this run holds {path}")
            time.sleep(_POLL_S)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield

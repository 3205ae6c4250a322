"""The relay's process, started by this learner or left by an earlier one."""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from slipstream.weightbus.net.interfaces import RELAY_ENVIRONMENT
from slipstream.wire.errors import ChildDiedError

_log = logging.getLogger(__name__)
_PROGRAM = "slipstream.weightbus.relay.main"
_DIGEST = "--settings-digest"
_MAX_STARTS = 5
_WINDOW_S = 120.0


@dataclass(frozen=True, slots=True)
class RelayLaunch:
    """Start parameters of a relay.

    ``lifeline`` is a descriptor whose end of file ends the relay; without one, the relay ends by
    itself some time after the learner.
    """

    settings: Sequence[str] = ()  # arguments from settings_arguments
    lifeline: int | None = None
    digest: str = ""  # digest of the relay's settings; empty: a found relay's are unknown
    part: int = 0  # number of this host of the learner; above 0 the relay is a part
    parts: int = 1  # hosts that keep tensors
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ), repr=False)  # noqa: TID251 handed on to a child
    """Environment from before this process chose interfaces for its own groups."""


class RelayProcess:
    """The relay that answered last, and the one started here."""

    def __init__(
        self, launch: RelayLaunch, popen: Callable[..., "subprocess.Popen[bytes]"] | None = None
    ) -> None:
        self._launch = launch
        self._popen = popen or subprocess.Popen
        self._started: subprocess.Popen[bytes] | None = None  # relay that we started last
        self._starts: list[float] = []  # monotonic seconds of starts in the last minutes
        self.pid = 0  # relay that answered last; a former learner may have started it

    def start(self) -> "subprocess.Popen[bytes]":
        """Start a relay in place of every other known one.

        Raises:
            ChildDiedError: it dies again and again.
        """
        self.kill()
        now = time.monotonic()
        self._starts = [at for at in self._starts if at > now - _WINDOW_S] + [now]
        if len(self._starts) > _MAX_STARTS:
            raise ChildDiedError(
                f"the weight relay ended {_MAX_STARTS} times in {_WINDOW_S:g} s; its reason "
                "is above in this log"
            )
        launch = self._launch
        extra = [] if launch.lifeline is None else ["--lifeline", str(launch.lifeline)]
        if launch.digest:
            extra += [_DIGEST, launch.digest]
        if launch.parts > 1:
            extra += ["--part", str(launch.part), "--parts", str(launch.parts)]
        self._started = self._popen(  # our own program; starting it is fast
            [sys.executable, "-m", _PROGRAM, *launch.settings, *extra],
            stdin=subprocess.DEVNULL,
            env={**launch.environment, **RELAY_ENVIRONMENT},
            pass_fds=[] if launch.lifeline is None else [launch.lifeline],
            start_new_session=True,
        )
        _log.info("the weight relay is process %d", self._started.pid)
        return self._started

    def kill_surplus(self) -> None:
        """End the relay started here if a former learner's relay serves."""
        if self._started is not None and self._started.pid != self.pid:
            self._kill_started()

    @property
    def has_our_settings(self) -> bool:
        """True unless the relay that answered last was started with other settings."""
        wanted = self._launch.digest
        words = command_line_of(self.pid)
        return not wanted or not words or wanted in words

    def has_ended(self, pid: int) -> bool:
        """Return True if no relay of this process id is running; reaps one started here."""
        if self._started is not None:
            self._started.poll()
        return not is_relay(pid)

    def kill(self) -> None:
        """End every known relay."""
        self._kill_started()
        if self.pid and is_relay(self.pid):
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self.pid = 0

    def _kill_started(self) -> None:
        if self._started is not None:
            self._started.kill()
            self._started.wait()
            self._started = None


def is_relay(pid: int) -> bool:
    """Return True if a process is a running relay."""
    return _PROGRAM in command_line_of(pid)


def command_line_of(pid: int) -> list[str]:
    """Return the words of a process's command line; empty without such a process."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []

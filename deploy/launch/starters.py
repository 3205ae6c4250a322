"""How a role becomes a process: on this host, or by another class on a host of a cluster."""

import logging
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from slipstream.deploy.launch.plan import RolePlan
from slipstream.generators.sglang.process import remove_leftovers
from slipstream.wire.process.last_words import LAST_WORDS_VARIABLE, LastWords
from slipstream.wire.process.patience import Signs, signs_of
from slipstream.wire.process.processes import LIFELINE_VARIABLE, bound_to_me

_log = logging.getLogger(__name__)


class RoleProcess(Protocol):
    """One process of a role, on any host. No method waits."""

    ended_because: str
    """Known cause of its end, in addition to the exit code; empty if unknown."""

    def poll(self) -> int | None:
        """Return the exit code; None while the process runs (-N if signal N killed it)."""

    def send_signal(self, signum: int, /) -> None:
        """Send a signal, unless the process has ended."""

    def signs(self) -> Signs:
        """Return the signs of life."""

    def last_words(self) -> str:
        """Return the last line of the process; empty if unknown."""

    def release(self) -> None:
        """Remove what this host keeps of the process, which has ended."""


class LocalProcess(subprocess.Popen[bytes]):
    """A process of a role on this host; the kernel kills it when this process ends."""

    ended_because = ""

    def __init__(
        self,
        plan: RolePlan,
        arguments: Sequence[str],
        log_file: Path,
        *,
        scratch: Path,  # TMPDIR of the process
        lifeline: int,  # descriptor whose end ends what outlives the role
        folder: Path | None,  # working folder; None for this process's
    ) -> None:
        """Start the process with additional arguments; append its output to the log."""
        self._leftovers = (scratch, f"{plan.name}-*")
        self._log_file = log_file
        self._words: LastWords | None = (words := LastWords())
        inherited = dict(os.environ)  # noqa: TID251 handed on to children
        with log_file.open("ab") as log:
            super().__init__(
                [*plan.command, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={
                    **inherited,
                    "TMPDIR": str(scratch),
                    LIFELINE_VARIABLE: str(lifeline),
                    **plan.environment,
                    LAST_WORDS_VARIABLE: str(words.descriptor),
                },
                preexec_fn=bound_to_me(plan.cores),
                process_group=0,
                pass_fds=[lifeline, words.descriptor],
                cwd=folder,
            )
        _log.info("%s is process %d", plan.name, self.pid)

    def signs(self) -> Signs:
        """Return the signs of life, including all descendants."""
        return signs_of(lambda: [self.pid], self._log_file)()

    def last_words(self) -> str:
        """Return the last line of the process; empty if unknown."""
        return self._words.read() if self._words is not None else ""

    def release(self) -> None:
        """Release the memory of the last line, and remove what a killed process left."""
        if self._words is not None:
            self._words.close()
            self._words = None
        scratch, pattern = self._leftovers
        for path in scratch.glob(pattern):
            remove_leftovers(path)


@dataclass(slots=True)
class LocalStarter:
    """Starts processes here; on a thread that stays."""

    scratch: Path  # TMPDIR of all processes
    _lifeline: tuple[int, int] = field(default_factory=os.pipe)

    def start(
        self, plan: RolePlan, arguments: Sequence[str], log_file: Path, folder: Path | None = None
    ) -> LocalProcess:
        """Start a role in ``folder``, or else in this process's folder."""
        scratch, lifeline = self.scratch, self._lifeline[0]
        return LocalProcess(
            plan, arguments, log_file, scratch=scratch, lifeline=lifeline, folder=folder
        )

    def close(self) -> None:
        """Cut the lifeline of processes that outlive a role; so does the end of this process."""
        for descriptor in self._lifeline:
            os.close(descriptor)

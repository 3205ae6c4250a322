"""How a role becomes a process: on this host, or by another class on a host of a cluster."""

import logging
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from typing_extensions import override

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
        """Release what this host keeps for the process."""


class Starter(Protocol):
    """Starts processes of roles."""

    def start(self, plan: RolePlan, arguments: Sequence[str], log_file: Path) -> RoleProcess:
        """Start a role with additional arguments; append its output to the log."""

    def sweep(self, name: str) -> None:
        """Remove files left by a killed role."""

    def give_back(self, name: str) -> None:
        """Free the place of a role that has ended and will not restart."""

    def let_go(self) -> None:
        """End what outlives a role. Called once all roles have ended."""


class LocalProcess(subprocess.Popen[bytes]):
    """A process on this host."""

    ended_because = ""

    def __init__(
        self,
        command: Sequence[str],
        *,
        log_file: Path,
        words: LastWords,
        environment: Mapping[str, str],
        prepare: Callable[[], None],
        descriptors: Sequence[int],
        folder: Path | None = None,
    ) -> None:
        """Start the process.

        Args:
            command: Program and arguments.
            log_file: Log that the output is appended to.
            words: Memory of its last line; inherited by the process, closed by this object.
            environment: All variables of the process.
            prepare: Function called in the child before the program.
            descriptors: Inherited descriptors.
            folder: Working folder; None for this process's.
        """
        self._log_file = log_file
        self._words: LastWords | None = words
        with log_file.open("ab") as log:
            super().__init__(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                preexec_fn=prepare,
                process_group=0,
                pass_fds=[*descriptors, words.descriptor],
                cwd=folder,
            )

    @override
    def send_signal(self, sig: int) -> None:
        try:
            super().send_signal(sig)
        except ProcessLookupError:
            return

    def signs(self) -> Signs:
        """Return the signs of life, including all descendants."""
        return signs_of(lambda: [self.pid], self._log_file)()

    def last_words(self) -> str:
        """Return the last line of the process; empty if unknown."""
        return self._words.read() if self._words is not None else ""

    def release(self) -> None:
        """Release the memory of the last line."""
        if self._words is not None:
            self._words.close()
            self._words = None


@dataclass(slots=True)
class LocalStarter:
    """Starts processes here; the kernel kills them when this process ends. On the main thread."""

    scratch: Path  # TMPDIR of all processes
    _lifeline: tuple[int, int] = field(default_factory=os.pipe)

    def start(
        self, plan: RolePlan, arguments: Sequence[str], log_file: Path, folder: Path | None = None
    ) -> LocalProcess:
        """Start a role in ``folder``, or else in this process's folder."""
        lifeline, _ = self._lifeline
        words = LastWords()
        environment = dict(os.environ)  # noqa: TID251 handed on to children
        environment |= {
            "TMPDIR": str(self.scratch),
            LIFELINE_VARIABLE: str(lifeline),
            **plan.environment,
            LAST_WORDS_VARIABLE: str(words.descriptor),
        }
        process = LocalProcess(
            [*plan.command, *arguments],
            log_file=log_file,
            words=words,
            environment=environment,
            prepare=bound_to_me(plan.cores),
            descriptors=[lifeline],
            folder=folder,
        )
        _log.info("%s is process %d", plan.name, process.pid)
        return process

    def sweep(self, name: str) -> None:
        """Remove files left by a killed role."""
        for path in self.scratch.glob(f"{name}-*"):
            remove_leftovers(path)

    def give_back(self, name: str) -> None:
        """Remove files left by the role; this host reserves no place for it."""
        self.sweep(name)

    def let_go(self) -> None:
        """Cut the lifeline of processes that outlive a role; so does the end of this process."""
        for descriptor in self._lifeline:
            os.close(descriptor)

"""A program that looks at a host before a run, as a child of this process: asked in lines of JSON.

This module does not know what the program is asked. A log line that begins with PROGRESS says what
the program is doing.
"""

import os
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from slipstream.wire.errors import ChildDiedError
from slipstream.wire.process.patience import Patience, signs_of
from slipstream.wire.process.processes import bound_to_me, last_lines

# no new bytecode among a user's modules; bytecode of libraries is still read
_NO_FILES = {"PYTHONDONTWRITEBYTECODE": "1"}
PROGRESS = "# "
_IDLE_S = 60.0  # limit without a sign of life, added to the time that the program itself waits
_END_S = 5.0  # time to remove its files; losing them does no harm
_POLL_S = 0.2
_READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Post:
    """One planned process of a run, and the program that looks at its host."""

    name: str
    node: str  # equal for posts on one host
    address: str  # address that other hosts use
    ask: Callable[[bytes, float], bytes]  # HostProgram.ask, or the same on another host


class HostProgram:
    """One process and its temporary folder. Start it on the main thread."""

    def __init__(
        self,
        module: str,
        *,
        environment: Mapping[str, str] | None = None,  # added to this process's
        folder: Path | None = None,  # working folder; None for this process's
        progress: Callable[[str], None] = lambda _what: None,  # called with what the program does
    ) -> None:
        """Start the program of a module."""
        self._progress = progress
        self._scratch = Path(tempfile.mkdtemp(prefix="slipstream-check-"))
        self._log = self._scratch / "log"
        inherited = dict(os.environ)  # noqa: TID251 handed on to a child
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(  # noqa: S603 our own program
                [sys.executable, "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=folder,
                env={**inherited, "TMPDIR": str(self._scratch), **_NO_FILES, **(environment or {})},
                preexec_fn=bound_to_me(),
                start_new_session=True,  # Ctrl-C ends it by `close`
            )

    def ask(self, request: bytes, limit_s: float) -> bytes:
        """Send a request, return the answer; both are JSON.

        Args:
            request: JSON without a newline.
            limit_s: Longest time that the program may wait for other hosts.

        Raises:
            ChildDiedError: the program ended, or gave no sign of life.
        """
        writer, reader = self._process.stdin, self._process.stdout
        if writer is None or reader is None:
            raise ChildDiedError("the program that looks at this host has no pipes")
        try:
            writer.write(request + b"\n")
            writer.flush()
        except BrokenPipeError as error:
            raise self._died("ended") from error
        signs = signs_of(lambda: [self._process.pid], self._log)
        patience = Patience("what looks at this host", limit_s + _IDLE_S, signs)
        answer = b""
        while not answer.endswith(b"\n"):
            if select.select([reader], [], [], _POLL_S)[0]:
                part = os.read(reader.fileno(), _READ_BYTES)
                if not part:
                    raise self._died("ended")
                answer += part
                continue
            if patience.is_over():
                raise self._died(patience.why)
            last = last_lines(self._log, 1).strip()
            if last.startswith(PROGRESS):
                self._progress(last.removeprefix(PROGRESS))
        return answer

    def _died(self, why: str) -> ChildDiedError:
        return ChildDiedError(
            f"the program that looks at this host {why}:\n{last_lines(self._log)}"
        )

    def close(self) -> None:
        """End the program and remove its folder."""
        with self._process:  # waits for it, and closes its pipes
            self._process.terminate()
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:  # in a call of a library
                self._process.kill()
        shutil.rmtree(self._scratch, ignore_errors=True)

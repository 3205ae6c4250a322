"""What the simulator expects of changes to this run, for the page; another process computes it."""

import asyncio
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

_log = logging.getLogger(__name__)

_COMMAND = (sys.executable, "-m", "slipstream.deploy.main", "plan", "--advise")
_RENEW_S = 60.0  # an answer that is older is computed again when it is asked for
_LONGEST_S = 600.0
_NICENESS = 10  # the run goes first
_MAX_CHARS = 500  # characters of an error


class Expectation(msgspec.Struct, frozen=True, kw_only=True):
    """What is known now."""

    state: Literal["computing", "known", "failed"]
    advice: msgspec.Raw = msgspec.Raw(b"null")  # output of `slipstream plan --advise --json`
    reason: str = ""  # cause of a missing advice
    age_s: float = 0.0


class AdviceProcess:
    """Computes it when it is asked for, one at a time."""

    def __init__(
        self,
        folder: Path,
        *,
        command: Sequence[str] = _COMMAND,
        now: Callable[[], float] = time.monotonic,
        longest_s: float = _LONGEST_S,
    ) -> None:
        """Know nothing yet; ``command`` prints an advice about a run folder as JSON."""
        self._command = (*command, str(folder), "--json")
        self._now = now
        self._longest_s = longest_s
        self._known = Expectation(state="computing")
        self._known_s = -_RENEW_S
        self._computing: asyncio.Task[None] | None = None
        self._is_over = False

    def ask(self) -> Expectation:
        """Return what is known; what is not, or no longer true, is computed from now on."""
        age_s = self._now() - self._known_s
        if self._computing is None and age_s >= _RENEW_S and not self._is_over:
            self._computing = asyncio.create_task(self._compute())
        if self._computing is not None:
            return Expectation(state="computing")
        return msgspec.structs.replace(self._known, age_s=age_s)

    async def stop(self) -> None:
        """End what is under way."""
        self._is_over = True
        if self._computing is not None:
            self._computing.cancel()
            with suppress(asyncio.CancelledError):
                await self._computing

    async def _compute(self) -> None:
        try:
            self._known = await self._run()
        except OSError as error:
            self._known = Expectation(state="failed", reason=str(error)[:_MAX_CHARS])
        except Exception as error:  # noqa: BLE001 the page says why
            _log.exception("advice failed")
            self._known = Expectation(state="failed", reason=f"{error}"[:_MAX_CHARS])
        finally:
            self._known_s = self._now()
            self._computing = None

    async def _run(self) -> Expectation:
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            with suppress(OSError):  # the process may have ended
                os.setpriority(os.PRIO_PROCESS, process.pid, _NICENESS)
            async with asyncio.timeout(self._longest_s):
                printed, said = await process.communicate()
        except TimeoutError:
            return Expectation(state="failed", reason=f"it took more than {self._longest_s:g} s")
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        text = said.decode(errors="replace").strip()
        if process.returncode:
            reason = text.splitlines()[-1] if text else f"exit code {process.returncode}"
            return Expectation(state="failed", reason=reason[:_MAX_CHARS])
        try:
            return Expectation(state="known", advice=msgspec.json.decode(printed, type=msgspec.Raw))
        except msgspec.DecodeError as error:
            return Expectation(state="failed", reason=f"its answer cannot be read: {error}")

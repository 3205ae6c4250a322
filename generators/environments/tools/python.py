"""A Python interpreter as a tool, in the sandbox of rewards, and an environment that has it.

    [environment]
    function = "slipstream.generators.environments.tools.python:WithPython"

or in an environment of one's own:

    class Solve(Environment):
        def __init__(self) -> None:
            self._interpreter = Interpreter(call_s=5.0)
            self.tools = (self._interpreter.python,)

        async def close(self) -> None:
            await self._interpreter.close()

What the policy wrote is confined by bubblewrap, as programs that a reward function tests are: it
has namespaces of its own without a network, no files but system libraries and Python's own, no
environment, and a filter of system calls. It ends with the trajectory's process, which has another
process start it (``broker/sandbox/keeper.py``), being confined itself.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from typing_extensions import override

from slipstream.broker.sandbox import sandbox as sandboxes
from slipstream.broker.sandbox.bubblewrap import SandboxUnavailableError
from slipstream.broker.sandbox.console import MAX_SOURCE_BYTES, Console, ConsoleResult
from slipstream.broker.sandbox.keeper import BorrowedConsole, console
from slipstream.generators.environments.sdk import Environment, Unavailable

_MIB = 1 << 20
_LOST = "The interpreter was ended: {reason}. Its variables and functions are lost."


class Interpreter:
    """One interpreter of a trajectory, started at the first call and after one that ended it."""

    def __init__(
        self,
        *,
        call_s: float = 10.0,
        total_s: float = 120.0,
        max_calls: int = 64,
        max_output: int = 8_000,
        memory_mb: int = 512,
        max_processes: int = 16,
        sandbox: Literal["namespaces", "none"] = "namespaces",
    ) -> None:
        """Set limits.

        Args:
            call_s: of one call, in seconds in which it has a core or wants none; past it the
                interpreter is ended, and what it holds is lost.
            total_s: of all calls together, in the same.
            max_calls: in one trajectory.
            max_output: bytes of one call's output that the policy gets to read: its begin and end.
            memory_mb: of the interpreter and what it starts; keep environment.memory_mb above it.
            max_processes: processes and threads of it; keep environment.max_processes well above.
            sandbox: as environment.sandbox; ``none`` runs what the policy writes unprotected.

        Raises:
            ValueError: a limit is not above 0.
        """
        given = {"call_s": call_s, "total_s": total_s, "max_calls": max_calls}
        given |= {"max_output": max_output, "memory_mb": memory_mb, "max_processes": max_processes}
        for name, value in given.items():
            if not value > 0:
                raise ValueError(f"{name}: expected more than 0, got {value}")
        if sandbox not in ("namespaces", "none"):
            raise ValueError(f"sandbox: expected namespaces or none, got {sandbox!r}")
        self._call_s, self._left_s, self._total_s = call_s, total_s, total_s
        self._max_calls, self.num_calls, self.num_ended = max_calls, 0, 0
        self._mode: sandboxes.Mode = sandbox
        self._limits = sandboxes.Limits(
            own_s=call_s,
            cpu_s=total_s,
            memory_bytes=memory_mb * _MIB,
            max_processes=max_processes,
            max_output_bytes=max_output,
        )
        self._console: Console | BorrowedConsole | None = None
        # One thread, with which the interpreter ends: calls are one after the other.
        self._thread = ThreadPoolExecutor(1, "python")

    async def python(self, code: str) -> str:
        """Run Python code; return what it prints and its last value. Names stay for later calls."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._call, code)

    async def close(self) -> None:
        """End the interpreter with all that it has started."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._end)
        self._thread.shutdown(wait=False)

    def _call(self, code: str) -> str:
        if self.num_calls >= self._max_calls:
            return f"error: there are no more calls of python, after {self._max_calls}"
        self.num_calls += 1
        if self._left_s <= 0:
            return f"error: there is no time left for python, after {self._total_s:g} s"
        if (size := len(code.encode(errors="replace"))) > MAX_SOURCE_BYTES:
            return f"error: the code has {size} bytes, at most {MAX_SOURCE_BYTES}"
        try:
            if self._console is None:
                self._console = console(self._limits, mode=self._mode)
            said = self._console.run(code, own_s=min(self._call_s, self._left_s))
        except SandboxUnavailableError as error:
            self._end()
            raise Unavailable(str(error)) from error
        self._left_s -= said.own_s
        if said.ended:
            self.num_ended += 1
            self._end()
        return shown(said)

    def _end(self) -> None:
        ended, self._console = self._console, None
        if ended is not None:
            ended.__exit__(None, None, None)


def shown(said: ConsoleResult) -> str:
    """Return the text of a call for the policy."""
    parts = [said.text.rstrip("\n")] if said.text.strip() else []
    if said.ended:
        parts.append(_LOST.format(reason=said.ended))
    return "\n".join(parts) or "(it printed nothing)"


class WithPython(Environment):
    """The prompt's question and a tool ``python``; the reward function scores the transcript."""

    def __init__(self, **limits: Any) -> None:  # noqa: ANN401 as Interpreter takes them
        """Take the limits of ``Interpreter``."""
        self._interpreter = Interpreter(**limits)
        self.tools = (self._interpreter.python,)

    @classmethod
    @override
    def prepare(cls, **options: Any) -> None:
        """Check the limits, and that there is a sandbox."""
        sandboxes.check(Interpreter(**options)._mode)

    @override
    async def close(self) -> None:
        """End the interpreter."""
        await self._interpreter.close()

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

Bubblewrap confines the policy's code as it does programs that a reward function tests: namespaces
of its own without a network, no files but system libraries and Python's own, no environment, and a
filter of system calls. It ends with the trajectory's process, which is confined itself and so has
another process start it (``broker/sandbox/keeper.py``).
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
            call_s: Limit of one call, in seconds in which it has a core or wants none; then the
                interpreter is ended and its state is lost.
            total_s: Limit of all calls together, in such seconds.
            max_calls: Most calls in one trajectory.
            max_output: Bytes of one call's output that the policy reads, from beginning and end.
            memory_mb: Memory of the interpreter and its processes; less than environment.memory_mb.
            max_processes: Processes and threads; much less than environment.max_processes.
            sandbox: Mode as in environment.sandbox; ``none`` runs the policy's code unprotected.

        Raises:
            ValueError: a limit is not above 0.
        """
        limits = {"call_s": call_s, "total_s": total_s, "max_calls": max_calls}
        limits |= {"max_output": max_output, "memory_mb": memory_mb}
        limits["max_processes"] = max_processes
        for name, value in limits.items():
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
        # One thread, with which the interpreter ends: calls run one after the other.
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
            result = self._console.run(code, own_s=min(self._call_s, self._left_s))
        except SandboxUnavailableError as error:
            self._end()
            raise Unavailable(str(error)) from error
        self._left_s -= result.own_s
        if result.ended:
            self.num_ended += 1
            self._end()
        return shown(result)

    def _end(self) -> None:
        ended, self._console = self._console, None
        if ended is not None:
            ended.__exit__(None, None, None)


def shown(result: ConsoleResult) -> str:
    """Return the text of a call for the policy."""
    parts = [result.text.rstrip("\n")] if result.text.strip() else []
    if result.ended:
        parts.append(_LOST.format(reason=result.ended))
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

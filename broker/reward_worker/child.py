"""The process in which reward functions run: reads calls, runs them, answers. Ends with its worker.

Its parent, bubblewrap or ``sandbox/init.py``, kills the functions' leftover processes at its end.
"""

import os
import socket
import sys
from collections.abc import Awaitable
from typing import TYPE_CHECKING

import msgspec
from typing_extensions import override

from slipstream.broker.reward_worker.messages import (
    CallOutcomes,
    Load,
    Loaded,
    LoadFailed,
    ScoreCall,
    ToChild,
    to_child,
)
from slipstream.broker.rewards.loading import RewardFunction, load_function
from slipstream.broker.rewards.outcomes import (
    RewardOutcome,
    all_or_none,
    failure,
    outcome_of,
    outcomes_of,
    unavailable,
)
from slipstream.broker.rewards.sdk import Unavailable
from slipstream.broker.sandbox.frames import Link, connection_of
from slipstream.wire.errors import ConfigError
from slipstream.wire.messages.bounds import shortened

if TYPE_CHECKING:
    import asyncio

EXIT_BROKEN = 86  # a function has closed or replaced our descriptor


class GuardedLink(Link[ToChild]):
    """A link that ends the process if a function has taken it away."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection, to_child)
        self._identity = _identity(connection.fileno())
        self._owner = os.getpid()

    @override
    def send(self, message: msgspec.Struct) -> None:
        self._check()
        try:
            super().send(message)
        except OSError:
            os._exit(EXIT_BROKEN)

    @override
    def read(self) -> bool:
        self._check()
        try:
            return super().read()
        except OSError:
            os._exit(EXIT_BROKEN)

    def _check(self) -> None:
        """Check that this process and this descriptor are still those of the start."""
        if os.getpid() != self._owner:
            os._exit(0)  # a function has forked and both have returned
        if _identity(self.fileno()) != self._identity:
            os._exit(EXIT_BROKEN)


def _identity(descriptor: int) -> tuple[int, int]:
    try:
        status = os.fstat(descriptor)
    except OSError:
        return -1, -1
    return status.st_dev, status.st_ino


class Runner:
    """Runs calls; functions that are not async run outside of any event loop."""

    def __init__(self, link: GuardedLink, load: Load, functions: list[RewardFunction]) -> None:
        self._link = link
        self._timeout_s = load.timeout_s
        self._functions = functions
        self._loop: asyncio.Runner | None = None

    def serve(self) -> None:
        """Answer calls until the worker is gone."""
        handed_back: ScoreCall | None = None
        while (call := handed_back or self._link.receive()) is not None:
            handed_back = None
            if not isinstance(call, ScoreCall):
                continue
            if self._functions[call.function].is_async:
                handed_back = self._asyncio().run(self._together(call))
            else:
                self._link.send(self._run(call))

    def close(self) -> None:
        """Let the functions release their resources."""
        for function in self._functions:
            result = function.close()
            if isinstance(result, Awaitable):
                self._asyncio().run(_awaited(result))

    def _run(self, call: ScoreCall) -> CallOutcomes:
        function = self._functions[call.function]
        try:
            result = function.call(call.transcripts)
            if isinstance(result, Awaitable):
                result = self._asyncio().run(_awaited(result))
            return _answer(call, function, result)
        except BaseException as error:  # noqa: BLE001 foreign code may raise anything
            return _failed(call, error)

    async def _together(self, first: ScoreCall) -> ScoreCall | None:
        """Run calls at the same time; return when none is running.

        A call of a function that is not async ends this and is returned: the function may want an
        event loop of its own.
        """
        import asyncio

        running = {asyncio.create_task(self._run_async(first))}
        asking = asyncio.create_task(self._link.received())
        while running:
            done, _ = await asyncio.wait({*running, asking}, return_when=asyncio.FIRST_COMPLETED)
            running -= done
            if asking not in done:
                continue
            call = asking.result()
            if not isinstance(call, ScoreCall):
                break
            if not self._functions[call.function].is_async:
                if running:
                    await asyncio.wait(running)
                return call
            running.add(asyncio.create_task(self._run_async(call)))
            asking = asyncio.create_task(self._link.received())
        asking.cancel()
        return None

    async def _run_async(self, call: ScoreCall) -> None:
        import asyncio

        function = self._functions[call.function]
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                result = function.call(call.transcripts)
                if isinstance(result, Awaitable):
                    result = await result
            answered = _answer(call, function, result)
        except BaseException as error:  # noqa: BLE001 foreign code may raise anything
            answered = _failed(call, error)
            if limit.expired() and isinstance(error, TimeoutError):
                outcome = unavailable(took_too_long(self._timeout_s))
                answered = _same(call, outcome, failed=True)
        self._link.send(answered)

    def _asyncio(self) -> "asyncio.Runner":
        if self._loop is None:
            import asyncio  # 40 ms that a function which is not async need not wait for

            self._loop = asyncio.Runner()
        return self._loop


async def _awaited(result: Awaitable[object]) -> object:
    return await result


def took_too_long(timeout_s: float) -> str:
    """Return the reason why there is no reward after ``timeout_s``."""
    return f"took longer than reward.timeout_s = {timeout_s:g}"


def _answer(call: ScoreCall, function: RewardFunction, result: object) -> CallOutcomes:
    num_turns = [len(transcript.turns) for transcript in call.transcripts]
    if function.info.takes == "answer":
        return CallOutcomes(call_id=call.call_id, outcomes=(outcome_of(result, num_turns[0]),))
    outcomes = outcomes_of(result, num_turns)
    if function.info.takes == "group":
        outcomes = all_or_none(outcomes)
    return CallOutcomes(call_id=call.call_id, outcomes=tuple(outcomes))


def _failed(call: ScoreCall, error: BaseException) -> CallOutcomes:
    return _same(call, failure(error), failed=not isinstance(error, Unavailable))


def _same(call: ScoreCall, outcome: RewardOutcome, *, failed: bool) -> CallOutcomes:
    outcomes = (outcome,) * len(call.transcripts)
    return CallOutcomes(call_id=call.call_id, outcomes=outcomes, failed=failed)


# ---- process -----------------------------------------------------------------


def load(link: GuardedLink, request: Load) -> list[RewardFunction] | None:
    """Import the functions and report it."""
    try:
        functions = [
            load_function(
                named.function, named.options, setting=named.setting, offered=request.offered
            )
            for named in request.rewards
        ]
    except ConfigError as error:
        link.send(LoadFailed(message=shortened(str(error))))
        return None
    link.send(
        Loaded(
            functions=tuple(function.info for function in functions),
            are_async=tuple(function.is_async for function in functions),
        )
    )
    return functions


def main() -> int:
    """Load, then serve until the worker is gone."""
    link = GuardedLink(connection_of("slipstream.broker.reward_worker.child"))
    request = link.receive()
    if not isinstance(request, Load):
        return 1
    functions = load(link, request)
    if functions is None:
        return 1
    runner = Runner(link, request, functions)
    runner.serve()
    runner.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())

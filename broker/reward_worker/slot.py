"""A slot for one child of a reward worker: starts it, gives it calls, checks its usage."""

import asyncio
import math
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

from slipstream.broker.config import RewardSection
from slipstream.broker.reward_worker.child import took_too_long
from slipstream.broker.reward_worker.messages import (
    CallOutcomes,
    FromChild,
    Load,
    Loaded,
    LoadFailed,
    ScoreCall,
    from_child,
)
from slipstream.broker.reward_worker.queue import PendingCall
from slipstream.broker.rewards.outcomes import Fault
from slipstream.broker.sandbox.child_process import ChildProcess
from slipstream.broker.sandbox.process_table import ProcessRow, Usage, now_s, process_table
from slipstream.wire.errors import ConfigError
from slipstream.wire.process.patience import Patience, signs_of

_IMPORT_S = 120.0  # without a sign of life
_POLL_S = 0.1
_GRACE_S = 1.0  # added for an async call, which ends itself when its time is up
_SAME_TICK_S = 0.02  # the kernel's clock for starts of processes


@dataclass(slots=True)
class RunningCall:
    """A call that a child works on."""

    call: PendingCall
    started_s: float
    cpu_s: float = 0.0


class Slot:
    """The current child and its calls."""

    def __init__(
        self,
        number: int,
        settings: RewardSection,
        on_answer: "Callable[[Slot, CallOutcomes], None]",
        on_end: "Callable[[Slot, int | None], None]",
    ) -> None:
        """Start with no child; ``on_end`` gets the exit code of a child that ended by itself.

        A child that sends nonsense has no exit code.
        """
        self.number = number
        self.child: ChildProcess | None = None
        self.ready = False
        self.running: dict[int, RunningCall] = {}
        self.failures = 0  # failed starts in a row
        self._settings = settings
        self._on_answer = on_answer
        self._on_end = on_end
        self._loading: asyncio.Future[Loaded] | None = None
        self._are_async: tuple[bool, ...] = ()
        self._cpu_s = 0.0  # time of all its processes at the last measurement

    @property
    def is_idle(self) -> bool:
        """True if a call would have the child for itself."""
        return self.ready and not self.running

    # ---- the child -----------------------------------------------------------

    async def start(
        self, load: Load, *, hide: Sequence[Path], environment: Mapping[str, str]
    ) -> Loaded:
        """Start a child and wait until it has loaded the functions.

        Raises:
            ConfigError: the child cannot load them.
        """
        loading: asyncio.Future[Loaded] = asyncio.get_running_loop().create_future()
        child = ChildProcess(
            f"reward child {self.number}",
            "slipstream.broker.reward_worker.child",
            lambda body: self._received(child, from_child.decode(body)),
            lambda code: self._ended(child, code),
        )
        self.child, self._loading = child, loading
        jailed = self._settings.sandbox != "none"
        try:
            await child.start(jailed=jailed, hide=hide, environment=environment)
            child.send(load)
            loaded = await self._until_loaded(child, loading)
        except BaseException:
            self.child = None
            await child.end()
            raise
        finally:
            self._loading = None
        if child.is_gone:
            self.child = None
            await child.end()
            raise ConfigError("its process ended as soon as it was loaded")
        self.failures, self.ready, self._are_async = 0, True, loaded.are_async
        self._cpu_s = math.inf  # loading is charged to no answer
        return loaded

    async def _until_loaded(self, child: ChildProcess, loading: "asyncio.Future[Loaded]") -> Loaded:
        patience = Patience("the reward functions to load", _IMPORT_S, signs_of(lambda: child.pids))
        while not (await asyncio.wait({loading}, timeout=_POLL_S))[0]:
            if patience.is_over():
                raise ConfigError(
                    f"the reward functions do not load: their process {patience.why} "
                    "(reward.function)"
                )
        loaded = loading.result()
        table = process_table()
        child.remember_loaded(table)
        if (excess := self._excess(child.measure(table))) is not None:
            raise ConfigError(f"after loading, a reward child {excess[1]}")
        return loaded

    def _received(self, child: ChildProcess, message: FromChild) -> None:
        if self.child is not child:
            return  # it is being replaced
        waits = self._loading if self._loading and not self._loading.done() else None
        match message:
            case CallOutcomes():
                self._on_answer(self, message)
            case Loaded():
                if waits is not None:
                    waits.set_result(message)
            case LoadFailed(message=why):
                if waits is not None:
                    waits.set_exception(ConfigError(why))
            case _:
                assert_never(message)

    def _ended(self, child: ChildProcess, code: int | None) -> None:
        if self.child is not child:
            return
        if self._loading is None:
            self._on_end(self, code)
        elif not self._loading.done():
            how = how_it_ended(code)
            self._loading.set_exception(ConfigError(f"its process {how} while it was loaded"))

    # ---- calls ---------------------------------------------------------------

    def fits(self, call: PendingCall) -> bool:
        """True if the child may take a call now."""
        if not self.ready or not self.running:
            return self.ready
        calls = [call, *(running.call for running in self.running.values())]
        if any(other.suspect or not self._are_async[other.function] for other in calls):
            return False
        return sum(len(other.work) for other in calls) <= self._settings.concurrency

    def run(self, call_id: int, call: PendingCall) -> None:
        """Give the child a call."""
        if self.child is None:
            return
        self.running[call_id] = RunningCall(call, now_s())
        transcripts = tuple(transcript for _, transcript in call.work)
        self.child.send(ScoreCall(call_id=call_id, function=call.function, transcripts=transcripts))

    # ---- limits --------------------------------------------------------------

    def fault(self, table: Mapping[int, ProcessRow]) -> tuple[Fault, str, list[int]] | None:
        """Return the limit that the child exceeds, the reason, and the calls to blame."""
        if self.child is None or not self.ready:
            return None
        usage = self.child.measure(table)
        spent_s = max(0.0, usage.cpu_s - self._cpu_s)
        self._cpu_s = usage.cpu_s
        for running in self.running.values():
            running.cpu_s += spent_s / len(self.running)
        if (excess := self._excess(usage)) is not None:
            return excess[0], f"killed: it {excess[1]}", []
        limit_s = self._settings.cpu_s
        if any(running.cpu_s > limit_s for running in self.running.values()):
            return "cpu", f"killed: it used more than reward.cpu_s = {limit_s:g}", []
        now, limit_s = now_s(), self._settings.timeout_s
        late = [
            call_id
            for call_id, running in self.running.items()
            if now - running.started_s > limit_s + _GRACE_S * self._are_async[running.call.function]
        ]
        return ("timeout", took_too_long(limit_s), late) if late else None

    def kill_left_behind(self, table: Mapping[int, ProcessRow]) -> int:
        """Kill processes that finished calls left behind; return how many."""
        if self.child is None or not self.ready:
            return 0
        before_s = min((run.started_s for run in self.running.values()), default=math.inf)
        return self.child.kill_left_behind(table, before_s=before_s - _SAME_TICK_S)

    def _excess(self, usage: Usage) -> tuple[Fault, str] | None:
        settings = self._settings
        if usage.num_tasks > settings.max_processes:
            count = f"{usage.num_tasks} processes and threads"
            return "processes", f"had {count}, reward.max_processes = {settings.max_processes}"
        used_mb = usage.rss_bytes >> 20
        if used_mb > settings.memory_mb:
            return "memory", f"used {used_mb} MB, reward.memory_mb = {settings.memory_mb}"
        return None


def how_it_ended(code: int | None) -> str:
    """Return the meaning of a child's exit code."""
    if code is None:
        return "sent nonsense"
    number = code - 128 if code > 128 else -code
    if number > 0:
        with suppress(ValueError):
            return f"was killed by {signal.Signals(number).name}"
    return f"ended with exit code {code}"

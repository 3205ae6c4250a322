"""Runs reward functions in child processes that may hang, leak or crash, one score per answer.

Consumes: answers. Produces: for each one a score, whatever the function does. Waits for: a child
that is free. Children that take too long or too much are killed and replaced.

All state changes in callbacks of the event loop; nothing here waits with a message half sent.
"""

import asyncio
import logging
import math
import os
from collections import Counter, deque
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from slipstream.broker.config import RewardSection
from slipstream.broker.reward_worker.child import EXIT_BROKEN
from slipstream.broker.reward_worker.choice import RewardChoice
from slipstream.broker.reward_worker.messages import CallOutcomes, Load
from slipstream.broker.reward_worker.queue import PendingCall, ScoringRequest, Work, request_of
from slipstream.broker.reward_worker.slot import Slot, how_it_ended
from slipstream.broker.rewards.outcomes import Fault, FunctionInfo, unavailable
from slipstream.broker.sandbox.child_process import ChildProcess
from slipstream.broker.sandbox.jail import check_jail
from slipstream.broker.sandbox.process_table import now_s, process_table
from slipstream.wire.errors import ConfigError
from slipstream.wire.messages.broker import ScoringItem
from slipstream.wire.messages.trajectory import MAX_PARTS, Score
from slipstream.wire.process.environment import handed_on

_log = logging.getLogger(__name__)
_POLL_S = 0.1  # between measurements of the children, while one works
_IDLE_POLL_S = 1.0
_POLL_SHARE = 0.05  # largest share of a processor, on hosts with very many processes
_LONGEST_BACKOFF_S = 30.0


class RewardPool:
    """Child processes that score answers. Make one with ``start``; close it."""

    def __init__(self, settings: RewardSection, choice: RewardChoice, hide: Sequence[Path]) -> None:
        self.functions: tuple[FunctionInfo, ...] = ()
        self.replaced: Counter[str] = Counter()  # children, by fault
        self.left_behind = 0  # processes killed after the calls that started them
        self._settings = settings
        self._choice = choice
        self._hide = hide
        self._environment: dict[str, str] = {}
        self._slots = [
            Slot(number, settings, self._answered, self._ended)
            for number in range(settings.processes)
        ]
        self._requests: deque[ScoringRequest] = deque()
        self._last_call_id = 0
        self._last_ready_s = now_s()  # when a child was ready, at the last check
        self._why_none_starts = ""
        self._shortened: set[int] = set()  # functions that have been warned about
        self._tasks: set[asyncio.Task[None]] = set()
        self._endings: set[asyncio.Task[None]] = set()  # never cancelled: they leave nothing
        self._working = asyncio.Event()
        self._closed = False

    @classmethod
    async def start(
        cls, settings: RewardSection, *, function: str = "", hide: Sequence[Path] = ()
    ) -> "RewardPool":
        """Load the functions in a first child, and start the others.

        Call it on the main thread: the children die with the thread that forked them.

        Args:
            settings: The section [reward].
            function: Replacement for reward.function.
            hide: Files and folders that the functions must not see, such as keys; they are covered
                unless reward.sandbox = "none". A folder that does not exist yet is made.

        Raises:
            ConfigError: a function cannot be loaded, a variable that it is to get is not set, or
                there is no sandbox here.
        """
        pool = cls(settings, RewardChoice(settings, function=function), hide)
        pool._environment = handed_on(
            os.environ,  # noqa: TID251 parts of it are handed on to children
            named=settings.environment,
            setting="reward.environment",
        )
        if settings.sandbox == "none":
            _log.warning('reward.sandbox = "none": reward functions can see the files that we can')
        else:
            await asyncio.to_thread(check_jail)
            for path in hide:  # a missing path cannot be covered
                if not path.exists() and not path.suffix:
                    with suppress(OSError):  # another user must make and protect it
                        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            pool.functions = tuple(await pool._start(pool._slots[0]))
        except BaseException:
            await pool.close()
            raise
        pool._in_background(pool._watch())
        for slot in pool._slots[1:]:
            pool._in_background(pool._fill_slot(slot))
        return pool

    @property
    def needs_groups(self) -> bool:
        """True if a function wants all siblings of a group at once."""
        return any(function.takes == "group" for function in self.functions)

    async def score(self, work: Work) -> AsyncIterator[Score]:
        """Yield one score per answer as they arrive, in any order.

        Callers take turns. A caller that stops listening gives up work not started. No score comes
        for work given back meanwhile.
        """
        request = request_of(work, self._choice, self.functions)
        self._requests.append(request)
        if self._closed:
            self._fail_waiting("the reward pool is closed")
        self._dispatch()
        try:
            num_scores = 0
            while num_scores < request.num_answers:
                if (score := await request.scores.get()) is not None:
                    num_scores += 1
                    yield score
        finally:
            request.abandoned = True
            request.waiting.clear()

    def give_back(self, group_id: int) -> list[ScoringItem]:
        """Forget the answers of a group whose turn has not come; return them.

        A batch that has not started, and groups that a function takes whole, stay.
        """
        return [item for request in self._requests for item in request.give_back(group_id)]

    async def close(self) -> None:
        """End all children and their descendants; answers without a score get none."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._fail_waiting("the reward pool was closed")
        children: list[Coroutine[object, object, None]] = []
        for slot in self._slots:
            if slot.child is not None:
                children.append(slot.child.end(in_order=slot.is_idle))
            for running in slot.running.values():
                self._give_up(running.call, "the reward pool was closed")
            slot.running.clear()
            slot.child, slot.ready = None, False
        await asyncio.gather(*children, *self._endings)

    # ---- whose turn ----------------------------------------------------------

    def _dispatch(self) -> None:
        """Hand calls to children, one of each caller in turn, until no child takes more."""
        passed = 0
        while self._requests and passed < len(self._requests):
            request = self._requests.popleft()
            if not request.waiting:
                continue
            self._requests.append(request)
            fitting = [slot for slot in self._slots if slot.fits(request.waiting[0])]
            if not fitting:
                passed += 1
                continue
            passed = 0
            call = request.waiting.popleft()
            if call.divisible:
                idle = sum(slot.is_idle for slot in self._slots)
                call, *others = call.split(max(1, idle))
                request.waiting.extendleft(reversed(others))
            self._last_call_id += 1
            min(fitting, key=lambda slot: len(slot.running)).run(self._last_call_id, call)
            self._working.set()

    # ---- outcomes of calls ---------------------------------------------------

    def _answered(self, slot: Slot, answer: CallOutcomes) -> None:
        running = slot.running.get(answer.call_id)
        if running is None or len(answer.outcomes) != len(running.call.work):
            self._replace(slot, "broken", "killed: its process answered nonsense")
            return
        del slot.running[answer.call_id]
        call = running.call
        if not (answer.failed and self._run_apart(call)):
            function = self.functions[call.function]
            left_out = max(outcome.left_out for outcome in answer.outcomes)
            if left_out and call.function not in self._shortened:
                self._shortened.add(call.function)
                _log.warning(
                    "reward function %s returned %d parts, only the first %d are kept",
                    function.name,
                    MAX_PARTS + left_out,
                    MAX_PARTS,
                )
            call.deliver(answer.outcomes, function)
        self._dispatch()

    def _ended(self, slot: Slot, code: int | None) -> None:
        """A child has ended by itself (its exit code), or sent a malformed message (None)."""
        if code is None or code == EXIT_BROKEN:
            self._replace(slot, "broken", "killed: it closed the descriptors of its process")
        else:
            self._replace(slot, "died", f"killed: its process {how_it_ended(code)}")

    # ---- replacing -----------------------------------------------------------

    def _replace(
        self, slot: Slot, fault: Fault, reason: str, *, blamed: Iterable[int] = ()
    ) -> None:
        """End a child, and start another one. Calls that cannot be cleared have failed."""
        child, running = slot.child, slot.running
        if child is None:
            return
        slot.child, slot.ready, slot.running = None, False, {}
        self.replaced[fault] += 1
        guilty = set(blamed) or (set(running) if len(running) == 1 else set())
        again = [run.call for call_id, run in running.items() if call_id not in guilty]
        for call_id in guilty:
            if not self._run_apart(running[call_id].call, alone=True):
                self._give_up(running[call_id].call, reason)
        for call in again:
            call.suspect = True
        self._wait_again(again)
        _log.warning(
            "reward child %d is replaced (%s): %s; %d calls are to blame, %d run again",
            slot.number,
            fault,
            reason,
            len(guilty),
            len(again),
        )
        ending = asyncio.get_running_loop().create_task(self._end_and_fill(slot, child))
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)
        self._dispatch()

    def _run_apart(self, call: PendingCall, *, alone: bool = False) -> bool:
        """Let the answers of a batch that failed run one by one; return False for other calls.

        So one bad answer costs its neighbors nothing, and n answers make n + 1 calls at most.
        """
        if len(call.work) < 2 or self.functions[call.function].takes != "batch":
            return False
        singles = call.split(len(call.work))
        for single in singles:
            single.suspect = alone
        self._wait_again(singles)
        return True

    def _wait_again(self, calls: Sequence[PendingCall]) -> None:
        """Put calls before all others of their callers."""
        for call in reversed(calls):
            if call.request.abandoned:
                continue
            call.request.waiting.appendleft(call)
            if call.request not in self._requests:
                self._requests.appendleft(call.request)

    async def _end_and_fill(self, slot: Slot, child: ChildProcess) -> None:
        await child.end()
        if not self._closed:
            self._in_background(self._fill_slot(slot))

    async def _fill_slot(self, slot: Slot) -> None:
        """Start a child, with more attempts if needed."""
        while True:
            if slot.failures:
                await asyncio.sleep(min(2.0 ** (slot.failures - 1), _LONGEST_BACKOFF_S))
            try:
                await self._start(slot)
            except (ConfigError, OSError) as error:
                slot.failures += 1
                self._why_none_starts = f"the reward function cannot be loaded: {error}"
                _log.error("reward child %d does not start: %s", slot.number, error)
            else:
                self._dispatch()
                return

    async def _start(self, slot: Slot) -> Sequence[FunctionInfo]:
        load = Load(
            rewards=tuple(self._choice.rewards),
            offered={"sandbox": self._settings.sandbox},
            timeout_s=self._settings.timeout_s,
        )
        loaded = await slot.start(load, hide=self._hide, environment=self._environment)
        return loaded.functions

    def _give_up(self, call: PendingCall, reason: str) -> None:
        outcome = unavailable(reason)
        call.deliver([outcome] * len(call.work), self.functions[call.function])

    def _fail_waiting(self, reason: str, *, asked_before_s: float = math.inf) -> None:
        for request in self._requests:
            while request.waiting and request.asked_s < asked_before_s:
                self._give_up(request.waiting.popleft(), reason)

    def _in_background(self, job: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(job)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---- limits --------------------------------------------------------------

    async def _watch(self) -> None:
        """Measure the children, often while they work; replace the ones over their limits."""
        loop = asyncio.get_running_loop()
        while True:
            busy = any(slot.running for slot in self._slots)
            began_s = loop.time()
            table, now = process_table(), now_s()
            if any(slot.ready for slot in self._slots):
                self._last_ready_s = now
            due_s = now - self._settings.timeout_s  # answers wait for a child as long as for a call
            if self._last_ready_s < due_s and all(slot.failures for slot in self._slots):
                self._fail_waiting(self._why_none_starts, asked_before_s=due_s)
            for slot in self._slots:
                if (fault := slot.fault(table)) is not None:
                    kind, reason, late = fault
                    self._replace(slot, kind, reason, blamed=late)
                elif killed := slot.kill_left_behind(table):
                    self.left_behind += killed
                    _log.warning("reward child %d left %d processes behind", slot.number, killed)
            pause_s = max(_POLL_S, (loop.time() - began_s) / _POLL_SHARE)
            if busy:
                await asyncio.sleep(pause_s)
                continue
            self._working.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(_IDLE_POLL_S):
                    await self._working.wait()
            await asyncio.sleep(pause_s if self._working.is_set() else 0)

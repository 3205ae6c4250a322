"""Trajectories through a generator's lanes, or through a bare SGLang, and what they get of it."""

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import aiohttp
from typing_extensions import override

from slipstream.generators.config import GeneratorSettings
from slipstream.generators.environments.turn_sampler import TurnSampler
from slipstream.generators.lanes.concurrency import Range
from slipstream.generators.lanes.lanes import Booking, Lanes
from slipstream.generators.rollout import Sampler, run_rollouts
from slipstream.generators.sglang.engine import SglangEngine
from slipstream.generators.sglang.process import SglangProcess
from slipstream.wire.messages.broker import LeasedGroup
from slipstream.wire.messages.trajectory import Prompt

PROMPT = Prompt(prompt="12+34=")
ITEM = "agents"
TIMEOUT_S = 600.0
_RETRY_S = 0.05


class Replies(NamedTuple):
    """The replies of trajectories, which depend on nothing but a trajectory's number."""

    turns: int
    shortest: int  # tokens
    longest: int

    def lengths(self, number: int) -> list[int]:
        """Return the tokens of each reply of a trajectory, [turns].

        A reply is longer than x times the shortest with a chance of 1/x (Pareto), up to the
        longest.
        """
        chances = random.Random(number)  # noqa: S311 no secret
        cut = 1 - self.shortest / self.longest
        return [round(self.shortest / (1 - cut * chances.random())) for _ in range(self.turns)]


class Call(NamedTuple):
    """A reply of the engine."""

    began_s: float
    ended_s: float
    num_tokens: int


class Measured(NamedTuple):
    """Result of one measurement."""

    rate: float  # tokens per second
    used: float  # share of the sequences that the engine may have at a time
    cpu_s: float  # CPU seconds of the server's processes for a thousand tokens

    def __str__(self) -> str:
        busy = f"{self.used:.1%} of the sequences in use"
        return f"{self.rate:.0f} tokens/s, {busy}, {self.cpu_s:.3f} CPU s for 1,000 tokens"


def measured_between(
    calls: Sequence[Call], first_s: float, last_s: float, *, sequences: int, cpu_s: float
) -> Measured:
    """Return what the engine did from ``first_s`` to ``last_s``, in ``cpu_s`` of its processes.

    A call's tokens are spread evenly over its time. ``sequences`` are all that the engine may have.
    """
    tokens = busy_s = 0.0
    for call in calls:
        inside_s = min(call.ended_s, last_s) - max(call.began_s, first_s)
        if inside_s > 0:
            busy_s += inside_s
            tokens += call.num_tokens * inside_s / (call.ended_s - call.began_s)
    seconds = last_s - first_s
    return Measured(tokens / seconds, busy_s / seconds / sequences, 1e3 * cpu_s / tokens)


class Tally:
    """Calls and trajectories that have ended in one measurement."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.num_open = 0  # calls that the engine has not answered
        self.num_ended = 0  # trajectories
        self.said: list[list[int]] = []  # new tokens of each turn's prompt, of one trajectory
        self._is_over = False
        self._has_ended = asyncio.Event()

    @contextmanager
    def call(self) -> Iterator[list[int]]:
        """Count a call; the list takes the tokens of its reply."""
        reply: list[int] = []
        began_s = time.perf_counter()
        self.num_open += 1
        try:
            yield reply
        finally:
            self.num_open -= 1
            self.calls.append(Call(began_s, time.perf_counter(), len(reply)))

    async def unless_over(self) -> None:
        """Return, or wait to be cancelled if the measurement is over."""
        if self._is_over:
            await asyncio.Event().wait()

    def end_trajectory(self) -> None:
        """Count a trajectory."""
        self.num_ended += 1
        self._has_ended.set()

    async def until_ended(self, count: int) -> None:
        """Wait until this many trajectories have ended."""
        while self.num_ended < count:
            self._has_ended.clear()
            await self._has_ended.wait()

    async def end(self, abort: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """End the measurement: calls that are open return what tokens they have."""
        self._is_over = True
        async with asyncio.timeout(TIMEOUT_S):
            while self.num_open:
                await abort()
                await asyncio.sleep(_RETRY_S)


class Script:
    """What one trajectory asks of the engine."""

    def __init__(self, lengths: Sequence[int]) -> None:
        """Have replies of these ``lengths``, in tokens."""
        self._lengths = iter(lengths)
        self._num_known = 0
        self.said: list[list[int]] = []

    def next_length(self, prompt_ids: list[int]) -> int:
        """Return the tokens of the reply to a prompt."""
        self.said.append(prompt_ids[self._num_known :])
        length = next(self._lengths)
        self._num_known = len(prompt_ids) + length
        return length


_SCRIPT: ContextVar[Script] = ContextVar("script")


class ScriptedEngine(SglangEngine):
    """An engine whose replies have the lengths of the trajectory's script."""

    def __init__(self, process: SglangProcess, tally: Tally) -> None:
        super().__init__(
            process.url, process.api_key, request_timeout_s=TIMEOUT_S, control_timeout_s=TIMEOUT_S
        )
        self._tally = tally

    @override
    async def _answers(self, body: dict[str, Any], count: int) -> list[dict[str, Any]]:
        await self._tally.unless_over()
        length = _SCRIPT.get().next_length(body["input_ids"][0])
        body["sampling_params"] |= {"max_new_tokens": length, "min_new_tokens": length}
        with self._tally.call() as reply:
            answers = await super()._answers(body, count)
            reply += answers[0].get("output_ids", ())
        await self._tally.unless_over()
        return answers


class LanesFeed:
    """Trajectories through the lanes of a generator's worker."""

    def __init__(
        self,
        settings: GeneratorSettings,
        replies: Replies,
        tally: Tally,
        sampler: Sampler,
        turn_sampler: TurnSampler | None,
    ) -> None:
        """Take replies as they are, or all of a trajectory as one without a ``turn_sampler``."""
        self._replies = replies
        self._tally = tally
        self._sampler = sampler
        self._turn_sampler = turn_sampler
        most = settings.generators.max_sequences
        outside = settings.most_outside if turn_sampler is not None else 0
        self._lanes = Lanes(Range(lowest=1, highest=most, step=1), most_outside=outside)

    async def run(self) -> None:
        """Begin trajectories for ever."""
        async with asyncio.TaskGroup() as tasks:
            for number in itertools.count():
                await self._lanes.until_free()
                booking = self._lanes.book(1)
                await booking.enter()
                tasks.create_task(self._one(number, booking))

    async def _one(self, number: int, booking: Booking) -> None:
        lengths = self._replies.lengths(number)
        script = Script([sum(lengths)] if self._turn_sampler is None else lengths)
        _SCRIPT.set(script)
        work = LeasedGroup(
            group_id=number, lease_id=0, item=ITEM, position=number, prompt=PROMPT, siblings=(0,)
        )
        if self._turn_sampler is None:
            ids = self._sampler.codec.encode(PROMPT)
            await run_rollouts(self._sampler, work, (0,), ids)
        else:
            async with booking.by_call() as lanes:
                await self._turn_sampler.run(work, 0, lanes)
        self._tally.said = script.said
        self._tally.end_trajectory()
        booking.leave(1)


class BareFeed:
    """The same requests from a plain client of SGLang: no lanes, messages, or environments."""

    def __init__(
        self,
        process: SglangProcess,
        http: aiohttp.ClientSession,
        replies: Replies,
        tally: Tally,
        said: Sequence[Sequence[int]],
        *,
        sequences: int,
    ) -> None:
        """Take replies as they are, or all of a trajectory as one with one turn ``said``."""
        self._url = f"{process.url}/generate"
        self._http = http
        self._replies = replies
        self._tally = tally
        self._said = said
        self._room = asyncio.Semaphore(sequences)

    async def run(self) -> None:
        """Begin trajectories for ever."""
        async with asyncio.TaskGroup() as tasks:
            for number in itertools.count():
                await self._room.acquire()
                tasks.create_task(self._one(number))

    async def _one(self, number: int) -> None:
        lengths = self._replies.lengths(number)
        if len(self._said) == 1:
            lengths = [sum(lengths)]
        context: list[int] = []
        for turn, (new, length) in enumerate(zip(self._said, lengths, strict=True)):
            if turn:
                await self._room.acquire()
            context += new
            context += await self._reply(context, length)
            self._room.release()
        self._tally.end_trajectory()

    async def _reply(self, context: list[int], length: int) -> list[int]:
        await self._tally.unless_over()
        params = {"temperature": 1.0, "max_new_tokens": length, "min_new_tokens": length}
        body = {"input_ids": context, "sampling_params": params, "return_logprob": True}
        with self._tally.call() as reply:
            async with self._http.post(self._url, json=body) as answer:
                answer.raise_for_status()
                reply += (await answer.json()).get("output_ids", ())
        await self._tally.unless_over()
        return reply

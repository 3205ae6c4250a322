"""The lanes of an engine: how many sequences it is given at a time."""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Protocol

from slipstream.generators.config import GeneratorSettings
from slipstream.generators.engine import EngineLoad
from slipstream.generators.lanes.concurrency import (
    Concurrency,
    EngineObservation,
    Range,
    decide,
    first_limit,
)
from slipstream.generators.lanes.live_tokens import LiveTokens

_log = logging.getLogger(__name__)
_MEAN_S = 3.0  # over which the number of trajectories outside the engine is averaged


class Lanes:
    """Counts the sequences that an engine has or will get.

    Work is booked when it is leased and enters the engine when its lanes are free: at once, unless
    the limit was lowered since it was requested.
    """

    def __init__(
        self,
        within: Range,
        *,
        longest_tokens: int | None = None,
        most_outside: int = 0,
        live: LiveTokens | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open the lanes.

        Args:
            within: Range of the limit, which is ``within.highest`` without ``longest_tokens``.
            longest_tokens: Most tokens of a prompt and its response, if the limit follows the
                engine's load.
            most_outside: Most trajectories booked beyond the lanes while as many are outside of
                the engine, with their environments.
            live: Tokens of live trajectories, if the cache must have room for all that are booked.
            now: Returns seconds of a clock.
        """
        self._live = live
        self._capacity_tokens = 0  # unknown until the load is observed
        self._num_promised = 0  # booked sequences that have not begun
        self._has_told_of_cache = False
        self._most_outside = most_outside
        self._outside = MeanCount(now)
        self._now = now
        self._within = within
        self._longest_tokens = longest_tokens
        self._state: Concurrency | None = None
        self.num_finished = 0
        self._booked = 0
        self.asked = 0  # lanes of a request for work under way
        self.is_sated = False  # the broker had less work than there were lanes
        self.shared: EngineLanes | None = None  # what divides an engine's lanes among tenants
        self._changed = asyncio.Event()
        self.in_flight = 0
        self.calling = 0  # replies that the engine computes for trajectories of several turns
        self.acting = 0  # such trajectories outside of the engine: their environments answer
        self.limit = within.highest if longest_tokens is None else within.lowest

    @property
    def free(self) -> int:
        """Lanes that are not booked; negative if the limit fell below the booked number.

        Lanes of trajectories that run outside of the engine count as free, up to their average
        number: at one moment many may be between two replies. But only whole groups are booked that
        the cache has room for, or as many as must always fit.
        """
        if self._live is None:
            return self._unbooked
        fitting = self._live.num_fitting(self._capacity_tokens, self._num_promised)
        fitting -= fitting % self._within.step
        return min(self._unbooked, max(fitting, self._within.lowest - self._booked))

    @property
    def _unbooked(self) -> int:
        return self.limit + min(self._most_outside, round(self._outside.mean)) - self._booked

    @property
    def booked(self) -> int:
        """Lanes of leased work."""
        return self._booked

    def set_limit(self, limit: int) -> None:
        """Set the limit from outside: that of a tenant's share."""
        if limit != self.limit:
            self.limit = limit
            self._changed.set()

    def ask(self) -> int:
        """Return the lanes to request work for, which are held until ``answered``."""
        self.asked = max(0, self.free)
        return self.asked

    def answered(self, asked: int, given: int) -> None:
        """Note how many sequences the broker gave out for lanes asked for, once they are booked."""
        self.is_sated = asked - given >= self._within.step
        self.asked = 0
        self._divide()

    def _divide(self) -> None:
        if self.shared is not None:
            self.shared.divide()

    async def until_free(self) -> None:
        """Wait for a lane."""
        while self.free <= 0:
            await self.until_changed()

    def book(self, num_sequences: int) -> "Booking":
        """Reserve lanes for leased work."""
        self._booked += num_sequences
        self._num_promised += num_sequences
        self.asked = max(0, self.asked - num_sequences)
        return Booking(self, num_sequences)

    def observe(self, load: EngineLoad) -> None:
        """Adjust the limit to the engine's load."""
        if self.shared is not None:
            self.shared.observe(load)
            self._capacity_tokens = int(load.capacity_tokens * self.shared.share_of(self))
            return
        if self._longest_tokens is None:
            return
        self._capacity_tokens = load.capacity_tokens
        before = self.limit
        if self._state is None:
            limit = first_limit(
                self._within,
                capacity_tokens=load.capacity_tokens,
                longest_tokens=self._longest_tokens,
            )
            self._state = Concurrency(limit=limit, num_retractions=load.num_retractions)
        else:
            seen = EngineObservation(
                in_flight=self.in_flight,
                num_finished=self.num_finished,
                kv_use=load.kv_use,
                num_running=load.num_running,
                num_waiting=load.num_waiting,
                num_retractions=load.num_retractions,
            )
            self._state = decide(self._state, seen, self._within)
        self.limit = self._state.limit
        if self._state.verdict in {"trim", "cut"} and self.limit < before:
            _log.info(
                "%s to %d sequences at a time: %.0f%% of the KV cache in use, %d retractions",
                self._state.verdict,
                self.limit,
                100 * load.kv_use,
                load.num_retractions,
            )
        self._tell_of_cache()
        self._changed.set()

    def _tell_of_cache(self) -> None:
        """Say once that the cache alone holds back new trajectories."""
        if self._live is None or self._has_told_of_cache or self._unbooked < self._within.step:
            return
        if self.free < self._within.step:
            self._has_told_of_cache = True
            _log.info(
                "new trajectories wait for room in the KV cache: %d live ones take %.0f of its %d "
                "tokens each",
                self._booked,
                self._live.mean_tokens,
                self._capacity_tokens,
            )

    async def _come_in(self) -> None:
        while self.in_flight >= self.limit:
            await self.until_changed()
        self.in_flight += 1

    def _step_out(self) -> None:
        self.in_flight -= 1
        self._changed.set()

    def _count(self, *, calling: int = 0, acting: int = 0) -> None:
        """Count changes of trajectories of several turns."""
        self.calling += calling
        self.acting += acting
        self._outside.add(acting)

    async def until_changed(self) -> None:
        """Wait until a sequence ends or the load was observed."""
        self._changed.clear()
        await self._changed.wait()


class EngineLanes(Protocol):
    """What divides an engine's lanes (shares.py)."""

    def observe(self, load: EngineLoad) -> None:
        """Adjust the limit to the engine's load."""
        ...

    def divide(self) -> None:
        """Give out free lanes."""
        ...

    def share_of(self, lanes: Lanes) -> float:
        """Return a tenant's share of the engine's limit."""
        ...

    def fair_share(self, lanes: Lanes) -> float:
        """Return the lanes that a tenant would have if all wanted as many as there are."""
        ...


class Booking:
    """The lanes of one leased group."""

    def __init__(self, lanes: Lanes, num_sequences: int) -> None:
        self._lanes = lanes
        self._open = self._num_promised = num_sequences
        self._has_entered = False

    async def enter(self) -> None:
        """Wait until the engine has lanes for the group."""
        lanes = self._lanes
        while lanes.in_flight + self._open > lanes.limit and lanes.in_flight:
            await lanes.until_changed()
        lanes.in_flight += self._open
        self._has_entered = True

    def leave(self, num_sequences: int) -> None:
        """Release the lanes of sequences that the engine has finished."""
        self._open -= num_sequences
        lanes = self._lanes
        lanes._booked -= num_sequences
        if self._has_entered:
            lanes.in_flight -= num_sequences
            lanes.num_finished += num_sequences
        lanes._changed.set()
        lanes._divide()

    def close(self) -> None:
        """Release all remaining lanes, because the group has ended."""
        self._begin(self._num_promised)
        self.leave(self._open)

    def _begin(self, num_sequences: int) -> None:
        self._num_promised -= num_sequences
        self._lanes._num_promised -= num_sequences

    @asynccontextmanager
    async def by_call(
        self, on_change: Callable[[], None] | None = None
    ) -> AsyncIterator["CallLanes"]:
        """Yield the lanes of one trajectory, which is in the engine during its calls alone.

        ``on_change`` is called when it enters or leaves the engine.
        """
        self._begin(1)
        lanes = CallLanes(self._lanes, on_change)
        try:
            yield lanes
        finally:
            lanes.close()


class CallLanes:
    """Lanes of one trajectory of several turns, for each of its calls of the engine.

    A trajectory leaves its booked lane at once and takes one for each call: others use the lane
    while its environment begins or answers.
    """

    def __init__(self, lanes: Lanes, on_change: Callable[[], None] | None = None) -> None:
        self._lanes = lanes
        self._on_change = on_change
        self._num_calls = 0
        self._since_s = lanes._now()  # start of the time in the engine, or outside
        self._engine_s = self._environment_s = 0.0
        if lanes._live is not None:
            lanes._live.begin(self)
        lanes._step_out()
        self._count(acting=1)

    def hold(self, num_tokens: int) -> None:
        """Take the trajectory's tokens in the engine's cache after a call."""
        if self._lanes._live is not None:
            self._lanes._live.hold(self, num_tokens)

    def seconds(self) -> tuple[float, float]:
        """Return the time in calls of the engine, including waits for lanes, and outside."""
        now_s = self._lanes._now()
        if self._num_calls:
            self._engine_s += now_s - self._since_s
        else:
            self._environment_s += now_s - self._since_s
        self._since_s = now_s
        return self._engine_s, self._environment_s

    @asynccontextmanager
    async def call(self) -> AsyncIterator[None]:
        """Have a lane during one call of the engine."""
        lanes = self._lanes
        self.seconds()
        self._num_calls += 1
        if self._num_calls == 1:
            self._count(acting=-1)
        try:
            await lanes._come_in()
            self._count(calling=1)
            try:
                yield
            finally:
                lanes._step_out()
                self._count(calling=-1)
        finally:
            self.seconds()
            self._num_calls -= 1
            if self._num_calls == 0:
                self._count(acting=1)

    def close(self) -> None:
        """Take a lane again, since each trajectory gives one back when it leaves its booking."""
        if self._lanes._live is not None:
            self._lanes._live.end(self)
            self._lanes._changed.set()
        self._lanes.in_flight += 1
        self._count(acting=-1)

    def _count(self, *, calling: int = 0, acting: int = 0) -> None:
        self._lanes._count(calling=calling, acting=acting)
        if self._on_change is not None:
            self._on_change()


class MeanCount:
    """A number and its mean over the last seconds; older values weigh less."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """Begin at 0; ``now`` is a clock in seconds."""
        self._now = now
        self._count = 0
        self._mean = 0.0
        self._at_s = now()

    def add(self, change: int) -> None:
        """Change the number."""
        self._mean = self.mean
        self._at_s = self._now()
        self._count += change

    @property
    def mean(self) -> float:
        """The mean until now."""
        weight = math.exp(-(self._now() - self._at_s) / _MEAN_S)
        return self._count + (self._mean - self._count) * weight


def lanes_of(settings: GeneratorSettings, *, is_tenant: bool = False) -> Lanes:
    """Return the lanes of one engine under these settings; a tenant's have a limit from outside."""
    runs = [tenant.settings for tenant in settings.tenants] or [settings]
    within = Range(
        lowest=max(largest_group(run) for run in runs),
        highest=settings.generators.max_sequences,
        step=max(run.run.group_size for run in runs),
    )
    follows_load = settings.generators.concurrency == "adaptive" and not is_tenant
    counts_live = settings.generators.concurrency == "adaptive" and settings.keeps_sessions
    longest = max(run.longest_tokens for run in runs)
    return Lanes(
        within,
        longest_tokens=longest if follows_load else None,
        most_outside=settings.most_outside,
        live=LiveTokens(longest) if counts_live and not settings.tenants else None,
    )


def largest_group(settings: GeneratorSettings) -> int:
    """Return the most sequences that must fit at once: a group's, or a held-out problem's."""
    evaluated = settings.eval.samples if settings.eval.enabled else 0
    return max(settings.run.group_size, evaluated)

"""Requests for work that nobody has yet. Each is answered once: with work, or when its time is up.

Requests that would be answered alike wait in one queue, so that a change costs one attempt per
kind of question, not one per client.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from slipstream.broker.server.sessions import Session

R = TypeVar("R")


@dataclass(eq=False, slots=True)
class Parked(Generic[R]):
    """One request that waits."""

    session: Session
    request_id: bytes
    request: R
    key: Hashable  # one of these waits at a time; a newer one ends the older one
    kind: Hashable  # requests of one kind would be answered alike
    timer: asyncio.TimerHandle | None = field(default=None)


class WaitingRoom(Generic[R]):
    """Requests that wait, in queues."""

    def __init__(self, on_timeout: Callable[[Parked[R]], None]) -> None:
        self._on_timeout = on_timeout
        self._by_key: dict[Hashable, Parked[R]] = {}
        self._queues: dict[Hashable, OrderedDict[Hashable, Parked[R]]] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def park(self, parked: Parked[R], wait_s: float) -> None:
        """Have a request wait; an older one with the same key is answered at once."""
        if (older := self._by_key.get(parked.key)) is not None:
            self._time_is_up(older)
        parked.timer = asyncio.get_running_loop().call_later(wait_s, self._time_is_up, parked)
        self._by_key[parked.key] = parked
        self._queues.setdefault(parked.kind, OrderedDict())[parked.key] = parked

    def kinds(self) -> list[Hashable]:
        """Return the kinds of requests that wait, in the order in which they came up."""
        return list(self._queues)

    def queue(self, kind: Hashable) -> Iterator[Parked[R]]:
        """Yield requests of a kind, first come first; take out each that is answered."""
        while (queue := self._queues.get(kind)) is not None:
            yield next(iter(queue.values()))

    def dismiss(self, key: Hashable) -> None:
        """Answer a request now, as if its time were up."""
        if (parked := self._by_key.get(key)) is not None:
            self._time_is_up(parked)

    def take_out(self, parked: Parked[R]) -> None:
        """Forget a request that is answered."""
        if parked.timer is not None:
            parked.timer.cancel()
        if self._by_key.get(parked.key) is parked:
            del self._by_key[parked.key]
        queue = self._queues.get(parked.kind)
        if queue is not None and queue.get(parked.key) is parked:
            del queue[parked.key]
            if not queue:
                del self._queues[parked.kind]

    def _time_is_up(self, parked: Parked[R]) -> None:
        self.take_out(parked)
        self._on_timeout(parked)

    def close(self) -> None:
        """Forget all requests."""
        for parked in list(self._by_key.values()):
            self.take_out(parked)

"""Requests for work that is not there yet: answered once, with work or when their time is up.

Requests that would be answered alike wait in one queue, so that a change costs one attempt per
kind of question, not one per client.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from slipstream.broker.server.reply import ANSWERED, BrokerReply, Outcome
from slipstream.broker.server.sessions import ClientSession

R = TypeVar("R")


@dataclass(eq=False, slots=True)
class PendingRequest(Generic[R]):
    """One request that waits."""

    session: ClientSession
    request_id: bytes
    request: R
    key: Hashable  # one of these waits at a time; a newer one ends the older one
    kind: Hashable  # requests of one kind would be answered alike
    timer: asyncio.TimerHandle | None = field(default=None)


class PendingRequests(Generic[R]):
    """Requests that wait, in queues."""

    def __init__(
        self,
        attempt: Callable[[ClientSession, R], Outcome | None],
        at_timeout: Callable[[ClientSession, R], BrokerReply],
        answer: Callable[[ClientSession, bytes, Outcome | Exception], None],
    ) -> None:
        """Start with none.

        Args:
            attempt: returns the answer to a request, or None while there is no work for it.
            at_timeout: returns the answer to a request that has waited long enough.
            answer: sends the outcome of a request.
        """
        self._attempt = attempt
        self._at_timeout = at_timeout
        self._answer = answer
        self._by_key: dict[Hashable, PendingRequest[R]] = {}
        self._queues: dict[Hashable, OrderedDict[Hashable, PendingRequest[R]]] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def add(self, pending: PendingRequest[R], wait_s: float) -> None:
        """Have a request wait; an older one with the same key is answered at once."""
        self.dismiss(pending.key)
        pending.timer = asyncio.get_running_loop().call_later(wait_s, self._time_out, pending)
        self._by_key[pending.key] = pending
        self._queues.setdefault(pending.kind, OrderedDict())[pending.key] = pending

    def settle(self) -> None:
        """Answer requests, queue by queue, until there is nothing for the next one."""
        for kind in list(self._queues):
            while (queue := self._queues.get(kind)) is not None:
                pending = next(iter(queue.values()))
                outcome: Outcome | Exception | None
                try:
                    outcome = self._attempt(pending.session, pending.request)
                except ANSWERED as error:
                    outcome = error
                if outcome is None:
                    break
                self._take_out(pending)
                self._answer(pending.session, pending.request_id, outcome)

    def dismiss(self, key: Hashable) -> None:
        """Answer a request now, as if its time were up."""
        if (pending := self._by_key.get(key)) is not None:
            self._time_out(pending)

    def _time_out(self, pending: PendingRequest[R]) -> None:
        self._take_out(pending)
        outcome: Outcome | Exception
        try:
            outcome = self._at_timeout(pending.session, pending.request)
        except ANSWERED as error:
            outcome = error
        self._answer(pending.session, pending.request_id, outcome)

    def _take_out(self, pending: PendingRequest[R]) -> None:
        if pending.timer is not None:
            pending.timer.cancel()
        if self._by_key.get(pending.key) is pending:
            del self._by_key[pending.key]
        queue = self._queues.get(pending.kind)
        if queue is not None and queue.get(pending.key) is pending:
            del queue[pending.key]
            if not queue:
                del self._queues[pending.kind]

    def close(self) -> None:
        """Forget all requests."""
        for pending in list(self._by_key.values()):
            self._take_out(pending)

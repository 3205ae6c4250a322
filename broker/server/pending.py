"""Requests for work that is not there yet: answered once, with work or when their time is up.

Requests that would be answered alike wait in one queue, so that a change costs one attempt per
kind of question, not one per client.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from slipstream.broker.server.reply import ANSWERED, BrokerReply, Outcome


@dataclass(eq=False, slots=True)
class PendingRequest:
    """One request that waits."""

    key: Hashable  # one of these waits at a time; a newer one ends the older one
    kind: tuple[int, Hashable]  # requests of one kind get the same answer; the lowest number first
    attempt: Callable[[], Outcome | None]  # the answer, or None while there is no work
    at_timeout: Callable[[], BrokerReply]  # the answer after a wait that was long enough
    answer: Callable[[Outcome | Exception], None]  # sends it
    timer: asyncio.TimerHandle | None = None


class PendingRequests:
    """Requests that wait, in queues."""

    def __init__(self) -> None:
        self._by_key: dict[Hashable, PendingRequest] = {}
        self._queues: dict[tuple[int, Hashable], OrderedDict[Hashable, PendingRequest]] = {}
        self._settling: asyncio.Handle | None = None

    def __len__(self) -> int:
        return len(self._by_key)

    def add(self, pending: PendingRequest, wait_s: float) -> None:
        """Have a request wait; an older one with the same key is answered at once."""
        self.dismiss(pending.key)
        pending.timer = asyncio.get_running_loop().call_later(wait_s, self._time_out, pending)
        self._by_key[pending.key] = pending
        self._queues.setdefault(pending.kind, OrderedDict())[pending.key] = pending
        self.settle_soon()

    def settle_soon(self) -> None:
        """Grant work to requests, once for all that happens in this moment."""
        if self._settling is None:
            self._settling = asyncio.get_running_loop().call_soon(self._settle)

    def _settle(self) -> None:
        """Answer requests, queue by queue, until there is nothing for the next one."""
        self._settling = None
        for kind in sorted(self._queues, key=lambda kind: kind[0]):
            while (queue := self._queues.get(kind)) is not None:
                pending = next(iter(queue.values()))
                outcome: Outcome | Exception | None
                try:
                    outcome = pending.attempt()
                except ANSWERED as error:
                    outcome = error
                if outcome is None:
                    break
                self._take_out(pending)
                pending.answer(outcome)

    def dismiss(self, key: Hashable) -> None:
        """Answer a request now, as if its time were up."""
        if (pending := self._by_key.get(key)) is not None:
            self._time_out(pending)

    def _time_out(self, pending: PendingRequest) -> None:
        self._take_out(pending)
        outcome: Outcome | Exception
        try:
            outcome = pending.at_timeout()
        except ANSWERED as error:
            outcome = error
        pending.answer(outcome)

    def _take_out(self, pending: PendingRequest) -> None:
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
        if self._settling is not None:
            self._settling.cancel()

"""The store in which nodes meet: torch's TCPStore, with a deadline for every request."""

import datetime
import socket
from collections.abc import Callable
from typing import TypeVar

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in torch's stubs

from slipstream.weightbus.net import threads
from slipstream.wire.settings.rendezvous import Address

T = TypeVar("T")
ANSWER_S = 5.0  # limit for an answer of the store; a longer request is given up


class StoreLostError(Exception):
    """The store does not answer: the process that held it is gone, stopped or out of reach."""


def connect(address: Address, *, timeout_s: float) -> TCPStore:
    """Return a client of the store that node 0 holds. Blocks for at most ``2 * ANSWER_S``.

    torch's own connect retries and logs for as long as its timeout, so it is called only if the
    address listens.

    Args:
        address: address of the store.
        timeout_s: the client's timeout for keys.

    Raises:
        StoreLostError: the address does not listen, or its listener is no such store.
    """
    try:
        socket.create_connection(address, timeout=ANSWER_S).close()
    except OSError as error:
        raise StoreLostError(f"nobody listens there: {error.strerror or error}") from error
    timeout = datetime.timedelta(seconds=timeout_s)
    try:
        return threads.in_time(
            lambda: TCPStore(address.host, address.port, is_master=False, timeout=timeout), ANSWER_S
        )
    except (TimeoutError, RuntimeError) as error:
        raise StoreLostError("what listens there does not answer as a learner's node 0") from error


def asked(request: Callable[[], T]) -> T:
    """Return the answer of a store that another process holds.

    Raises:
        StoreLostError: no answer came in time, or the connection is closed.
    """
    try:
        return threads.in_time(request, ANSWER_S)
    except TimeoutError as error:
        raise StoreLostError(f"it gave no answer for {ANSWER_S:g} s") from error
    except RuntimeError as error:
        raise StoreLostError("its connection was closed") from error

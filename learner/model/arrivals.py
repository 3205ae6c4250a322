"""Which ranks have not come to where others wait for them."""

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

from torch.distributed import DistError, PrefixStore, Store  # type: ignore[attr-defined]  # not in torch's stubs

from slipstream.learner.collective_errors import is_of_collective
from slipstream.learner.model.device import backend
from slipstream.weightbus.net.threads import in_time

_log = logging.getLogger(__name__)
_LOG_S = 10.0
_ASKED_S = 5.0
_SHOWN = 8  # ranks that a line names


@contextmanager
def waiting(
    store: Store,
    what: str,
    rank: int,
    ranks: Sequence[int],
    *,
    log_s: float = _LOG_S,
    asked_s: float = _ASKED_S,
) -> Iterator[None]:
    """Do a block that waits for all ``ranks`` to come to it, and name those that have not come.

    Args:
        store: Store of all ranks, by a client that nothing else waits with.
        what: Awaited event, unique in the life of the store, as in "waits for WHAT".
        rank: This rank.
        ranks: Ranks that come, this one among them.
        log_s: Seconds between two lines about it.
        asked_s: Limit for the store's answer, seconds.

    Raises:
        RuntimeError: the wait failed, or lasted too long; the message names the backend, ``what``
            and the ranks. Another error of the block has a note of these.
    """
    came = PrefixStore(what, store)
    others = [other for other in ranks if other != rank]

    def missing() -> str:
        if came.check([str(other) for other in others]):
            return "all ranks have come"
        late = (str(other) for other in others if not came.check([str(other)]))
        *shown, more = [*islice(late, _SHOWN + 1), ""][: _SHOWN + 1]
        return f"no rank {', '.join(shown)}{', ...' if more else ''} yet"

    def reason() -> str:
        """Return which ranks are late; a store whose host is gone does not answer."""
        try:
            found = in_time(missing, asked_s)
        except (RuntimeError, TimeoutError):
            found = "the ranks' store does not answer"
        return f"rank {rank} waits for {what}: {found}"

    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(log_s):
            _log.info("%s", reason())

    threading.Thread(target=watch, daemon=True).start()
    try:
        came.set(str(rank), "")
        yield
    except (RuntimeError, TimeoutError) as error:
        is_of_wait = isinstance(error, TimeoutError | DistError) or is_of_collective(error)
        if not is_of_wait:  # this rank's own
            error.add_note(reason())
            raise
        raise RuntimeError(f"{backend()}: {reason()} ({str(error) or 'too late'})") from error
    finally:
        is_over.set()

"""Which ranks have not come to where others wait for them."""

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # not in torch's stubs

from slipstream.learner.model.device import backend

_log = logging.getLogger(__name__)
_LOG_S = 10.0
_SHOWN = 8  # ranks that a line names


@contextmanager
def waiting(
    store: Store, what: str, rank: int, ranks: Sequence[int], *, log_s: float = _LOG_S
) -> Iterator[None]:
    """Do a block that waits for all ``ranks`` to come to it, and name those that have not come.

    Args:
        store: Store of all ranks.
        what: Awaited event, unique in the life of the store, as in "waits for WHAT".
        rank: This rank.
        ranks: Ranks that come, this one among them.
        log_s: Seconds between two lines about it.

    Raises:
        RuntimeError: the block failed, or lasted too long; the message names the backend, ``what``
            and the ranks.
    """
    # A client that waits blocks all its users.
    came = PrefixStore(what, store.clone())  # type: ignore[attr-defined]  # not in torch's stubs
    came.set(str(rank), "")

    def late() -> str:
        missing = [str(other) for other in ranks if not came.check([str(other)])]
        if not missing:
            return f"rank {rank} waits for {what}: all ranks have come"
        more = ", ..." if len(missing) > _SHOWN else ""
        return f"rank {rank} waits for {what}: no rank {', '.join(missing[:_SHOWN])}{more} yet"

    is_over = threading.Event()

    def watch() -> None:
        try:
            while not is_over.wait(log_s):
                _log.info("%s", late())
        except RuntimeError:  # the store has ended, which the block will notice
            return

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    except (RuntimeError, TimeoutError) as error:
        try:
            reason = late()
        except RuntimeError:
            reason = f"rank {rank} waits for {what}, and the ranks' store has ended"
        raise RuntimeError(f"{backend()}: {reason} ({str(error) or 'too late'})") from error
    finally:
        is_over.set()

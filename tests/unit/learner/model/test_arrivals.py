"""A rank that waits says for what, and for whom."""

import logging
import queue
import threading

import pytest
from torch.distributed import HashStore, PrefixStore

from slipstream.learner.model import arrivals
from slipstream.learner.model.arrivals import waiting
from slipstream.weightbus.net.threads import in_time
from tests.support.waiting import HANG_S


def test_ranks_that_did_not_come_are_named_where_a_wait_fails():
    store = HashStore()
    with waiting(store, "the stages", 2, range(4)):
        pass
    with (
        pytest.raises(RuntimeError, match=r"^gloo: rank 0 waits for the stages: no rank 1, 3 yet"),
        waiting(store, "the stages", 0, range(4)),
    ):
        raise RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer")


def test_an_error_of_this_rank_is_not_told_as_anothers():
    with (
        pytest.raises(RuntimeError, match="out of memory") as raised,
        waiting(HashStore(), "the stages", 0, range(2)),
    ):
        raise RuntimeError("out of memory")
    assert str(raised.value) == "out of memory"
    assert raised.value.__notes__ == ["rank 0 waits for the stages: no rank 1 yet"]


def test_a_store_that_does_not_answer_is_waited_for_no_longer_than_seconds(
    monkeypatch: pytest.MonkeyPatch,
):
    class Stopped(HashStore):
        def check(self, keys: list[str]) -> bool:
            never.wait()
            return bool(keys)

    never = threading.Event()
    monkeypatch.setattr(arrivals, "PrefixStore", lambda _name, store: store)
    with (
        pytest.raises(RuntimeError, match="the ranks' store does not answer"),
        waiting(Stopped(), "the stages", 0, range(2), asked_s=0.01),
    ):
        raise TimeoutError
    never.set()


def test_a_wait_that_never_ends_is_given_up():
    never = threading.Event()  # NCCL's first collective waits so
    with (
        pytest.raises(RuntimeError, match=r"all ranks have come \(too late"),
        waiting(HashStore(), "stages", 0, [0]),
    ):
        in_time(never.wait, 0.01)
    never.set()


def test_what_is_waited_for_is_logged_meanwhile():
    logger, lines = logging.getLogger("slipstream.learner.model.arrivals"), queue.Queue[str]()

    class Seen(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.put(record.getMessage())

    handler = Seen()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    store = HashStore()
    PrefixStore("stages", store).set("1", "")
    with waiting(store, "stages", 0, range(20), log_s=0.01):
        line = lines.get(timeout=HANG_S)
    logger.removeHandler(handler)
    assert line == "rank 0 waits for stages: no rank 2, 3, 4, 5, 6, 7, 8, 9, ... yet"

import asyncio

import pytest

from slipstream.generators.lanes.pace import EnginePace


class Engine:
    """A clock, and how long an engine has stood still."""

    def __init__(self, *, counts_calls: bool) -> None:
        self.now_s = self.stood_s = 0.0
        self.pace = EnginePace(
            lambda: self.stood_s, counts_calls=counts_calls, now=lambda: self.now_s
        )


def sums(tokens: float, seconds: float, sequences: float) -> dict[str, float]:
    return {
        "pace_tokens": tokens,
        "pace_sequences": tokens * sequences,
        "pace_squares": tokens * sequences**2,
        "pace_s": seconds,
        "pace_sequence_s": seconds * sequences,
    }


def test_an_answer_counts_its_tokens_its_seconds_and_the_sequences_meanwhile():
    engine = Engine(counts_calls=False)
    engine.pace.observe(4)
    with engine.pace.call() as call:
        engine.now_s = 2.0
        engine.pace.observe(8)
        engine.stood_s, engine.now_s = 2.0, 10.0  # of 10 s it stood still for 2
        call.num_tokens = 100
    assert engine.pace.counters == pytest.approx(sums(100, 8.0, (2 * 4 + 8 * 8) / 10))


def test_calls_of_one_sequence_are_counted_where_they_begin_and_end():
    engine = Engine(counts_calls=True)
    engine.pace.observe(50)  # what the engine says is older
    with engine.pace.call() as long:
        engine.now_s = 4.0
        with engine.pace.call():  # it fails, which is no answer
            engine.now_s = 6.0
        engine.now_s = 10.0
        long.num_tokens = 20
    assert engine.pace.counters == pytest.approx(sums(20, 10.0, (8 * 1 + 2 * 2) / 10))


def test_a_call_that_is_cancelled_ends_too():
    engine = Engine(counts_calls=True)
    call = engine.pace.call()
    call.__enter__()
    engine.now_s = 1.0
    assert not call.__exit__(asyncio.CancelledError, asyncio.CancelledError(), None)
    with engine.pace.call() as call:
        engine.now_s, call.num_tokens = 3.0, 5
    assert engine.pace.counters == pytest.approx(sums(5, 2.0, 1.0))


def test_nothing_is_said_before_the_engine_was_observed_and_of_an_empty_answer():
    engine = Engine(counts_calls=False)
    with engine.pace.call() as call:
        engine.now_s, call.num_tokens = 5.0, 10
        engine.pace.observe(3)
    with engine.pace.call() as call:
        engine.now_s = 6.0
    with engine.pace.call() as call:
        engine.now_s, engine.stood_s = 7.0, 1.0  # it stood still all the time
        call.num_tokens = 10
    assert not any(engine.pace.counters.values())


def test_an_engine_that_answers_has_at_least_the_one_sequence():
    engine = Engine(counts_calls=False)
    engine.pace.observe(0)  # between two observations it had one
    with engine.pace.call() as call:
        engine.now_s, call.num_tokens = 0.2, 10
    assert engine.pace.counters["pace_sequences"] == 10.0

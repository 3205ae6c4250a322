import pytest

from slipstream.wire.process.phases import PhaseClock, busy_share
from tests.support.clock import Clock


def test_each_moment_belongs_to_exactly_one_phase():
    time = Clock(100.0)
    clock = PhaseClock(now=time)
    time.passes(1.0)
    assert clock.enter("generate") == "wait"
    time.passes(2.0)
    with clock.phase("adopt"):
        time.passes(4.0)
    time.passes(8.0)
    assert clock.seconds() == {"wait": 1.0, "generate": 10.0, "adopt": 4.0}


def test_a_phase_ends_with_its_block_even_if_that_fails():
    time = Clock(100.0)
    clock = PhaseClock(now=time)

    def fail_after_a_second() -> None:
        with clock.phase("train"):
            time.passes(1.0)
            raise KeyError("x")

    with pytest.raises(KeyError):
        fail_after_a_second()
    time.passes(5.0)
    assert clock.seconds() == {"wait": 5.0, "train": 1.0}


def test_what_a_phase_had_of_the_time_may_be_said_after_it():
    time = Clock(100.0)
    clock = PhaseClock(now=time)
    clock.enter("generate")
    time.passes(2.0)
    clock.enter_within("adopt")
    time.passes(0.5)
    assert clock.seconds() == {"wait": 0.0, "generate": 2.0, "adopt": 0.0}
    clock.settle(0.125)
    time.passes(1.0)
    assert clock.seconds() == {"wait": 0.0, "generate": 3.375, "adopt": 0.125}
    clock.settle(5.0)  # there is nothing to settle
    assert clock.seconds() == {"wait": 0.0, "generate": 3.375, "adopt": 0.125}


def test_a_long_phase_is_seen_before_it_is_settled_and_never_taken_back():
    time = Clock(100.0)
    clock = PhaseClock(now=time)
    clock.enter_within("adopt")
    time.passes(9.0)
    assert clock.seconds() == {"wait": 0.0, "adopt": 8.0}
    clock.settle(0.5)
    assert clock.seconds() == {"wait": 1.0, "adopt": 8.0}


def test_without_settling_all_the_time_is_of_the_phase():
    time = Clock(100.0)
    clock = PhaseClock(now=time)
    clock.enter_within("adopt")
    time.passes(4.0)
    clock.enter_within("adopt")
    time.passes(1.0)
    clock.settle(0.5)
    clock.enter("generate")
    assert clock.seconds() == {"wait": 0.5, "adopt": 4.5, "generate": 0.0}


@pytest.mark.parametrize("seconds", [3.0, 4.0, 7.0])
def test_a_phase_has_no_more_than_the_time_that_passed(seconds: float):
    time = Clock(100.0)
    clock = PhaseClock(now=time)
    clock.enter_within("adopt")
    time.passes(4.0)
    clock.settle(seconds)
    assert clock.seconds() == {"wait": max(0.0, 4.0 - seconds), "adopt": min(seconds, 4.0)}


@pytest.mark.parametrize(
    ("seconds", "share"),
    [({}, 0.0), ({"wait": 0.0}, 0.0), ({"wait": 3.0, "train": 1.0}, 0.25), ({"train": 2.0}, 1.0)],
)
def test_busy_is_the_share_of_time_that_was_not_waiting(seconds: dict[str, float], share: float):
    assert busy_share(seconds) == share

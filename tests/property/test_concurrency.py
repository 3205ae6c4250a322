"""The limit on sequences stays in its range, settles where the cache allows, and cuts once."""

from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from slipstream.generators.lanes.concurrency import (
    GROW_BELOW,
    TRIM_FROM,
    Concurrency,
    EngineObservation,
    Range,
    decide,
    first_limit,
)

RANGES = st.builds(
    lambda step, lowest, more: Range(lowest=step * lowest, highest=step * lowest + more, step=step),
    st.integers(1, 16),
    st.integers(1, 3),
    st.integers(0, 600),
)
OBSERVATIONS = st.builds(
    EngineObservation,
    in_flight=st.integers(0, 1000),
    num_finished=st.integers(0, 10_000),
    kv_use=st.floats(0.0, 1.0),
    num_running=st.integers(0, 1000),
    num_waiting=st.sampled_from([0, 0, 1, 50]),
    num_retractions=st.integers(0, 30),
)


@given(RANGES, st.lists(OBSERVATIONS, max_size=60), st.integers(0, 10**6), st.integers(1, 10**4))
def test_the_limit_is_never_above_the_highest_or_below_the_lowest(
    within: Range, observations: list[EngineObservation], capacity: int, longest: int
):
    first = first_limit(within, capacity_tokens=capacity, longest_tokens=longest)
    state = Concurrency(limit=first)
    limits = [first]
    for seen in observations:
        state = decide(state, seen, within)
        limits.append(state.limit)
    assert all(within.lowest <= limit <= within.highest for limit in limits)


@given(RANGES, st.lists(OBSERVATIONS, max_size=60))
def test_each_verdict_follows_its_rule(within: Range, observations: list[EngineObservation]):
    state = Concurrency(limit=within.lowest)
    for seen in observations:
        before, state = state, decide(state, seen, within)
        retracted = seen.num_retractions > before.num_retractions
        match state.verdict:
            case "grow":
                assert seen.kv_use < GROW_BELOW
                assert not retracted
                assert before.limit < state.limit
            case "trim":
                assert seen.kv_use >= TRIM_FROM
                assert state.limit <= max(before.limit, within.lowest)
            case "cut":
                assert retracted
                assert state.limit <= max(within.lowest, before.limit)
            case "hold":
                assert state.limit == before.limit
                drained = seen.in_flight <= before.limit
                assert not (drained and (retracted or seen.kv_use >= TRIM_FROM))


@given(RANGES, st.lists(OBSERVATIONS, max_size=40), st.integers(1, 40))
def test_burst_of_retractions_cuts_once_however_often_it_is_polled(
    within: Range, before: list[EngineObservation], polls: int
):
    state = Concurrency(limit=within.highest)
    for seen in before:
        state = decide(state, seen, within)
    in_flight = state.limit
    retractions = state.num_retractions
    states = [state]
    for _ in range(polls):  # nothing ends meanwhile, and more is retracted at every poll
        retractions += 1
        seen = EngineObservation(
            in_flight=in_flight,
            num_finished=0,
            kv_use=1.0,
            num_running=in_flight,
            num_waiting=retractions,
            num_retractions=retractions,
        )
        states.append(decide(states[-1], seen, within))
    cuts = sum(one.limit < other.limit for other, one in pairwise(states))
    assert cuts == (state.limit > within.lowest)
    assert states[-1].limit == max(within.lowest, int(state.limit * 0.75))


@dataclass
class Engine:
    """Sequences that each hold the same share of the cache, and always work for more."""

    share: float
    state: Concurrency
    within: Range
    in_flight: int = 0
    finished: int = 0
    retractions: int = 0
    limits: list[int] = field(default_factory=list)

    def turn(self) -> None:
        """Take what the limit allows, observe it, and let every sequence end."""
        groups = max(0, self.state.limit - self.in_flight) // self.within.step
        self.in_flight += groups * self.within.step
        fits = int(1.0 / self.share)
        self.retractions += max(0, self.in_flight - fits)
        seen = EngineObservation(
            in_flight=self.in_flight,
            num_finished=self.finished,
            kv_use=min(1.0, self.share * self.in_flight),
            num_running=min(fits, self.in_flight),
            num_waiting=max(0, self.in_flight - fits),
            num_retractions=self.retractions,
        )
        self.state = decide(self.state, seen, self.within)
        self.limits.append(self.state.limit)
        self.finished += self.in_flight
        self.in_flight = 0


@given(RANGES, st.floats(0.0005, 0.2), st.integers(0, 600))
@example(Range(lowest=8, highest=64, step=8), 0.05, 0)  # a group more would have to be trimmed
def test_the_limit_settles_when_every_sequence_holds_the_same_share_of_the_cache(
    within: Range, share: float, begins_at: int
):
    engine = Engine(share, Concurrency(limit=within.clamp(begins_at)), within)
    for _ in range(700):
        engine.turn()
    assert len(set(engine.limits[-20:])) == 1, engine.limits[-20:]
    limit = engine.state.limit
    used = share * (limit // within.step) * within.step
    assert used < TRIM_FROM or limit <= within.lowest
    one_more = share * (limit + within.step)
    assert limit == within.highest or one_more >= TRIM_FROM or used >= GROW_BELOW


@given(RANGES, st.floats(1e-6, 1e-4))
def test_sequences_that_all_fit_reach_the_highest_limit_by_doubling(within: Range, share: float):
    engine = Engine(share, Concurrency(limit=within.lowest), within)
    for _ in range(12):
        engine.turn()
    assert engine.state.limit == within.highest
    assert engine.state.is_starting


WITHIN = Range(lowest=8, highest=512, step=8)


@pytest.mark.parametrize(
    ("kv_use", "verdict"),
    [(GROW_BELOW - 0.001, "grow"), (GROW_BELOW, "hold"), (TRIM_FROM - 0.001, "hold")],
)
def test_below_the_one_share_it_grows_and_from_there_on_it_holds(kv_use: float, verdict: str):
    after = decide(Concurrency(limit=64), seen(64, kv_use=kv_use, running=64), WITHIN)
    assert after.verdict == verdict


def seen(
    in_flight: int, *, kv_use: float = 0.1, running: int, waiting: int = 0
) -> EngineObservation:
    return EngineObservation(
        in_flight=in_flight,
        num_finished=500,
        kv_use=kv_use,
        num_running=running,
        num_waiting=waiting,
        num_retractions=0,
    )


def test_a_limit_that_is_not_used_up_does_not_grow():
    assert decide(Concurrency(limit=32), seen(24, running=24), WITHIN).limit == 32
    assert decide(Concurrency(limit=31), seen(24, running=24), WITHIN).limit == 62


def test_nothing_more_is_given_to_an_engine_that_keeps_work_waiting_or_has_not_begun():
    for busy in (seen(32, running=29, waiting=3), seen(32, kv_use=0.0, running=0)):
        assert decide(Concurrency(limit=32), busy, WITHIN).verdict == "hold"


def test_what_is_on_its_way_to_the_engine_holds_nothing_yet_and_is_reckoned_with():
    on_their_way = seen(32, kv_use=0.125, running=8)
    assert decide(Concurrency(limit=32), on_their_way, WITHIN).limit == 40, "a group more"
    on_their_way = seen(32, kv_use=0.125, running=16)
    assert decide(Concurrency(limit=32), on_their_way, WITHIN).limit == 64


def test_after_a_cut_it_grows_by_a_group_for_every_turn_of_all_lanes():
    within = Range(lowest=4, highest=512, step=4)
    state = Concurrency(limit=32)

    def poll(in_flight: int, finished: int, kv_use: float, retractions: int) -> tuple[str, int]:
        nonlocal state
        seen = EngineObservation(
            in_flight=in_flight,
            num_finished=finished,
            kv_use=kv_use,
            num_running=in_flight,
            num_waiting=0,
            num_retractions=retractions,
        )
        state = decide(state, seen, within)
        return state.verdict, state.limit

    assert poll(32, 100, 1.0, 1) == ("cut", 24)
    assert poll(30, 102, 0.9, 3) == ("hold", 24), "it has not drained"
    assert poll(24, 108, 0.5, 3) == ("hold", 24), "its lanes have not turned over"
    assert poll(24, 123, 0.5, 3) == ("hold", 24)
    assert poll(24, 124, 0.5, 3) == ("grow", 28)
    assert poll(28, 140, 0.5, 3) == ("hold", 28)
    assert poll(28, 152, 0.59, 3) == ("grow", 32)
    assert poll(32, 153, 0.7, 3) == ("hold", 32)
    assert poll(32, 154, 0.81, 3) == ("trim", 28)
    assert poll(32, 155, 0.99, 3) == ("hold", 28), "it has not drained"


def test_it_begins_with_whole_groups_that_fit_however_long_they_become():
    for capacity, first in [(16_384, 64), (8_000, 24), (1_024, 8), (300, 8), (10**9, 64)]:
        within = Range(lowest=8, highest=64, step=8)
        assert first_limit(within, capacity_tokens=capacity, longest_tokens=256) == first

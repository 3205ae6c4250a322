"""The benchmark of agents counts what the engine did in its window, of replies with long tails."""

import statistics

import pytest

from benchmarks.agent_trajectories import Call, Replies, Script, measured_between
from benchmarks.bench_agents import ONE_TURN, Setting, medians_of, parser, share_of_one_turn

REPLIES = Replies(turns=4, shortest=64, longest=2000)


def test_replies_have_a_long_tail_and_depend_on_the_number_alone():
    lengths = [length for number in range(5000) for length in REPLIES.lengths(number)]
    assert 64 <= min(lengths) <= max(lengths) <= 2000
    assert statistics.median(lengths) == pytest.approx(124, rel=0.03)
    assert statistics.mean(lengths) == pytest.approx(228, rel=0.03)
    assert sum(length > 1000 for length in lengths) / len(lengths) == pytest.approx(0.033, rel=0.2)
    assert REPLIES.lengths(7) == REPLIES.lengths(7) != REPLIES.lengths(8)


def test_tokens_count_by_the_part_of_their_call_within_the_window():
    calls = [Call(0.0, 4.0, 40), Call(1.0, 3.0, 6), Call(3.0, 9.0, 60), Call(9.0, 10.0, 1000)]
    found = measured_between(calls, 2.0, 6.0, sequences=2, cpu_s=0.053)
    assert found.rate == pytest.approx((20 + 3 + 30) / 4)
    assert found.cpu_s == pytest.approx(1.0)
    assert found.used == pytest.approx((2 + 1 + 3) / 4 / 2)


def test_a_script_keeps_what_each_prompt_says_anew():
    script = Script([2, 3])
    assert script.next_length([5, 6]) == 2
    assert script.next_length([5, 6, 1, 1, 7, 8]) == 3
    assert script.said == [[5, 6], [7, 8]]


def test_settings_are_compared_by_their_medians():
    rates = {ONE_TURN: (10.0, 30.0, 20.0), Setting(0): (18.0, 19.0, 30.0)}
    found = [
        (setting, measured_between([Call(0, 1, int(rate))], 0, 1, sequences=1, cpu_s=1))
        for setting, several in rates.items()
        for rate in several
    ]
    assert share_of_one_turn(medians_of(found), 0) == pytest.approx(19 / 20)


def test_a_part_can_be_chosen():
    assert parser().parse_args([]).sequences == [16, 128, 256]
    assert parser().parse_args(["--sequences", "16"]).sequences == [16]

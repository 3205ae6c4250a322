"""What the comparison of asynchronous and synchronous steps computes from a file of results."""

import pytest

from benchmarks.async_vs_sync import BALANCES, Step, report
from benchmarks.bars import Bars
from benchmarks.parts import Run


def test_a_balance_is_held_to_the_longer_side_of_its_ended_repeats(
    capsys: pytest.CaptureFixture[str],
):
    runs = [
        Run("even-sync", 0, Step(wall_s=7.0, generate_s=5.0, train_s=3.0, tokens=1000)),
        Run("even-async", 0, Step(wall_s=5.0, generate_s=5.0, train_s=4.0, tokens=2000)),
        Run("even-full", 0, Step(wall_s=9.0, generate_s=8.0, train_s=1.0, tokens=4000)),
        Run("even-sync", 1, Step(wall_s=70.0, generate_s=50.0, train_s=30.0, tokens=1)),
        Run("even-async", 1, None),
    ]
    bars = Bars()
    lines = report(runs, bars).splitlines()
    # g: 2 ms a token for the 2000 tokens of an asynchronous step
    assert lines[2] == "| even | 1 | 1 | 4.00 | 3.00 | 1.33 | 7.00 | 5.00 | 4.00 | 1.40 | 1.75 |"
    assert lines[3:] == ["not ended: even, repeat 1"]
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("bar ")]
    assert [line.split(":")[0] for line in printed] == [
        f"bar async_efficiency_{name}" for name in BALANCES
    ]
    assert printed[1].endswith("0.800 of the ceiling (needs >= 0.85): short")
    assert bars.exit_code == 1

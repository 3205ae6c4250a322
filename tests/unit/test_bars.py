"""How benchmarks report their bars."""

import pytest

from benchmarks.bars import Bars, NotRun


def test_a_bar_is_reached_or_missed_for_good(capsys: pytest.CaptureFixture[str]):
    for cost, exit_code, verdict in [(1.3, 0, "ok"), (1.301, 1, "short")]:
        bars = Bars()
        bars.at_most("cost", cost, "x", needs=1.3)
        bars.at_least("speed", 0.6, "x", needs=0.6)
        assert bars.exit_code == exit_code
        assert capsys.readouterr().out.splitlines() == [
            f"bar cost: {cost:.3f} x (needs <= 1.3): {verdict}",
            "bar speed: 0.600 x (needs >= 0.6): ok",
        ]


def test_bar_that_could_not_run_is_short_and_gives_the_reason(capsys: pytest.CaptureFixture[str]):
    bars = Bars()
    bars.at_least("speed", NotRun("there is no ray"), "x", needs=10)
    assert bars.exit_code == 1
    assert capsys.readouterr().out.splitlines() == [
        "speed was not run: there is no ray",
        "bar speed: - x (needs >= 10): short (not run)",
    ]


def test_a_bar_that_is_not_a_number_is_short():
    for compare in (Bars.at_least, Bars.at_most):
        bars = Bars()
        compare(bars, "speed", float("nan"), "x", needs=1)
        assert bars.exit_code == 1

"""The benchmark of prefixes holds its bars in virtual time."""

import pytest

from benchmarks.bars import Bars
from benchmarks.bench_prefixes import Found, judge, simulated


def test_live_prefixes_stay_where_plain_lru_loses_them(capsys: pytest.CaptureFixture[str]):
    bars = Bars()
    judge(bars, "simulated", simulated(24, steered=False), simulated(24, steered=True))
    assert bars.exit_code == 0, capsys.readouterr().out


def test_hits_are_those_of_tokens_that_a_trajectory_had_computed():
    first, again, lost = (100, 0, 40), (150, 120, 120), (150, 120, 30)
    found = Found([first] * 100 + [again] * 99 + [lost])
    assert found.lowest_hit_rate == pytest.approx((99 * 120 + 30) / (100 * 120))
    prefilled = 100 * 60 + 99 * 30 + 120
    assert found.prefilled == pytest.approx(prefilled / (prefilled - 90))

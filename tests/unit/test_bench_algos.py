"""What the benchmark of log-probabilities computes without running anything."""

import pytest

from benchmarks.bars import Bars
from benchmarks.bench_algos import HIDDEN, Figures, Sizes, differences, report, shares


def _figures(*, peak_bytes: int = 100, cpu_s: float = 2.0, loss: float = -4.0) -> Figures:
    return Figures(peak_bytes=peak_bytes, cpu_s=cpu_s, loss=loss, norms=(1.0, 2.0))


def test_memory_and_cpu_are_shares_of_plain():
    assert shares(_figures(peak_bytes=35, cpu_s=2.2), _figures()) == pytest.approx((0.35, 1.1))


def test_what_both_ways_compute_differs_by_the_worst_of_loss_and_norms():
    assert differences(_figures(loss=-4.04), _figures()) == pytest.approx(0.01)
    assert differences(_figures(), _figures()) == 0


def test_every_hidden_size_has_bars_of_its_own(capsys: pytest.CaptureFixture[str]):
    found = {
        "plain": _figures(),
        "chunked": _figures(peak_bytes=30, cpu_s=4.0),
        "ours": _figures(peak_bytes=36),
    }
    bars = Bars()
    for hidden in HIDDEN:
        rows = report(bars, Sizes(tokens=1024, hidden=hidden, dtype="bfloat16"), found)
        assert rows[2] == ("1024", str(hidden), "bfloat16", "ours", "0", "0.36", "2.0", "1.00")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("bar ")]
    assert lines == [
        line
        for hidden in HIDDEN
        for line in (
            f"bar logprobs_memory_{hidden}: 0.360 of plain (needs <= 0.35): short",
            f"bar logprobs_memory_{hidden}_of_best: 1.200 of the best other (needs <= 1): short",
            f"bar logprobs_cpu_{hidden}: 1.000 of the best other (needs <= 1.1): ok",
        )
    ]

"""Curves of several seeds, as benchmarks draw them."""

from xml.etree import ElementTree

import pytest

from benchmarks.pictures import Panel, svg, ticks, value_at


def test_a_value_between_points_is_interpolated():
    track = [(0.0, 0.2), (10.0, 0.4), (10.0, 0.6), (20.0, 0.0)]
    assert [value_at(track, x) for x in (5.0, 15.0, 99.0)] == pytest.approx([0.3, 0.3, 0.0])


def test_ticks_are_round_and_reach_the_highest():
    assert ticks(0.83) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert ticks(47.0) == pytest.approx([0, 10, 20, 30, 40, 50])
    assert ticks(1.0) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    for highest in (0.013, 0.3, 7.0, 59.0, 4301.0):
        assert len(ticks(highest)) <= 6
        assert ticks(highest)[-1] >= highest > ticks(highest)[-2]


def test_a_band_reaches_from_the_lowest_to_the_highest_seed_where_all_are():
    seeds = [[(0.0, 0.0), (4.0, 1.0)], [(1.0, 0.0), (2.0, 0.0)]]
    text = svg([Panel(title="t", x="minutes", y="right", curves={"ours": seeds})])
    band, mean = (path.get("d") for path in _paths(text) if path.get("d", "").count("L") > 9)
    low, high = band.removeprefix("M").removesuffix("Z").split("L")[60:62]  # at x = 2, the end
    assert (low, high) == ("400.0 280.0", "400.0 140.0")
    assert mean.startswith("M200.0 245.0")  # at x = 1
    assert mean.split("L")[-1] == "400.0 210.0"


def _paths(text: str):
    return ElementTree.fromstring(text).iter("{http://www.w3.org/2000/svg}path")  # noqa: S314 ours

"""Curves over each other: smoothing, axes, and downsampling that keeps every run."""

import numpy as np
import pytest

from slipstream.broker.history.compare.curves import Curve, overlaid, smoothed
from slipstream.broker.history.table import shown


def curve(values: list[float], *, every: int = 1, seconds: float = 2.0) -> Curve:
    steps = np.arange(1, len(values) + 1, dtype=np.float64) * every
    return Curve(
        step=steps,
        wall_s=steps * seconds,
        trained_tokens=steps * 100,
        value=np.array(values, dtype=float),
    )


def test_smoothing_begins_at_the_first_value_and_follows_slowly():
    values = np.array([4.0, 4.0, 8.0])
    averages = smoothed(values, 0.5)
    assert averages[:2] == pytest.approx([4.0, 4.0])
    assert averages[2] == pytest.approx((0.25 * 4 + 0.5 * 4 + 1 * 8) / 1.75)
    assert smoothed(values, 0.0) is values


def test_runs_share_one_axis_and_have_nothing_where_they_have_no_row():
    overlay = overlaid("m", {"a": curve([1, 2, 3]), "b": curve([5, 6], every=2)}, "step")
    assert overlay.x.tolist() == [1, 2, 3, 4]
    assert shown(overlay.columns["a"][0]) == [1, 2, 3, None]
    assert shown(overlay.columns["b"][0]) == [None, 5, None, 6]


def test_a_second_column_holds_the_smoothed_values():
    overlay = overlaid("m", {"a": curve([0, 2])}, "step", weight=0.5)
    raw, smooth = overlay.columns["a"]
    assert raw.tolist() == [0, 2]
    assert smooth.tolist() == pytest.approx([0, 1 / 0.75])


def test_time_and_tokens_are_axes_too():
    runs = {"a": curve([1, 2]), "b": curve([3, 4], seconds=2.5)}
    assert overlaid("m", runs, "wall_s").x.tolist() == [2.0, 2.5, 4.0, 5.0]
    assert overlaid("m", runs, "trained_tokens").x.tolist() == [100, 200]


def test_many_rows_become_as_many_as_are_drawn_and_keep_their_mean():
    values = [float(i) for i in range(2_000)]
    overlay = overlaid("m", {"a": curve(values), "b": curve(values[:40])}, "step", max_points=100)
    assert len(overlay.x) <= 100
    assert overlay.x[-1] == 2_000
    assert overlay.columns["a"][0].mean() == pytest.approx(np.mean(values), rel=0.01)
    few = overlay.columns["b"][0]
    assert 1 <= np.isfinite(few).sum() <= 3, "a short run is still there"


def test_of_a_maximum_the_largest_of_a_row_is_kept():
    values = [0.0] * 1_000
    values[500] = 9.0
    for name, largest in (("policy/ratio_max@lag1", 9.0), ("policy/ratio", 0.9)):
        overlay = overlaid(name, {"a": curve(values)}, "step", max_points=100)
        assert np.nanmax(overlay.columns["a"][0]) == pytest.approx(largest)


def test_rows_whose_place_is_not_known_are_left_out():
    known = curve([1, 2, 3])
    known.wall_s[1] = np.nan
    overlay = overlaid("m", {"a": known}, "wall_s")
    assert overlay.columns["a"][0].tolist() == [1, 3]


def test_no_curve_at_all_is_an_empty_chart():
    assert len(overlaid("m", {}, "step").x) == 0
    nowhere = curve([1])
    nowhere.wall_s[0] = np.nan
    assert len(overlaid("m", {"a": nowhere}, "wall_s").x) == 0

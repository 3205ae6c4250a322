"""Distributions of response lengths."""

import random
from statistics import fmean

import pytest

from slipstream.deploy.predict.simulate.lengths import LogNormal, Recorded
from slipstream.wire.errors import ConfigError


@pytest.mark.parametrize(("mean", "spread"), [(500, 0.5), (2000, 1.0), (3000, 2.0)])
def test_the_mean_after_the_cut_is_the_one_that_was_asked_for(mean: float, spread: float):
    lengths = LogNormal(mean, spread, longest=4096)
    rng = random.Random(1)
    drawn = [length for _ in range(20_000) for length in lengths.draw(rng, 4)]
    assert fmean(drawn) == pytest.approx(mean, rel=0.02)
    assert 1 <= min(drawn) <= max(drawn) <= 4096


def test_siblings_are_alike():
    rng = random.Random(1)
    alike, apart = (
        [max(group) / min(group) for group in (one.draw(rng, 4) for _ in range(2000))]
        for one in (LogNormal(500, 1.0, 4096, alike=0.9), LogNormal(500, 1.0, 4096, alike=0.0))
    )
    assert fmean(alike) < fmean(apart) / 2


def test_recorded_lengths_are_drawn_again():
    assert set(Recorded((3, 9)).draw(random.Random(0), 50)) == {3, 9}


def test_lengths_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match="mean 5000"):
        LogNormal(5000, 1.0, longest=4096)
    with pytest.raises(ConfigError, match="at least one"):
        Recorded(())

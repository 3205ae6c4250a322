import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from docs.generate.evidence import DEFINITION, PROPERTY, proves
from slipstream.algos.diagnostics import (
    Diagnosed,
    add_sums,
    critic_figures,
    critic_sums,
    diagnostic_sums,
    effective_sample_share,
    figures_of,
    is_maximum,
)


def seen(garbage: float = 0.0) -> Diagnosed:
    """Two tokens: one clipped and stale, one on policy and rejected; the third is masked."""
    return Diagnosed(
        mask=torch.tensor([True, True, False]),
        keep=torch.tensor([True, False, False]),
        proximal=torch.tensor([-1.5, -2.0, garbage], requires_grad=True),
        behavior=torch.tensor([-1.3, -2.0, garbage]),
        entropy=torch.tensor([0.5, 0.25, garbage]),
        ratio=torch.tensor([1.6, 1.0, garbage]),
        weights=torch.tensor([0.8, 1.0, garbage]),
        clipped_up=torch.tensor([True, False, False]),
        clipped_down=torch.tensor([False, False, False]),
        clipped_dual=torch.tensor([False, False, False]),
    )


def floats(sums: dict[str, Tensor]) -> dict[str, float]:
    assert not any(value.requires_grad for value in sums.values())
    return {name: value.item() for name, value in sums.items()}


@proves(
    "policy/tokens",
    "policy/entropy",
    "policy/ratio",
    "policy/ratio_max",
    "policy/clip_fraction",
    "policy/clip_up",
    "policy/clip_down",
    "policy/clip_dual",
    "staleness/masked",
    "staleness/weight",
    "staleness/correction",
    "staleness/correction_max",
    "staleness/mismatch_kl",
    "staleness/logprob_abs_diff",
    "staleness/ess",
    against=DEFINITION,
)
def test_figures_by_hand():
    everything = Diagnosed(
        mask=torch.tensor([True, True, False, True, True]),
        keep=torch.tensor([True, False, False, True, True]),
        proximal=torch.tensor([-1.5, -2.0, math.nan, -1.0, -0.5]),
        behavior=torch.tensor([-1.3, -2.0, math.nan, -1.5, -0.5]),
        entropy=torch.tensor([0.5, 0.25, math.nan, 0.75, 0.5]),
        ratio=torch.tensor([1.6, 1.0, math.nan, 0.5, 3.0]),
        weights=torch.tensor([0.8, 7.0, math.nan, 1.6, 1.0]),
        clipped_up=torch.tensor([True, False, True, False, False]),
        clipped_down=torch.tensor([False, False, True, True, False]),
        clipped_dual=torch.tensor([True, False, True, False, True]),
    )
    low, high = math.exp(-0.2), math.exp(0.5)  # q / mu of the first and the fourth; else 1
    assert figures_of(floats(diagnostic_sums(everything))) == pytest.approx(
        {
            "policy/tokens": 4,
            "policy/entropy": 0.5,
            "policy/ratio": 6.1 / 4,
            "policy/ratio_max": 3.0,
            "policy/clip_fraction": 3 / 4,  # the first by two clips
            "policy/clip_up": 1 / 4,
            "policy/clip_down": 1 / 4,
            "policy/clip_dual": 2 / 4,
            "staleness/masked": 1 / 4,
            "staleness/weight": 3.4 / 4,
            "staleness/correction": (low + high + 2) / 4,
            "staleness/correction_max": high,
            "staleness/mismatch_kl": ((low - 1 + 0.2) + (high - 1 - 0.5)) / 4,
            "staleness/logprob_abs_diff": 0.7 / 4,
            "staleness/ess": (low + high + 2) ** 2 / (4 * (low**2 + high**2 + 2)),
        },
        rel=1e-5,
    )


def random_tokens(count: int) -> Diagnosed:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(count, generator=generator) for _ in range(5)]
    flags = [torch.rand(count, generator=generator) < 0.5 for _ in range(4)]
    return Diagnosed(
        mask=torch.arange(count) % 4 != 3,
        keep=flags[3],
        proximal=values[0],
        behavior=values[1],
        entropy=values[2],
        ratio=values[3].exp(),
        weights=values[4].exp(),
        clipped_up=flags[0],
        clipped_down=flags[1],
        clipped_dual=flags[2],
    )


def test_figures_by_lag_are_those_of_its_tokens_alone():
    everything = random_tokens(40)
    lags = torch.arange(40) % 5
    figures = figures_of(floats(diagnostic_sums(everything, lags, num_lags=3)))
    for lag in range(3):  # what is older counts to the last
        here = replace(everything, mask=everything.mask & (lags.clamp(max=2) == lag))
        alone = figures_of(floats(diagnostic_sums(here)))
        assert alone["policy/tokens"] > 5
        for name, value in alone.items():
            assert figures[f"{name}@lag{lag}"] == pytest.approx(value), name
    assert not [name for name in figures if "squared" in name]


def test_a_lag_without_tokens_has_no_figure():
    sums = diagnostic_sums(seen(), torch.tensor([0, 0, 1]), num_lags=2)
    figures = figures_of(floats(sums))
    assert figures["staleness/mismatch_kl@lag0"] > 0
    assert not [name for name in figures if name.endswith("@lag1")]
    assert figures_of({"policy/entropy": 3.0}) == {}, "of how many tokens?"


def test_sums_of_parts_are_those_of_the_whole():
    everything = random_tokens(40)
    lags = torch.arange(40) % 3
    total: dict[str, Tensor] = {}
    for part in (slice(0, 7), slice(7, 30), slice(30, 40)):
        cut = Diagnosed(
            **{name: getattr(everything, name)[part] for name in Diagnosed.__dataclass_fields__}
        )
        add_sums(total, diagnostic_sums(cut, lags[part], num_lags=3))
    assert floats(total) == pytest.approx(
        floats(diagnostic_sums(everything, lags, num_lags=3)), rel=1e-5
    )
    assert is_maximum("policy/ratio_max@lag1")
    assert not is_maximum("policy/ratio@lag1")


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -7.0])
def test_masked_tokens_never_matter(garbage: float):
    assert floats(diagnostic_sums(seen(garbage))) == floats(diagnostic_sums(seen()))


@proves("staleness/ess", against=PROPERTY, what="extremes")
def test_equal_ratios_keep_every_sample_and_one_giant_leaves_one():
    assert effective_sample_share(2.0, 4.0) == 1.0
    n = 100
    assert effective_sample_share(1.0 / n, 1.0 / n) == pytest.approx(1.0 / n)
    assert effective_sample_share(0.0, 0.0) == 0.0


@proves(
    "critic/value",
    "critic/return",
    "critic/explained_variance",
    "critic/clip_fraction",
    against=DEFINITION,
)
def test_explained_variance_is_what_the_critic_saves_of_the_variance_of_returns():
    mask = torch.tensor([True, True, True, True, False])
    returns = torch.tensor([0.0, 1.0, 2.0, 3.0, math.nan])
    values = torch.tensor([0.0, 0.5, 2.5, 4.0, math.nan])
    clipped = torch.tensor([True, False, False, False, True])
    figures = critic_figures(
        floats(critic_sums(mask=mask, values=values, returns=returns, is_clipped=clipped))
    )
    assert figures == pytest.approx(
        {
            "critic/clip_fraction": 0.25,
            "critic/value": 1.75,
            "critic/return": 1.5,
            "critic/explained_variance": 1 - (0.25 + 0.25 + 1.0) / 4 / 1.25,
        }
    )

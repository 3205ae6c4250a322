import math

import pytest
import torch

from algos.batch import TrainBatch
from algos.diagnostics import diagnostic_sums, effective_sample_share, figures_of
from algos.losses import Clip


def sums(garbage: float = 0.0) -> dict[str, float]:
    """Two tokens: one clipped and stale, one on policy; the third is masked."""
    batch = TrainBatch(
        current_logprobs=torch.tensor([-1.0, -2.0, garbage], requires_grad=True),
        proximal_logprobs=torch.tensor([-1.5, -2.0, garbage]),
        behavior_logprobs=torch.tensor([-1.3, -2.0, garbage]),
        advantages=torch.zeros(3),
        loss_mask=torch.tensor([True, True, False]),
        global_num_tokens=2,
    )
    entropy = torch.tensor([0.5, 0.25, garbage])
    found = diagnostic_sums(batch, entropy, Clip())
    assert not any(value.requires_grad for value in found.values())
    return {name: value.item() for name, value in found.items()}


def test_sums_by_hand():
    correction = math.exp(-0.2)
    assert sums() == pytest.approx(
        {
            "policy/entropy": 0.75,
            "policy/clip_fraction": 1.0,
            "policy/ratio": math.exp(0.5) + 1.0,
            "staleness/correction": correction + 1.0,
            "staleness/correction_squared": correction**2 + 1.0,
            "staleness/mismatch_kl": correction - 1.0 + 0.2,
            "staleness/logprob_abs_diff": 0.2,
        },
        abs=1e-5,
    )


def test_figures_by_lag_are_those_of_its_tokens_alone():
    log_ratios = torch.tensor([0.0, 0.1, -0.3, 0.5, 0.7])
    lags = torch.tensor([0, 1, 1, 3, 0])
    mask = torch.tensor([True, True, True, True, False])

    def batch_of(chosen: torch.Tensor) -> TrainBatch:
        return TrainBatch(
            current_logprobs=torch.full((5,), -1.0),
            proximal_logprobs=log_ratios - 1.0,
            behavior_logprobs=torch.full((5,), -1.0),
            advantages=torch.zeros(5),
            loss_mask=mask & chosen,
            lags=lags,
            global_num_tokens=5,
        )

    everything = torch.ones(5, dtype=torch.bool)
    sums = diagnostic_sums(batch_of(everything), torch.zeros(5), Clip(), num_lags=3)
    figures = figures_of({name: float(value) for name, value in sums.items()}, 4)
    for lag, count in ((0, 1), (1, 2), (2, 1)):  # what is older counts to the last
        here = lags.clamp(max=2) == lag
        alone = diagnostic_sums(batch_of(here), torch.zeros(5), Clip())
        wanted = figures_of({name: float(value) for name, value in alone.items()}, count)
        for name in ("staleness/mismatch_kl", "staleness/ess", "policy/clip_fraction"):
            assert figures[f"{name}@lag{lag}"] == pytest.approx(wanted[name])
    assert not [name for name in figures if "squared" in name or name.startswith("tokens")]


def test_a_lag_without_tokens_has_no_figure():
    figures = figures_of({"staleness/mismatch_kl@lag1": 0.0, "tokens@lag1": 0.0}, 3)
    assert figures == {}


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -7.0])
def test_masked_tokens_never_matter(garbage: float):
    assert sums(garbage) == sums()


def test_equal_ratios_keep_every_sample_and_one_giant_leaves_one():
    assert effective_sample_share(2.0, 4.0) == 1.0
    n = 100
    assert effective_sample_share(1.0 / n, 1.0 / n) == pytest.approx(1.0 / n)
    assert effective_sample_share(0.0, 0.0) == 0.0

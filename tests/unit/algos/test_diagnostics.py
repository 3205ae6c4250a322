import math

import pytest
import torch

from algos.batch import TrainBatch
from algos.diagnostics import diagnostic_sums, effective_sample_share
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


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -7.0])
def test_masked_tokens_never_matter(garbage: float):
    assert sums(garbage) == sums()


def test_equal_ratios_keep_every_sample_and_one_giant_leaves_one():
    assert effective_sample_share(2.0, 4.0) == 1.0
    n = 100
    assert effective_sample_share(1.0 / n, 1.0 / n) == pytest.approx(1.0 / n)
    assert effective_sample_share(0.0, 0.0) == 0.0

"""What no reference run covers, against the formula as its paper or definition states it.

The statements below are NumPy loops over tokens, one token at a time.
"""

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from algos.corrections import (
    ApproximateProximalOptions,
    CorrectionInputs,
    M2poOptions,
    StalenessDecayOptions,
    approximate_proximal,
    m2po,
    staleness_decay,
)
from algos.kl import Kind, kl_estimate
from algos.packing import Packing
from tests.unit.algos.evidence import DEFINITION, PROPERTY, proves

Array = npt.NDArray[np.float64]


def inputs_of(
    log_ratios: Array, advantages: Array, lags: list[int] | None = None
) -> CorrectionInputs:
    """Return one sequence whose proximal policy is log_ratios above its behavior policy."""
    size = len(log_ratios)
    behavior = torch.full((size,), -2.0, dtype=torch.float64)
    return CorrectionInputs(
        proximal=behavior + torch.from_numpy(log_ratios),
        behavior=behavior,
        advantages=torch.from_numpy(advantages),
        lags=None if lags is None else torch.tensor(lags),
        packing=Packing.of(torch.ones(size, dtype=torch.bool), torch.tensor([0, size])),
    )


# ---- M2PO (arXiv 2510.01161) ----


def kept_by_m2po(log_ratios: Array, advantages: Array, threshold: float) -> list[bool]:
    """Mask the worst token again and again while the second moment is above the threshold."""
    kept = [True] * len(log_ratios)
    while np.mean([r**2 for r, stays in zip(log_ratios, kept, strict=True) if stays]) > threshold:
        pulling_out = [
            (log_ratios[i] ** 2, i)
            for i, stays in enumerate(kept)
            if stays
            and (
                (advantages[i] > 0 and log_ratios[i] > 0)
                or (advantages[i] < 0 and log_ratios[i] < 0)
            )
        ]
        if not pulling_out or sum(kept) == 1:
            break
        kept[max(pulling_out)[1]] = False
    return kept


@proves(m2po, against=DEFINITION)
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("spread", [0.1, 0.3, 1.0])
def test_m2po_masks_the_worst_token_until_the_second_moment_is_within_bounds(
    seed: int, spread: float
):
    generator = np.random.default_rng(seed)
    log_ratios, advantages = generator.normal(size=40) * spread, generator.normal(size=40)
    kept = m2po(inputs_of(log_ratios, advantages), M2poOptions(threshold=0.04)).keep
    assert kept.tolist() == kept_by_m2po(log_ratios, advantages, 0.04)


@proves(m2po, against=DEFINITION)
def test_m2po_drops_no_more_than_it_must():
    log_ratios = np.array([1.0, 0.5, 0.1, 0.1, 0.1])
    keep = m2po(inputs_of(log_ratios, np.ones(5)), M2poOptions(threshold=0.08)).keep
    # with the largest alone gone, the mean is (0.25 + 3 * 0.01) / 4 = 0.07
    assert keep.tolist() == [False, True, True, True, True]


@proves(m2po, against=DEFINITION)
def test_m2po_keeps_tokens_on_their_way_back_however_far_they_are():
    keep = m2po(
        inputs_of(np.array([2.0, -2.0, 1.0]), np.array([-1.0, 1.0, 1.0])), M2poOptions()
    ).keep
    assert keep.tolist() == [True, True, False]


@proves(m2po, against=PROPERTY, what="packing")
def test_m2po_decides_over_all_ranks_whatever_each_of_them_holds():
    generator = np.random.default_rng(0)
    log_ratios, advantages = generator.normal(size=30) * 0.3, generator.normal(size=30)
    whole = m2po(inputs_of(log_ratios, advantages), M2poOptions()).keep
    parts = [inputs_of(log_ratios[part], advantages[part]) for part in (slice(7), slice(7, 30))]
    assert 0 < whole.sum() < 30

    sent: list[list[Tensor]] = []
    for inputs in parts:  # what each rank contributes, in the order of its calls
        calls: list[Tensor] = []
        m2po(
            with_gather(inputs, lambda values, calls=calls: calls.append(values) or values),
            M2poOptions(),
        )
        sent.append(calls)
    everywhere = [torch.cat(of_ranks) for of_ranks in zip(*sent, strict=True)]
    kept = []
    for inputs in parts:
        answers = iter(everywhere)
        kept.append(
            m2po(with_gather(inputs, lambda _, answers=answers: next(answers)), M2poOptions()).keep
        )
    assert torch.cat(kept).tolist() == whole.tolist()


def with_gather(inputs: CorrectionInputs, gather: object) -> CorrectionInputs:
    return CorrectionInputs(
        proximal=inputs.proximal,
        behavior=inputs.behavior,
        advantages=inputs.advantages,
        packing=inputs.packing,
        gather=gather,  # type: ignore[arg-type]  # a lambda with a default argument
    )


# ---- staleness ----


@proves(staleness_decay, against=DEFINITION)
def test_a_weight_decays_with_every_step_of_staleness():
    lags = [0, 1, 2, 5]
    inputs = inputs_of(np.array([0.0, 3.0, -3.0, 0.1]), np.ones(4), lags)
    weights = staleness_decay(inputs, StalenessDecayOptions(decay=0.8)).weights
    assert weights.tolist() == pytest.approx([0.8**lag for lag in lags])


@proves(approximate_proximal, against=DEFINITION)
def test_the_anchor_is_interpolated_to_the_version_before_that_of_the_learner():
    generator = np.random.default_rng(0)
    log_ratios, lags = generator.normal(size=6), [0, 1, 1, 2, 3, 10]
    inputs = inputs_of(log_ratios, np.ones(6), lags)
    learner_version = 12
    expected = []
    for log_ratio, lag in zip(log_ratios, lags, strict=True):
        token_version, anchor_version = learner_version - lag, learner_version - 1
        share = 0.0
        if learner_version > token_version:
            share = (anchor_version - token_version) / (learner_version - token_version)
        expected.append(-2.0 + share * log_ratio)
    result = approximate_proximal(inputs, ApproximateProximalOptions())
    assert result.proximal is not None
    assert result.proximal.tolist() == pytest.approx(expected)
    assert result.keep.all()
    assert (result.weights == 1.0).all()


# ---- straight-through KL (Schulman's k1, k2, k3; gradient of k2) ----


@proves("kl.name = k1+", "kl.name = k3+", against=DEFINITION, what="value, gradient")
@pytest.mark.parametrize("kind", ["k1+", "k3+"])
def test_a_straight_through_kl_has_its_own_value_and_the_gradient_of_half_the_square(kind: Kind):
    generator = np.random.default_rng(0)
    current, reference = -generator.random(12) * 3, -generator.random(12) * 3
    leaf = torch.from_numpy(current).requires_grad_()
    value = kl_estimate(
        kind,
        current=leaf,
        reference=torch.from_numpy(reference),
        mask=torch.ones(12, dtype=torch.bool),
    )
    value.sum().backward()
    difference = current - reference
    ratio = np.exp(reference) / np.exp(current)
    expected = difference if kind == "k1+" else (ratio - 1.0) - np.log(ratio)
    np.testing.assert_allclose(value.detach().numpy(), expected, rtol=1e-9)
    assert leaf.grad is not None
    np.testing.assert_allclose(leaf.grad.numpy(), difference, rtol=1e-12)


@proves("kl.name = k1+", "kl.name = k3+", against=PROPERTY, what="slope")
@pytest.mark.parametrize("kind", ["k1+", "k3+"])
def test_the_gradient_of_a_straight_through_kl_is_on_average_that_of_the_kl(kind: Kind):
    logits = torch.tensor([0.3, -1.0, 0.8, 0.0], dtype=torch.float64).requires_grad_()
    reference = torch.tensor([0.1, 0.4, -0.2, 0.0], dtype=torch.float64).log_softmax(0)
    logprobs = logits.log_softmax(0)
    (exact,) = torch.autograd.grad(
        (logprobs.exp() * (logprobs - reference)).sum(), logits, retain_graph=True
    )
    per_token = kl_estimate(
        kind, current=logprobs, reference=reference, mask=torch.ones(4, dtype=torch.bool)
    )
    # every token of the vocabulary once, as often as it is sampled
    (estimated,) = torch.autograd.grad((logprobs.exp().detach() * per_token).sum(), logits)
    torch.testing.assert_close(estimated, exact, rtol=1e-9, atol=1e-12)

"""What no reference run covers, against the formula as its paper or definition states it.

The statements below are NumPy loops over tokens, one token at a time.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from docs.generate.evidence import DEFINITION, PROPERTY, proves
from slipstream.algos.corrections import (
    ApproximateProximalOptions,
    ClipCovOptions,
    Correction,
    CorrectionInputs,
    ImportanceSamplingOptions,
    KlCovOptions,
    M2poOptions,
    StalenessDecayOptions,
    approximate_proximal,
    clip_cov,
    importance_sampling,
    kl_cov,
    m2po,
    staleness_decay,
)
from slipstream.algos.kl import Kind, kl_estimate
from slipstream.algos.packing import Packing
from slipstream.algos.parts import Options, Part

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


# ---- rules for a whole minibatch ----

WHOLE: dict[str, tuple[Part[..., Correction], Options]] = {
    "m2po": (m2po, M2poOptions()),
    "clip-cov": (clip_cov, ClipCovOptions(share=0.2, low=0.1, high=3.0)),
    "kl-cov": (kl_cov, KlCovOptions(share=0.2)),
    "normalized tokens": (importance_sampling, ImportanceSamplingOptions(normalize=True)),
    "normalized sequences": (
        importance_sampling,
        ImportanceSamplingOptions(normalize=True, level="sequence"),
    ),
}
CUTS = (7, 7, 12, 30)  # of three ranks, one of which holds nothing


def on_ranks(
    part: Part[..., Correction], options: Options, shares: list[CorrectionInputs]
) -> list[Correction]:
    """Return what each rank's correction is, in as many threads that gather together."""
    meet = threading.Barrier(len(shares))
    held: list[Tensor] = [torch.empty(0)] * len(shares)

    def of_rank(rank: int) -> Correction:
        def gather(values: Tensor) -> Tensor:
            held[rank] = values
            meet.wait()
            everything = torch.cat(held)
            meet.wait()
            return everything

        return part(replace(shares[rank], gather=gather), options)

    with ThreadPoolExecutor(len(shares)) as threads:
        return list(threads.map(of_rank, range(len(shares))))


@proves(*(part for part, _ in WHOLE.values()), against=PROPERTY, what="packing")
@pytest.mark.parametrize("name", WHOLE)
def test_a_rule_for_a_minibatch_decides_over_all_ranks_whatever_each_of_them_holds(name: str):
    part, options = WHOLE[name]
    generator = np.random.default_rng(0)
    log_ratios, advantages = generator.normal(size=30) * 0.5, generator.normal(size=30)
    behavior = torch.from_numpy(-3 * generator.random(30))

    def share(first: int, last: int) -> CorrectionInputs:
        at = slice(first, last)
        size = last - first
        starts = torch.tensor([i for i in (0, *CUTS) if first <= i <= last]) - first
        return CorrectionInputs(
            proximal=behavior[at] + torch.from_numpy(log_ratios[at]),
            behavior=behavior[at],
            advantages=torch.from_numpy(advantages[at]),
            packing=Packing.of(torch.ones(size, dtype=torch.bool), starts),
        )

    whole = part(share(0, 30), options)
    found = on_ranks(part, options, [share(*ends) for ends in pairwise((0, *CUTS))])
    assert torch.equal(torch.cat([one.keep for one in found]), whole.keep)
    assert_close(torch.cat([one.weights for one in found]), whole.weights)
    if whole.penalty is not None:
        penalties = [one.penalty for one in found if one.penalty is not None]
        assert torch.equal(torch.cat(penalties), whole.penalty)
    changes = (~whole.keep).sum() + (whole.weights != 1.0).sum()
    assert changes + (0 if whole.penalty is None else (whole.penalty > 0).sum()) > 0


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


# ---- KL of tokens that another policy sampled ----


@proves("kl.importance_weighted", against=DEFINITION, what="value, gradient")
@pytest.mark.parametrize("kind", ["k1", "k3", "k2", "k1+", "k3+"])
def test_a_weighted_kl_and_its_gradient_are_on_average_those_of_the_kl(kind: Kind):
    """Over all tokens of a vocabulary, each as often as mu samples it (arXiv 2512.02556)."""
    logits = torch.tensor([0.3, -1.0, 0.8, 0.0], dtype=torch.float64).requires_grad_()
    reference = torch.tensor([0.1, 0.4, -0.2, 0.0], dtype=torch.float64).log_softmax(0)
    behavior = torch.tensor([-0.5, 0.2, 0.1, 0.9], dtype=torch.float64).log_softmax(0)
    logprobs = logits.log_softmax(0)
    exact = (logprobs.exp() * (logprobs - reference)).sum()
    everything = torch.ones(4, dtype=torch.bool)
    means = [
        (
            behavior.exp()
            * kl_estimate(
                kind,
                current=logprobs,
                reference=reference,
                mask=everything,
                sampled_from=sampled_from,
            )
        ).sum()
        for sampled_from in (behavior, None)
    ]
    (of_exact,) = torch.autograd.grad(exact, logits, retain_graph=True)
    (weighted,) = torch.autograd.grad(means[0], logits, retain_graph=True)
    (plain,) = torch.autograd.grad(means[1], logits)
    if kind != "k2":  # whose value is half a square
        assert_close(means[0], exact)
    assert_close(weighted, of_exact)
    assert (plain - of_exact).abs().max() > 0.01, "without the weight it is another gradient"

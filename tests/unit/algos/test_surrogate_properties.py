"""What holds for every surrogate and every correction, whatever the data."""

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from docs.generate.evidence import PROPERTY, proves
from slipstream.algos.corrections import (
    ApproximateProximalOptions,
    ClipCovOptions,
    Correction,
    CorrectionInputs,
    ImportanceSamplingOptions,
    KlCovOptions,
    M2poOptions,
    OpsmOptions,
    RejectionOptions,
    StalenessDecayOptions,
    VetoOptions,
    approximate_proximal,
    clip_cov,
    combined,
    importance_sampling,
    kl_cov,
    m2po,
    opsm,
    rejection,
    staleness_decay,
    veto,
)
from slipstream.algos.critic import value_loss
from slipstream.algos.kl import Kind, kl_estimate
from slipstream.algos.packing import Packing
from slipstream.algos.parts import NoOptions
from slipstream.algos.surrogates import (
    CispoOptions,
    DppoKlOptions,
    DppoTvOptions,
    DrpoOptions,
    GmpoOptions,
    GspoOptions,
    PpoOptions,
    SapoOptions,
    SurrogateInputs,
    Terms,
    ToprOptions,
    cispo,
    dppo_kl,
    dppo_tv,
    drpo,
    gmpo,
    gspo,
    policy_gradient,
    ppo_clip,
    reinforce_is,
    sapo,
    topr,
)
from tests.unit.algos.microbatch import correction_inputs, packed, surrogate_inputs

SURROGATES: dict[str, tuple[Any, Any]] = {
    "policy-gradient": (policy_gradient, NoOptions()),
    "reinforce-is": (reinforce_is, NoOptions()),
    "ppo-clip": (ppo_clip, PpoOptions(clip_low=0.2, clip_high=0.28)),
    "ppo-clip-dual": (ppo_clip, PpoOptions(clip_dual=3.0)),
    "gspo": (gspo, GspoOptions(clip_low=0.03, clip_high=0.04)),
    "cispo": (cispo, CispoOptions(clip_low=0.5, clip_high=1.0)),
    "sapo": (sapo, SapoOptions()),
    "gmpo": (gmpo, GmpoOptions()),
    "dppo-tv": (dppo_tv, DppoTvOptions()),
    "dppo-kl": (dppo_kl, DppoKlOptions()),
    "drpo": (drpo, DrpoOptions(width=0.05)),
    "topr": (topr, ToprOptions(high=0.9)),
    "topr-token": (topr, ToprOptions(level="token")),
}
CORRECTIONS: dict[str, tuple[Any, Any]] = {
    **{
        f"importance-sampling-{level}": (
            importance_sampling,
            ImportanceSamplingOptions(level=level, low=0.5),
        )
        for level in ("token", "sequence", "geometric")
    },
    **{
        f"rejection-{measure}-{level}": (
            rejection,
            RejectionOptions(measure=measure, level=level, high=1.2 if measure == "ratio" else 0.1),
        )
        for measure, level in [
            ("ratio", "token"),
            ("ratio", "sequence"),
            ("k1", "sequence"),
            ("k2", "sequence-mean"),
            ("k3", "sequence-max"),
        ]
    },
    "rejection-geometric": (rejection, RejectionOptions(level="geometric", low=0.9, high=1.1)),
    "veto": (veto, VetoOptions(threshold=0.5)),
    "opsm": (opsm, OpsmOptions(max_kl=0.05)),
    "rejection-tv": (rejection, RejectionOptions(measure="tv", high=0.05)),
    "rejection-binary-kl": (
        rejection,
        RejectionOptions(measure="binary-kl", level="sequence-mean", high=0.01),
    ),
    "importance-sampling-normalized": (
        importance_sampling,
        ImportanceSamplingOptions(normalize=True),
    ),
    "m2po": (m2po, M2poOptions()),
    "clip-cov": (clip_cov, ClipCovOptions(share=0.5, low=0.0, high=10.0)),
    "kl-cov": (kl_cov, KlCovOptions(share=0.3)),
    "staleness-decay": (staleness_decay, StalenessDecayOptions()),
    "approximate-proximal": (approximate_proximal, ApproximateProximalOptions()),
}
KL_KINDS: tuple[Kind, ...] = ("k1", "k2", "k3", "abs", "low-var", "k1+", "k3+")
GARBAGE = (math.nan, math.inf, -math.inf)

EVERY_SURROGATE = [part for part, _ in SURROGATES.values()]
EVERY_CORRECTION = [part for part, _ in CORRECTIONS.values()]
OF_RATIOS = {name: part for name, (part, _) in CORRECTIONS.items() if "cov" not in name}
every_correction_of_ratios = pytest.mark.parametrize("name", OF_RATIOS)
every_surrogate = pytest.mark.parametrize("name", SURROGATES)
every_correction = pytest.mark.parametrize("name", CORRECTIONS)
some = settings(max_examples=4, deadline=None, derandomize=True, database=None)


@dataclass(frozen=True)
class Batch:
    """Sequences of random tokens, some of them masked out, and of two or more policies."""

    lengths: list[int]
    mask: Tensor  # [T] bool
    current: Tensor  # [T] float64, as all below
    anchor: Tensor
    advantages: Tensor
    lags: Tensor

    def packing(self) -> Packing:
        return Packing.of(self.mask, torch.tensor([0, *self.lengths]).cumsum(0))

    def surrogate_inputs(self, current: Tensor) -> SurrogateInputs:
        return surrogate_inputs(current, self.anchor, self.advantages, self.packing())

    def correction_inputs(self) -> CorrectionInputs:
        return correction_inputs(
            self.current, self.anchor, self.advantages, self.packing(), self.lags
        )

    def spoiled(self, garbage: float) -> "Batch":
        """Return the batch with something else under the mask."""
        fields = ("current", "anchor", "advantages")
        other = {name: torch.where(self.mask, getattr(self, name), garbage) for name in fields}
        return replace(self, lags=torch.where(self.mask, self.lags, -7), **other)

    def reordered(self, order: list[int]) -> "tuple[Batch, Tensor]":
        """Return the sequences in another order, and the place each token came from, [T]."""
        starts = torch.tensor([0, *self.lengths]).cumsum(0)
        taken = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in order])
        moved = Batch(
            [self.lengths[i] for i in order],
            *(t[taken] for t in (self.mask, self.current, self.anchor, self.advantages, self.lags)),
        )
        return moved, taken


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    total = sum(lengths)
    mask = draw(st.lists(st.booleans(), min_size=total, max_size=total))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    spread = draw(st.sampled_from([0.01, 0.2, 1.0]))
    current = -torch.rand(total, generator=generator, dtype=torch.float64) * 3 - 0.01
    moved = torch.randn(total, generator=generator, dtype=torch.float64) * spread
    advantages = torch.randn(total, generator=generator, dtype=torch.float64)
    return Batch(
        lengths,
        torch.tensor(mask),
        current,
        (current + moved).clamp(max=-0.001),
        advantages,
        torch.randint(0, 4, (total,), generator=generator),
    )


def terms_of(name: str, batch: Batch) -> tuple[Terms, Tensor]:
    """Return the terms and d(sum of losses) / d(current), [T]."""
    part, options = SURROGATES[name]
    leaf = batch.current.clone().requires_grad_()
    terms = part(batch.surrogate_inputs(leaf), options)
    (gradient,) = torch.autograd.grad(terms.per_token.sum(), leaf)
    return terms, gradient


def corrected(name: str, inputs: CorrectionInputs) -> Correction:
    part, options = CORRECTIONS[name]
    return part(inputs, options)


def same(one: Correction, other: Correction, at: Tensor | None = None) -> None:
    """Assert that two corrections are equal bit by bit, the first taken at these places."""
    at = torch.arange(len(one.keep)) if at is None else at
    assert torch.equal(one.keep[at], other.keep)
    torch.testing.assert_close(one.weights[at], other.weights, rtol=1e-12, atol=0)
    assert (one.proximal is None) == (other.proximal is None)
    assert (one.penalty is None) == (other.penalty is None)
    if one.penalty is not None and other.penalty is not None:
        assert torch.equal(one.penalty[at], other.penalty)
    if one.proximal is not None and other.proximal is not None:
        torch.testing.assert_close(one.proximal[at], other.proximal, rtol=1e-12, atol=0)


# ---- surrogates ----


@proves(*EVERY_SURROGATE, against=PROPERTY, what="mask")
@every_surrogate
@some
@given(batch=batches(), garbage=st.sampled_from(GARBAGE))
def test_what_is_masked_changes_neither_loss_nor_gradient(name: str, batch: Batch, garbage: float):
    (terms, gradient), (after, gradient_after) = (
        terms_of(name, one) for one in (batch, batch.spoiled(garbage))
    )
    assert torch.equal(terms.per_token, after.per_token)
    assert torch.equal(gradient, gradient_after)
    for flag in ("clipped_up", "clipped_down", "clipped_dual"):
        assert torch.equal(getattr(terms, flag), getattr(after, flag))
        assert not getattr(terms, flag)[~batch.mask].any()
    assert not after.per_token[~batch.mask].any()
    assert not gradient_after[~batch.mask].any()


@proves(*EVERY_SURROGATE, against=PROPERTY, what="order")
@every_surrogate
@some
@given(batch=batches(), data=st.data())
def test_the_order_of_sequences_does_not_matter(name: str, batch: Batch, data: st.DataObject):
    order = data.draw(st.permutations(range(len(batch.lengths))))
    moved, taken = batch.reordered(list(order))
    (terms, gradient), (after, gradient_after) = terms_of(name, batch), terms_of(name, moved)
    torch.testing.assert_close(after.per_token, terms.per_token[taken], rtol=1e-12, atol=0)
    torch.testing.assert_close(gradient_after, gradient[taken], rtol=1e-12, atol=0)


@proves(*EVERY_SURROGATE, against=PROPERTY, what="scale")
@every_surrogate
@some
@given(batch=batches(), factor=st.floats(0.01, 100.0))
def test_loss_and_gradient_are_proportional_to_the_advantages(
    name: str, batch: Batch, factor: float
):
    terms, gradient = terms_of(name, batch)
    scaled, gradient_scaled = terms_of(name, replace(batch, advantages=factor * batch.advantages))
    torch.testing.assert_close(scaled.per_token, factor * terms.per_token, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(gradient_scaled, factor * gradient, rtol=1e-9, atol=1e-12)
    assert torch.equal(scaled.clipped_up, terms.clipped_up)
    assert torch.equal(scaled.clipped_down, terms.clipped_down)


@proves(*EVERY_SURROGATE, against=PROPERTY, what="extremes")
@every_surrogate
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@some
@given(batch=batches(), data=st.data())
def test_extreme_ratios_do_not_overflow(
    name: str, dtype: torch.dtype, batch: Batch, data: st.DataObject
):
    total = len(batch.current)
    extremes = st.lists(
        st.sampled_from([0.0, -1e4, -87.0, -20.0, -0.1, -1e-30]), min_size=total, max_size=total
    )
    spoiled = replace(
        batch,
        current=torch.tensor(data.draw(extremes)).to(dtype),
        anchor=torch.tensor(data.draw(extremes)).to(dtype),
        advantages=(batch.advantages * 100).to(dtype),
    )
    terms, gradient = terms_of(name, spoiled)
    assert terms.per_token.dtype == dtype
    assert terms.per_token.isfinite().all()
    assert terms.ratio.isfinite().all()
    assert gradient.isfinite().all()


@proves(*EVERY_SURROGATE, against=PROPERTY, what="half")
@every_surrogate
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@some
@given(batch=batches())
def test_half_precision_is_upcast_before_anything_is_computed(
    name: str, dtype: torch.dtype, batch: Batch
):
    short = replace(
        batch, **{f: getattr(batch, f).to(dtype) for f in ("current", "anchor", "advantages")}
    )
    long = replace(
        batch, **{f: getattr(short, f).float() for f in ("current", "anchor", "advantages")}
    )
    terms, _ = terms_of(name, short)
    assert terms.per_token.dtype == torch.float32
    assert torch.equal(terms.per_token, terms_of(name, long)[0].per_token)


@every_surrogate
def test_no_gradient_reaches_the_anchor_or_the_advantages(name: str):
    part, options = SURROGATES[name]
    current = torch.tensor([-1.0, -2.0, -0.5]).requires_grad_()
    anchor = torch.tensor([-1.1, -1.9, -0.6]).requires_grad_()
    inputs = surrogate_inputs(current, anchor, torch.tensor([1.0, 1.0, -1.0]), packed(2, 1))
    part(inputs, options).per_token.sum().backward()
    assert anchor.grad is None
    assert current.grad is not None


def test_misaligned_inputs_name_the_tensor():
    three, two = torch.zeros(3), torch.zeros(2)
    with pytest.raises(ValueError, match=r"advantages has shape \(2,\), expected \(3,\)"):
        surrogate_inputs(three, three, two)
    with pytest.raises(ValueError, match=r"lags has shape \(2,\), expected \(3,\)"):
        correction_inputs(three, three, three, lags=two)


# ---- corrections ----


@proves(*EVERY_CORRECTION, against=PROPERTY, what="mask")
@every_correction
@some
@given(batch=batches(), garbage=st.sampled_from(GARBAGE))
def test_what_is_masked_changes_no_correction(name: str, batch: Batch, garbage: float):
    result = corrected(name, batch.spoiled(garbage).correction_inputs())
    same(corrected(name, batch.correction_inputs()), result)
    assert not result.keep[~batch.mask].any()
    assert (result.weights >= 0).all()


@proves(*EVERY_CORRECTION, against=PROPERTY, what="order")
@every_correction
@some
@given(batch=batches(), data=st.data())
def test_the_order_of_sequences_changes_no_correction(name: str, batch: Batch, data: st.DataObject):
    order = data.draw(st.permutations(range(len(batch.lengths))))
    moved, taken = batch.reordered(list(order))
    same(
        corrected(name, batch.correction_inputs()),
        corrected(name, moved.correction_inputs()),
        taken,
    )


@proves(*OF_RATIOS.values(), against=PROPERTY, what="scale")
@every_correction_of_ratios
@some
@given(batch=batches(), factor=st.floats(0.01, 100.0))
def test_the_size_of_advantages_changes_no_correction(name: str, batch: Batch, factor: float):
    scaled = replace(batch, advantages=factor * batch.advantages)
    same(corrected(name, batch.correction_inputs()), corrected(name, scaled.correction_inputs()))


@proves(*OF_RATIOS.values(), against=PROPERTY, what="identity")
@every_correction_of_ratios
@some
@given(batch=batches())
def test_nothing_is_corrected_where_the_policies_are_one(name: str, batch: Batch):
    inputs = replace(batch, anchor=batch.current, lags=torch.zeros_like(batch.lags))
    result = corrected(name, inputs.correction_inputs())
    assert torch.equal(result.keep, batch.mask)
    torch.testing.assert_close(result.weights.double(), torch.ones(len(batch.mask)).double())
    if result.proximal is not None:
        assert torch.equal(result.proximal[batch.mask], batch.current[batch.mask])


@proves(*EVERY_CORRECTION, against=PROPERTY, what="extremes")
@every_correction
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@some
@given(batch=batches(), data=st.data())
def test_corrections_of_extreme_ratios_do_not_overflow(
    name: str, dtype: torch.dtype, batch: Batch, data: st.DataObject
):
    total = len(batch.current)
    extremes = st.lists(st.sampled_from([0.0, -1e4, -87.0, -0.1]), min_size=total, max_size=total)
    spoiled = replace(
        batch,
        current=torch.tensor(data.draw(extremes)).to(dtype),
        anchor=torch.tensor(data.draw(extremes)).to(dtype),
    )
    result = corrected(name, spoiled.correction_inputs())
    assert result.weights.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert result.weights.isfinite().all()
    assert result.proximal is None or bool(result.proximal.isfinite().all())


@every_correction
def test_corrections_carry_no_gradient(name: str):
    proximal = torch.tensor([-1.0, -2.0, -0.5]).requires_grad_()
    behavior = torch.tensor([-1.3, -1.0, -0.6]).requires_grad_()
    lags = torch.tensor([0, 1, 2])
    inputs = correction_inputs(proximal, behavior, torch.ones(3), packed(2, 1), lags)
    result = corrected(name, inputs)
    assert not result.weights.requires_grad
    assert result.proximal is None or not result.proximal.requires_grad


def test_combined_corrections_multiply_weights_and_keep_what_all_keep():
    packing = Packing.of(torch.tensor([True, True, True, False]), torch.tensor([0, 4]))
    one = Correction(
        weights=torch.tensor([2.0, 0.5, 1.0, 1.0]), keep=torch.tensor([True, True, False, False])
    )
    anchor = torch.tensor([-1.0, -2.0, -3.0, 0.0])
    other = Correction(
        weights=torch.tensor([3.0, 1.0, 1.0, 1.0]),
        keep=torch.tensor([False, True, True, False]),
        proximal=anchor,
    )
    both = combined([one, other], packing)
    assert both.weights.tolist() == [6.0, 0.5, 1.0, 1.0]
    assert both.keep.tolist() == [False, True, False, False]
    assert both.proximal is anchor
    nothing = combined([], packing)
    assert nothing.keep.tolist() == packing.mask.tolist()
    assert nothing.weights.tolist() == [1.0] * 4


@pytest.mark.parametrize("name", ["staleness-decay", "approximate-proximal"])
def test_a_correction_by_staleness_asks_for_the_lags(name: str):
    three = torch.zeros(3)
    with pytest.raises(ValueError, match="this correction needs"):
        corrected(name, correction_inputs(three, three, three))


def test_a_rejection_without_meaning_is_refused():
    for overrides, message in [
        ({"high": None}, "needs a bound"),
        ({"low": 2.0, "high": 1.0}, "needs low <= high"),
        ({"measure": "k3", "level": "geometric"}, 'level "geometric" is of ratios'),
    ]:
        with pytest.raises(ValueError, match=message):
            RejectionOptions(**overrides)


# ---- KL and critic ----


@proves(*(f"kl.name = {kind}" for kind in KL_KINDS), against=PROPERTY, what="extremes")
@pytest.mark.parametrize("kind", KL_KINDS)
@pytest.mark.parametrize("distance", [1e4, -1e4])
def test_a_kl_estimate_of_extreme_policies_is_finite(kind: Kind, distance: float):
    leaf = torch.tensor([distance]).requires_grad_()
    value = kl_estimate(kind, current=leaf, reference=torch.zeros(1), mask=torch.tensor([True]))
    (gradient,) = torch.autograd.grad(value.sum(), leaf)
    assert value.isfinite().all()
    assert gradient.isfinite().all()


def test_a_full_kl_is_not_estimated_from_logprobs():
    with pytest.raises(ValueError, match="computed from logits"):
        kl_estimate(
            "full", current=torch.zeros(1), reference=torch.zeros(1), mask=torch.tensor([True])
        )


@proves("critic.clip", "critic.huber", against=PROPERTY, what="mask")
@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("huber", [None, 1.0])
def test_what_is_masked_changes_neither_the_critics_loss_nor_its_gradient(
    garbage: float, huber: float | None
):
    mask = torch.tensor([True, True, False])
    values = torch.tensor([1.0, 2.0, garbage]).requires_grad_()
    spoiled = torch.tensor([4.0, 2.5, garbage])
    per_token, clipped = value_loss(values, spoiled, spoiled, clip=0.2, huber=huber, mask=mask)
    per_token.sum().backward()
    assert per_token[2].item() == 0.0
    assert not clipped[2]
    assert values.grad is not None
    # V = 1 is below V' - 0.2 = 3.8: the loss at V is the larger one and keeps its gradient
    expected = [-3.0, -0.5, 0.0] if huber is None else [-1.0, -0.5, 0.0]
    assert values.grad.tolist() == expected

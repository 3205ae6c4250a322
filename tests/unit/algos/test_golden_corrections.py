"""Corrections against what other systems compute: weights, what is kept, and the corrected loss."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, where

from docs.generate.evidence import proves
from slipstream.algos.corrections import (
    Correction,
    CorrectionInputs,
    ImportanceSamplingOptions,
    OpsmOptions,
    RejectionOptions,
    VetoOptions,
    combined,
    importance_sampling,
    opsm,
    rejection,
    veto,
)
from slipstream.algos.kl import kl_estimate
from slipstream.algos.packing import Packing
from slipstream.algos.ratios import importance_ratio, log_ratio, sequence_ratio
from slipstream.algos.reduce import Denominators, reduced
from slipstream.algos.surrogates import (
    GspoOptions,
    PpoOptions,
    SurrogateInputs,
    Terms,
    gspo,
    ppo_clip,
)
from tests.support.golden import AREAL, MASKS, SLIME, VERL, Golden, Layout, close, golden, layout

UNCAPPED = 1e9  # above exp(20), the largest ratio there is


def correction_inputs(file: Golden, at: Layout) -> CorrectionInputs:
    proximal = at.pack(file.input("old_logp"))
    return CorrectionInputs(
        proximal=proximal,
        behavior=at.pack(file.input("rollout_logp")),
        advantages=torch.ones_like(proximal),
        packing=at.packing,
    )


# ---- verl ----


@proves(importance_sampling, rejection, against=VERL)
def test_importance_weights_are_those_of_verl():
    for mask, level, bounds in [
        *itertools.product(MASKS, ("token", "sequence"), ("2.0", "5.0", "0.5_5.0"))
    ]:
        file, at = golden(VERL, "rollout_is_weights"), layout(mask)
        inputs = correction_inputs(file, at)
        *low, high = (float(bound) for bound in bounds.split("_"))
        result = importance_sampling(inputs, ImportanceSamplingOptions(level=level, high=high))
        if low:  # IcePop: outside its bounds a weight is not capped but 0
            kept = rejection(inputs, RejectionOptions(level=level, low=low[0], high=high))
            result = combined([result, kept], at.packing)
        weights = where(result.keep, result.weights, 0.0)
        close(weights, at.pack(file.out(f"w__{mask}__{level}__{bounds}__bn0")))


VERL_REJECTION = {
    # verl's k1 is bounded by bounds on behavior / proximal: their logarithms are bounds in nats
    "token_k1__0.5_2.0": [RejectionOptions(measure="k1", low=math.log(0.5), high=math.log(2.0))],
    "token_k2__0.1": [RejectionOptions(measure="k2", high=0.1)],
    "token_k3__0.1": [RejectionOptions(measure="k3", high=0.1)],
    "seq_sum_k1__0.5_2.0": [RejectionOptions(level="sequence", low=0.5, high=2.0)],
    "seq_sum_k2__1.0": [RejectionOptions(measure="k2", level="sequence", high=1.0)],
    "seq_sum_k3__1.0": [RejectionOptions(measure="k3", level="sequence", high=1.0)],
    "seq_mean_k1__0.9_1.1": [RejectionOptions(level="geometric", low=1 / 1.1, high=1 / 0.9)],
    "seq_mean_k2__0.05": [RejectionOptions(measure="k2", level="sequence-mean", high=0.05)],
    "seq_mean_k3__0.05": [RejectionOptions(measure="k3", level="sequence-mean", high=0.05)],
    "seq_max_k2__0.3": [RejectionOptions(measure="k2", level="sequence-max", high=0.3)],
    "seq_max_k3__0.3": [RejectionOptions(measure="k3", level="sequence-max", high=0.3)],
    "token_k1,seq_mean_k3__0.5_2.0,0.1": [
        RejectionOptions(low=0.5, high=2.0),
        RejectionOptions(measure="k3", level="sequence-mean", high=0.1),
    ],
}


@proves(rejection, against=VERL)
@pytest.mark.parametrize(("mask", "variant"), [*itertools.product(MASKS, VERL_REJECTION)])
def test_what_is_kept_is_what_verl_keeps(mask: str, variant: str):
    file, at = golden(VERL, "rollout_rejection"), layout(mask)
    inputs = correction_inputs(file, at)
    result = combined([rejection(inputs, one) for one in VERL_REJECTION[variant]], at.packing)
    theirs = at.pack(file.out(f"mask__{mask}__{variant}")) > 0
    assert torch.equal(result.keep, theirs)
    assert 0 < theirs.sum() < at.packing.mask.sum()  # or nothing was compared


@proves("kl.name = k1", "kl.name = k3", against=VERL, what="mean")
@pytest.mark.parametrize("mask", ["mask_prefix", "mask_holes"])
def test_distances_from_the_behavior_policy_are_those_of_verl(mask: str):
    file, at = golden(VERL, "offpolicy_metrics"), layout(mask)
    inputs = correction_inputs(file, at)
    q, mu, packing = inputs.proximal, inputs.behavior, at.packing

    def mean(per_token: Tensor) -> Tensor:
        return per_token[packing.mask].mean()

    log_ratios = log_ratio(target=q, sampled_from=mu, mask=packing.mask)
    ratio = importance_ratio(target=q, sampled_from=mu, mask=packing.mask)
    product = sequence_ratio(log_ratios, packing, geometric=False)
    differences = packing.means(-log_ratios)
    ours = {
        "kl": mean(kl_estimate("k1", current=mu, reference=q, mask=packing.mask)),
        "k3_kl": mean(kl_estimate("k3", current=mu, reference=q, mask=packing.mask)),
        "training_log_ppl": packing.means(-q).mean(),
        "training_ppl": packing.means(-q).exp().mean(),
        "rollout_log_ppl": packing.means(-mu).mean(),
        "rollout_ppl": packing.means(-mu).exp().mean(),
        "log_ppl_diff": differences.mean(),
        "log_ppl_abs_diff": differences.abs().mean(),
        "log_ppl_diff_max": differences.max(),
        "log_ppl_diff_min": differences.min(),
        "ppl_ratio": sequence_ratio(-log_ratios, packing, geometric=True).mean(),
        "chi2_token": mean(ratio.square()) - 1.0,
        "chi2_seq": product.square().mean() - 1.0,
    }
    assert {f"{name}__{mask}" for name in ours} <= set(file.outputs)
    for name, value in ours.items():
        close(value, file.out(f"{name}__{mask}"), atol=1e-7)


# ---- slime ----


@proves(importance_sampling, against=SLIME)
def test_a_truncated_weight_is_that_of_slime():
    for variant, low, high in [("tis_0_2", 0.0, 2.0), ("tis_0.5_2", 0.5, 2.0)]:
        file, at = golden(SLIME, "tis_icepop"), layout("mask_prefix")
        options = ImportanceSamplingOptions(low=low, high=high)
        result = importance_sampling(correction_inputs(file, at), options)
        close(result.weights, at.pack(file.out(f"weight__{variant}")))


@proves(importance_sampling, rejection, against=SLIME)
@pytest.mark.parametrize("high", [5.0, 2.0])
def test_icepop_is_a_bound_on_the_ratio_of_tokens_that_stay_weighed(high: float):
    file, at = golden(SLIME, "tis_icepop"), layout("mask_prefix")
    inputs = correction_inputs(file, at)
    result = combined(
        [
            importance_sampling(inputs, ImportanceSamplingOptions(high=high)),
            rejection(inputs, RejectionOptions(low=0.5, high=high)),
        ],
        at.packing,
    )
    theirs = at.pack(file.out(f"weight__icepop_0.5_{high:g}"))
    close(result.weights * result.keep, theirs)


SLIME_MIS = {
    "token_truncate": [ImportanceSamplingOptions(high=2.0)],
    "token_clip": [ImportanceSamplingOptions(low=0.5, high=2.0)],
    "token_mask": [ImportanceSamplingOptions(high=UNCAPPED), RejectionOptions(low=0.5, high=2.0)],
    "seq_truncate": [ImportanceSamplingOptions(level="sequence", high=2.0)],
    "geo_mask": [
        ImportanceSamplingOptions(level="geometric", high=UNCAPPED),
        RejectionOptions(level="geometric", low=0.9, high=1.1),
    ],
    "token_truncate_rs_geo": [
        ImportanceSamplingOptions(high=2.0),
        RejectionOptions(level="geometric", low=0.9, high=1.1),
    ],
    # without bounds of its own, slime's rejection takes those of the weights
    "token_truncate_rs_token_veto": [
        ImportanceSamplingOptions(high=2.0),
        RejectionOptions(low=0.5, high=2.0),
        VetoOptions(threshold=0.3),
    ],
}


def corrected(
    inputs: CorrectionInputs,
    chosen: list[ImportanceSamplingOptions | RejectionOptions | VetoOptions],
) -> Correction:
    results: list[Correction] = []
    for options in chosen:
        match options:
            case ImportanceSamplingOptions():
                results.append(importance_sampling(inputs, options))
            case RejectionOptions():
                results.append(rejection(inputs, options))
            case VetoOptions():
                results.append(veto(inputs, options))
    return combined(results, inputs.packing)


@proves(importance_sampling, rejection, veto, against=SLIME)
@pytest.mark.parametrize(("mask", "variant"), [*itertools.product(MASKS, SLIME_MIS)])
def test_masked_importance_sampling_is_that_of_slime(mask: str, variant: str):
    file, at = golden(SLIME, "mis"), layout(mask)
    result = corrected(correction_inputs(file, at), SLIME_MIS[variant])
    inside = at.packing.mask
    close(result.weights[inside], at.pack(file.out(f"w__{mask}__{variant}"))[inside])
    theirs = at.pack(file.out(f"mask__{mask}__{variant}"))[inside] > 0
    assert torch.equal(result.keep[inside], theirs)


@proves(opsm, against=SLIME)
@pytest.mark.parametrize("mask", MASKS)
def test_off_policy_sequence_masking_is_that_of_slime(mask: str):
    file, at = golden(SLIME, "gspo_opsm"), layout(mask)
    inputs = CorrectionInputs(
        proximal=at.pack(file.input("logp")),
        behavior=at.pack(file.input("old_logp")),
        advantages=at.pack(file.input("adv_seq")),
        packing=at.packing,
    )
    keep = opsm(inputs, OpsmOptions(max_kl=0.05)).keep
    theirs = at.pack(file.out(f"opsm_mask__{mask}__d0.05")) > 0
    assert torch.equal(keep, theirs & at.packing.mask)
    assert 0 < keep.sum() < at.packing.mask.sum()


# ---- AReaL ----

GEOMETRIC = ImportanceSamplingOptions(level="geometric", high=UNCAPPED)
TOKEN = ImportanceSamplingOptions(high=UNCAPPED)
AREAL_REJECTION = {
    "token_mask_ratio5": [TOKEN, RejectionOptions(high=5.0)],
    "token_mask_ratio2": [TOKEN, RejectionOptions(high=2.0)],
    "token_mask_ratio1.1_0.9": [TOKEN, RejectionOptions(low=0.9, high=1.1)],
    "token_clamp_ratio5": [ImportanceSamplingOptions(high=5.0)],
    "token_clamp_ratio2": [ImportanceSamplingOptions(high=2.0)],
    "token_clamp_ratio1.1_0.9": [ImportanceSamplingOptions(low=0.9, high=1.1)],
    "sequence_mask_ratio5": [GEOMETRIC, RejectionOptions(level="geometric", high=5.0)],
    "sequence_mask_ratio1.1_0.9": [
        GEOMETRIC,
        RejectionOptions(level="geometric", low=0.9, high=1.1),
    ],
    "sequence_clamp_ratio5": [ImportanceSamplingOptions(level="geometric", high=5.0)],
    "sequence_clamp_ratio1.1_0.9": [
        ImportanceSamplingOptions(level="geometric", low=0.9, high=1.1)
    ],
    "seq_mask_k2_0.05": [TOKEN, RejectionOptions(measure="k2", level="sequence-mean", high=0.05)],
    "seq_mask_k3max_0.3": [TOKEN, RejectionOptions(measure="k3", level="sequence-max", high=0.3)],
    "seq_mask_ratio_sum": [GEOMETRIC, RejectionOptions(level="sequence", low=0.5, high=2.0)],
}
SURROGATES = {
    "0.2_0.28": PpoOptions(clip_low=0.2, clip_high=0.28),
    "gspo_0.03_0.04": GspoOptions(clip_low=0.03, clip_high=0.04),
}


def as_areal(inputs: CorrectionInputs, variant: str) -> Correction:
    """Return the correction; AReaL's k3 is that of KL(q || mu), as if q had sampled."""
    weights, *rejections = AREAL_REJECTION[variant]
    swapped = replace(inputs, proximal=inputs.behavior, behavior=inputs.proximal)
    rejected = corrected(swapped if "k3" in variant else inputs, rejections)
    return combined([corrected(inputs, [weights]), rejected], inputs.packing)


@proves(importance_sampling, rejection, against=AREAL)
@proves(ppo_clip, gspo, "reduce.denominator = original", against=AREAL, what="value, gradient")
@pytest.mark.parametrize(
    ("mask", "surrogate", "variant"), [*itertools.product(MASKS, SURROGATES, AREAL_REJECTION)]
)
def test_the_corrected_loss_over_the_original_tokens_is_that_of_areal(
    mask: str, surrogate: str, variant: str
):
    file, at, options = golden(AREAL, "decoupled_ppo"), layout(mask), SURROGATES[surrogate]
    inputs = correction_inputs(file, at)
    correction = as_areal(inputs, variant)
    is_gspo = isinstance(options, GspoOptions)
    current = file.input("logp").requires_grad_()
    # AReaL's sequences are, for the surrogate, what was not rejected of them
    kept = Packing(correction.keep, at.packing.sequence, at.packing.num_sequences)
    given = SurrogateInputs(
        current=at.pack(current),
        anchor=inputs.proximal,
        behavior=inputs.behavior,
        advantages=at.pack(file.input("adv_seq" if is_gspo else "adv_tok")),
        packing=kept,
    )
    terms: Terms = gspo(given, options) if is_gspo else ppo_clip(given, options)
    original = Denominators(num_tokens=float(at.packing.mask.sum()), num_sequences=1)
    loss = reduced(correction.weights * terms.per_token, kept, original, "token-mean")
    loss.backward()
    name = f"{mask}__{surrogate}__{variant}"
    # AReaL's weights are float32: 1e-7 of what is summed
    weights = where(correction.keep, correction.weights, 0.0)
    close(weights, at.pack(file.out(f"w__{name}")), atol=1e-6)
    close(loss, file.out(f"loss__{name}"), atol=1e-6)
    assert current.grad is not None
    gradient, theirs = current.grad, file.out(f"grad__{name}")
    if is_gspo and variant.startswith(("token", "seq_mask_k")):
        # The tokens of a sequence differ in weight. Ours, as verl's, weighs each token's own
        # gradient; AReaL's spreads the sum of the weights over the sequence. The sums are equal.
        gradient, theirs = (packed_sums(at, one) for one in (gradient, theirs))
    close(gradient, theirs, atol=1e-8)


def packed_sums(at: Layout, padded: Tensor) -> Tensor:
    return at.packing.sums(at.pack(padded.double()))

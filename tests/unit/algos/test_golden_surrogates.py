"""Surrogates, reductions, KL estimates and the critic's loss against what other systems compute.

Values and gradients. Where the peer computes in float64, equal means to 1e-5 of the value.
"""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from docs.generate.evidence import proves
from slipstream.algos.critic import value_loss
from slipstream.algos.kl import MAX_LOW_VAR, Kind, kl_estimate
from slipstream.algos.packing import Packing
from slipstream.algos.parts import Options
from slipstream.algos.ratios import MAX_LOG_RATIO, importance_ratio
from slipstream.algos.reduce import Denominators, Rule, reduced
from slipstream.algos.surrogates import (
    CispoOptions,
    DppoKlOptions,
    DppoTvOptions,
    GmpoOptions,
    GspoOptions,
    PpoOptions,
    SapoOptions,
    SurrogateInputs,
    Terms,
    cispo,
    dppo_kl,
    dppo_tv,
    gmpo,
    gspo,
    ppo_clip,
    sapo,
)
from tests.support.golden import (
    AREAL,
    MASKS,
    RULES,
    SLIME,
    VERL,
    WIDTH,
    Golden,
    Layout,
    close,
    denominators_of,
    golden,
    layout,
)


def fraction(flags: Tensor, packing: Packing) -> Tensor:
    return flags.sum().double() / packing.counts.sum()


def surrogate_inputs(
    file: Golden, at: Layout, names: tuple[str, str, str]
) -> tuple[SurrogateInputs, Tensor]:
    """Return inputs, and the leaf of the current policy in the padded layout."""
    current = file.input(names[0]).requires_grad_()
    anchor = at.pack(file.input(names[1]))
    inputs = SurrogateInputs(
        current=at.pack(current),
        anchor=anchor,
        behavior=anchor,
        advantages=at.pack(file.input(names[2])),
        packing=at.packing,
    )
    return inputs, current


# ---- verl ----

VERL_SURROGATES = {
    "ppo_vanilla": ppo_clip,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "gmpo_geo_mean": gmpo,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
}


def verl_options(function: str, settings: dict[str, Any]) -> Options:
    low, high = settings.get("clip_ratio_low"), settings.get("clip_ratio_high")
    dual = settings.get("clip_ratio_c")
    match function:
        case "ppo_vanilla":
            return PpoOptions(clip_low=low, clip_high=high, clip_dual=dual)
        case "gspo":
            return GspoOptions(clip_low=low, clip_high=high)
        case "cispo":
            return CispoOptions(clip_low=low, clip_high=high)
        case "sapo":
            return SapoOptions(tau_positive=settings["tau_pos"], tau_negative=settings["tau_neg"])
        case "gmpo_geo_mean":
            return GmpoOptions(clip_low=low, clip_high=high)
        case "dppo_tv":
            return DppoTvOptions(clip_low=low, clip_high=high, max_weight=dual)
        case _:
            return DppoKlOptions(clip_low=low, clip_high=high, max_weight=dual)


def verl_cases() -> list[tuple[str, str, str]]:
    return [
        (function, mask, variant)
        for function in VERL_SURROGATES
        for mask in MASKS
        for variant in golden(VERL, function).hparams
        if f"loss__{mask}__{variant}" in golden(VERL, function).outputs
    ]


@proves(*VERL_SURROGATES.values(), against=VERL, what="value, gradient")
@pytest.mark.parametrize(("function", "mask", "variant"), verl_cases())
def test_the_loss_its_gradient_and_what_is_clipped_are_those_of_verl(
    function: str, mask: str, variant: str
):
    file, at = golden(VERL, function), layout(mask)
    settings = file.hparams[variant]
    suffix = "_ext" if settings["ext"] else ""
    inputs, current = surrogate_inputs(
        file, at, (f"logp{suffix}", f"old_logp{suffix}", settings["adv"])
    )
    terms: Terms = VERL_SURROGATES[function](inputs, verl_options(function, settings))
    per_token = terms.per_token
    if settings["rollout_is_weights"]:
        per_token = per_token * importance_ratio(
            target=inputs.anchor,
            sampled_from=at.pack(file.input("rollout_logp")),
            mask=at.packing.mask,
        ).clamp(max=2.0)
    # verl's gmpo is a mean over sequences whatever its setting is
    rule = RULES["seq-mean-token-mean" if function == "gmpo_geo_mean" else settings["agg"]]
    loss = reduced(per_token, at.packing, denominators_of(at.packing), rule)
    loss.backward()
    close(loss, file.out(f"loss__{mask}__{variant}"))
    assert current.grad is not None
    close(current.grad, file.out(f"grad__{mask}__{variant}"))
    if function != "gmpo_geo_mean":  # verl counts clips that take no gradient as well
        clipped = terms.clipped_up | terms.clipped_down
        close(
            fraction(clipped, at.packing),
            file.out(f"pg_clipfrac__{mask}__{variant}"),
            atol=1e-7,  # verl's flags are float32
        )
    if function == "ppo_vanilla":
        close(
            fraction(terms.clipped_dual, at.packing),
            file.out(f"pg_clipfrac_lower__{mask}__{variant}"),
            atol=1e-7,
        )


@proves(*(f"reduce.name = {rule}" for rule in RULES.values()), against=VERL, what="value, gradient")
@pytest.mark.parametrize(("mask", "name"), [*itertools.product(MASKS, RULES)])
def test_each_reduction_is_that_of_verl(mask: str, name: str):
    file, packing = golden(VERL, "agg_loss"), layout(mask).packing
    losses = file.input("loss_mat").requires_grad_()
    loss = reduced(layout(mask).pack(losses), packing, denominators_of(packing), RULES[name])
    loss.backward()
    close(loss, file.out(f"loss__{mask}__{name}"))
    assert losses.grad is not None
    close(losses.grad, file.out(f"grad__{mask}__{name}"))


@proves(*(f"reduce.name = {rule}" for rule in RULES.values()), against=VERL, what="by rank")
@pytest.mark.parametrize(("mask", "name"), [*itertools.product(MASKS, RULES)])
def test_a_reduction_by_global_counts_is_verls_of_one_rank_without_its_factor(mask: str, name: str):
    file, at = golden(VERL, "agg_loss"), layout(mask)
    settings = file.hparams["dp2"]
    counts = Denominators(
        num_tokens=settings["batch_num_tokens"],
        num_sequences=settings["global_batch_size"],
        length=WIDTH,
    )
    loss = reduced(at.pack(file.input("loss_mat")), at.packing, counts, RULES[name])
    # verl multiplies by the number of ranks because its ranks' gradients are averaged
    close(loss * settings["dp_size"], file.out(f"loss_dp2__{mask}__{name}"))


@proves("reduce.length", against=VERL)
@pytest.mark.parametrize("mask", MASKS)
def test_the_constant_length_is_verls_scale_factor(mask: str):
    file, at = golden(VERL, "agg_loss"), layout(mask)
    counts = denominators_of(at.packing, length=64)
    loss = reduced(
        at.pack(file.input("loss_mat")), at.packing, counts, "sequence-mean-token-sum-norm"
    )
    close(loss, file.out(f"loss__{mask}__seq-mean-token-sum-norm__scale64"))


@proves("critic.clip", against=VERL, what="value, gradient")
@pytest.mark.parametrize(("mask", "clip", "name"), [*itertools.product(MASKS, (0.2, 0.5), RULES)])
def test_the_critics_loss_is_that_of_verl(mask: str, clip: float, name: str):
    file, at = golden(VERL, "value_loss"), layout(mask)
    values = file.input("vpreds").requires_grad_()
    per_token, clipped = value_loss(
        at.pack(values),
        at.pack(file.input("returns")),
        at.pack(file.input("values")),
        clip=clip,
        huber=None,
        mask=at.packing.mask,
    )
    loss = reduced(per_token, at.packing, denominators_of(at.packing), RULES[name])
    loss.backward()
    variant = f"{mask}__c{clip}__{name}"
    close(loss, file.out(f"loss__{variant}"))
    assert values.grad is not None
    close(values.grad, file.out(f"grad__{variant}"))
    close(fraction(clipped, at.packing), file.out(f"clipfrac__{variant}"), atol=1e-7)


# ---- KL ----

POLICIES = {"ref": ("logp", "ref_logp"), "ext": ("logp_ext", "old_logp_ext")}


def estimated(file: Golden, kind: Kind, policies: str) -> tuple[Tensor, Tensor]:
    """Return the estimate and its gradient, [N, L]."""
    current, reference = (file.input(name) for name in POLICIES[policies])
    leaf = current.flatten().requires_grad_()
    estimate = kl_estimate(
        kind,
        current=leaf,
        reference=reference.flatten(),
        mask=torch.ones(leaf.shape, dtype=torch.bool),
    )
    estimate.sum().backward()
    assert leaf.grad is not None
    return estimate.detach().view(current.shape), leaf.grad.view(current.shape)


@proves(
    *(f"kl.name = {kind}" for kind in ("k1", "k2", "abs", "low-var", "k1+")),
    against=VERL,
    what="value, gradient",
)
@pytest.mark.parametrize("policies", POLICIES)
@pytest.mark.parametrize(
    ("verl", "kind"),
    [
        ("k1", "k1"),
        ("kl", "k1"),
        ("abs", "abs"),
        ("k2", "k2"),
        ("mse", "k2"),
        ("k3", "low-var"),
        ("low_var_kl", "low-var"),
        ("k1+", "k1+"),
    ],
)
def test_a_kl_estimate_and_its_gradient_are_those_of_verl(verl: str, kind: Kind, policies: str):
    file = golden(VERL, "kl_penalty")
    value, gradient = estimated(file, kind, policies)
    close(value, file.out(f"kl__{verl}__{policies}"))
    close(gradient, file.out(f"grad__{verl}__{policies}"))


@proves("kl.name = k3+", against=VERL, what="value, gradient")
@pytest.mark.parametrize("policies", POLICIES)
def test_k3_plus_is_verls_up_to_the_bound_that_verl_puts_on_k3(policies: str):
    file = golden(VERL, "kl_penalty")
    value, gradient = estimated(file, "k3+", policies)
    close(value.clamp(max=MAX_LOW_VAR), file.out(f"kl__k3+__{policies}"))
    close(gradient, file.out(f"grad__k3+__{policies}"))


@proves(
    *(f"kl.name = {kind}" for kind in ("k1", "k2", "k3", "low-var")),
    against=SLIME,
    what="value, gradient",
)
@pytest.mark.parametrize("policies", POLICIES)
@pytest.mark.parametrize(
    ("slime", "kind"), [("k1", "k1"), ("k2", "k2"), ("k3", "k3"), ("low_var_kl", "low-var")]
)
def test_a_kl_estimate_and_its_gradient_are_those_of_slime(slime: str, kind: Kind, policies: str):
    file = golden(SLIME, "approx_kl")
    value, gradient = estimated(file, kind, policies)
    theirs, their_gradient = (
        file.out(f"kl__{slime}__{policies}"),
        file.out(f"grad__{slime}__{policies}"),
    )
    comparable = torch.ones(value.shape, dtype=torch.bool)
    if kind == "k3":  # slime's has no bound: 7e10 where the reference is 25 nats above
        current, reference = (file.input(name) for name in POLICIES[policies])
        comparable = reference - current < MAX_LOG_RATIO
        assert (~comparable).sum() == (policies == "ext")
    # slime subtracts in float32: 1e-7 nats, of which k3 of a small difference keeps 1e-4
    close(value[comparable], theirs[comparable], atol=1e-6)
    close(gradient[comparable], their_gradient[comparable], atol=1e-6)


@pytest.mark.parametrize(
    ("slime", "kind"), [("k1", "k1"), ("k2", "k2"), ("k3", "k3"), ("low_var_kl", "low-var")]
)
def test_a_kl_estimate_times_the_importance_ratio_is_slimes_unbiased_one(slime: str, kind: Kind):
    file = golden(SLIME, "approx_kl")
    value, _ = estimated(file, kind, "ref")
    ratio = importance_ratio(
        target=file.input("logp"),
        sampled_from=file.input("old_logp"),
        mask=torch.ones(value.shape, dtype=torch.bool),
    )
    theirs = file.out(f"kl__{slime}__ref__unbiased_ratio")
    close(
        (ratio * value).clamp(max=MAX_LOW_VAR) if kind == "low-var" else ratio * value,
        theirs,
        atol=1e-6,
    )


# ---- slime ----

SLIME_PPO = {
    "0.2_0.28": PpoOptions(clip_low=0.2, clip_high=0.28),
    "0.2_0.28_c3": PpoOptions(clip_low=0.2, clip_high=0.28, clip_dual=3.0),
    "0.2_0.28_c1.2": PpoOptions(clip_low=0.2, clip_high=0.28, clip_dual=1.2),
    "0.2_0.2": PpoOptions(clip_low=0.2, clip_high=0.2),
}
SLIME_CISPO = {
    "0.2_0.28": CispoOptions(clip_low=0.2, clip_high=0.28),
    "1_4": CispoOptions(clip_low=1.0, clip_high=4.0),
}


@proves(ppo_clip, cispo, against=SLIME, what="value, gradient")
@pytest.mark.parametrize(
    ("function", "variant"),
    [
        *(("policy_loss", variant) for variant in SLIME_PPO),
        *(("cispo", variant) for variant in SLIME_CISPO),
    ],
)
def test_the_losses_of_tokens_and_their_gradient_are_those_of_slime(function: str, variant: str):
    file, at = golden(SLIME, function), layout("mask_prefix")
    inputs, current = surrogate_inputs(file, at, ("logp", "old_logp", "adv_tok"))
    if function == "cispo":
        terms: Terms = cispo(inputs, SLIME_CISPO[variant])
    else:
        terms = ppo_clip(inputs, SLIME_PPO[variant])
    terms.per_token.sum().backward()
    close(terms.per_token, at.pack(file.out(f"loss_mat__{variant}")))
    assert current.grad is not None
    close(at.pack(current.grad), at.pack(file.out(f"grad_of_sum__{variant}")))
    clipped = terms.clipped_up | terms.clipped_down
    assert torch.equal(clipped, at.pack(file.out(f"clipfrac_mat__{variant}")) > 0)


@proves(gspo, against=SLIME, what="value, gradient")
@pytest.mark.parametrize("mask", MASKS)
def test_the_sequence_ratio_and_loss_of_gspo_are_those_of_slime(mask: str):
    file, at = golden(SLIME, "gspo_opsm"), layout(mask)
    inputs, current = surrogate_inputs(file, at, ("logp", "old_logp", "adv_seq"))
    terms = gspo(inputs, GspoOptions(clip_low=0.03, clip_high=0.04))
    terms.per_token.sum().backward()
    inside = at.packing.mask
    close(terms.ratio[inside].log(), -at.pack(file.out(f"seq_kl__{mask}"))[inside])
    close(terms.per_token, at.pack(file.out(f"loss_mat_masked__{mask}__0.03_0.04")))
    assert current.grad is not None
    close(current.grad, file.out(f"grad_of_sum__{mask}"))


@proves("reduce.name = sequence-mean-token-mean", "reduce.name = token-sum", against=SLIME)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    ("rule", "variant"),
    [("sequence-mean-token-mean", "per_token_False"), ("token-sum", "per_token_True")],
)
def test_a_reduction_before_its_division_is_slimes_sum(mask: str, rule: Rule, variant: str):
    file, at = golden(SLIME, "sum_of_sample_mean"), layout(mask)
    undivided = Denominators(num_tokens=1, num_sequences=1)
    ours = reduced(at.pack(file.input("adv_tok")), at.packing, undivided, rule)
    close(ours, file.out(f"sum__{mask}__{variant}"))


# ---- AReaL ----

AREAL_PPO = {
    "0.2": PpoOptions(clip_low=0.2, clip_high=0.2),
    "0.2_0.28": PpoOptions(clip_low=0.2, clip_high=0.28),
    "0.2_0.28_c3": PpoOptions(clip_low=0.2, clip_high=0.28, clip_dual=3.0),
    "0.2_0.28_c1.2": PpoOptions(clip_low=0.2, clip_high=0.28, clip_dual=1.2),
    "gspo_0.03_0.04": GspoOptions(clip_low=0.03, clip_high=0.04),
}


@proves(ppo_clip, gspo, against=AREAL, what="value, gradient")
@pytest.mark.parametrize(("mask", "variant"), [*itertools.product(MASKS, AREAL_PPO)])
def test_the_loss_its_gradient_and_what_is_clipped_are_those_of_areal(mask: str, variant: str):
    file, at, options = golden(AREAL, "decoupled_ppo"), layout(mask), AREAL_PPO[variant]
    is_gspo = isinstance(options, GspoOptions)
    advantages = "adv_seq" if is_gspo else "adv_tok"
    inputs, current = surrogate_inputs(file, at, ("logp", "old_logp", advantages))
    terms: Terms = gspo(inputs, options) if is_gspo else ppo_clip(inputs, options)
    loss = reduced(terms.per_token, at.packing, denominators_of(at.packing), "token-mean")
    loss.backward()
    name = f"{mask}__{variant}__none"
    close(loss, file.out(f"loss__{name}"))
    assert current.grad is not None
    close(current.grad, file.out(f"grad__{name}"))
    clipped = terms.clipped_up | terms.clipped_down
    close(fraction(clipped, at.packing), file.out(f"clipfrac__{name}"), atol=1e-7)
    close(fraction(terms.clipped_dual, at.packing), file.out(f"dualfrac__{name}"), atol=1e-7)


@proves("critic.clip", "critic.huber", against=AREAL, what="value, gradient")
@pytest.mark.parametrize(
    ("mask", "clip", "form"), [*itertools.product(MASKS, (0.2, 0.5), ("mse", "huber"))]
)
def test_the_critics_loss_is_that_of_areal(mask: str, clip: float, form: str):
    file, at = golden(AREAL, "critic_loss"), layout(mask)
    values = file.input("vpreds").requires_grad_()
    per_token, _ = value_loss(
        at.pack(values),
        at.pack(file.input("returns")),
        at.pack(file.input("values")),
        clip=clip,
        huber=file.hparams["huber_delta"] if form == "huber" else None,
        mask=at.packing.mask,
    )
    loss = reduced(per_token, at.packing, denominators_of(at.packing), "token-mean")
    loss.backward()
    name = f"{mask}__c{clip}__{form}"
    close(loss, file.out(f"loss__{name}"), atol=1e-7)  # AReaL computes in float32
    assert values.grad is not None
    close(values.grad, file.out(f"grad__{name}"), atol=1e-8)
    # AReaL's flags are not compared: in float32 V' + (V - V') is not V, and where rounding makes
    # the loss larger, the flag is set on a value that nothing clipped

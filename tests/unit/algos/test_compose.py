"""Whole algorithms: packing and splitting change nothing, and neither does what is masked."""

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from docs.generate.evidence import DEFINITION, PROPERTY, proves
from slipstream.algos.advantages import Outcomes
from slipstream.algos.compose import Algorithm
from slipstream.algos.config import choice_of
from slipstream.algos.diagnostics import add_sums, figures_of
from slipstream.algos.packing import Packing
from slipstream.algos.presets import PRESETS
from slipstream.algos.reduce import group_divisors
from slipstream.algos.section import AlgoSection
from tests.support.golden import AREAL, MASKS, VERL, golden, layout
from tests.unit.algos.microbatch import microbatch_loss

OWN = "tests.support.own_parts"
SURROGATES = (
    "policy-gradient",
    "reinforce-is",
    "ppo-clip",
    "gspo",
    "cispo",
    "sapo",
    "gmpo",
    "dppo-tv",
    "dppo-kl",
    "drpo",
    "topr",
    f"{OWN}:square",
)
RULES = (
    "token-mean",
    "group-mean-token-mean",
    "sequence-mean-token-mean",
    "sequence-mean-token-sum",
    "sequence-mean-token-sum-norm",
    "token-sum",
)
KL_KINDS = ("k1", "k2", "k3", "abs", "low-var", "k1+", "k3+", "full")
LENGTHS = (5, 3, 8, 1, 6)


def algorithm(**settings: object) -> Algorithm:
    table = {"preset": "decoupled-ppo", **settings}
    return Algorithm(choice_of(msgspec.convert(table, AlgoSection)), max_response_tokens=8)


def cut(sequences: range, seed: int = 0) -> dict[str, Any]:
    """Return some of five random sequences as one microbatch, in float64."""
    rng = np.random.default_rng(seed)
    lengths = np.array(LENGTHS)
    ends = lengths.cumsum()
    rows = slice(ends[sequences.start] - lengths[sequences.start], ends[sequences.stop - 1])

    def tokens(scale: float, shift: float = 0.0) -> Tensor:
        return torch.from_numpy(shift + scale * rng.normal(size=ends[-1]))[rows]

    current = tokens(0.5, -2.0)
    advantages = torch.from_numpy(np.repeat(rng.normal(size=5), lengths))[rows]
    mask = torch.from_numpy(rng.random(ends[-1]) < 0.8)[rows]
    numbers = torch.from_numpy(np.repeat(np.arange(5), lengths))[rows] - sequences.start
    return {
        "current": current.requires_grad_(),
        "proximal": (current.detach() + tokens(0.2)),
        "behavior": (current.detach() + tokens(0.4)),
        "reference": (current.detach() + tokens(0.3)),
        "full_kl": tokens(0.1).abs().requires_grad_(),
        "entropy": tokens(0.1, 1.0).requires_grad_(),
        "lags": torch.from_numpy(rng.integers(0, 3, ends[-1]))[rows],
        "copies": torch.tensor([1, 2, 0, 1, 3])[sequences.start : sequences.stop],
        "advantages": advantages,
        "packing": Packing(mask, numbers, len(sequences)),
    }


def losses(chosen: Algorithm, parts: list[range]) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Return loss, gradient and figures of all five sequences, in several microbatches."""
    whole = cut(range(5))
    tokens = whole["packing"].counts * whole["copies"]
    denominators = chosen.denominators(
        float(tokens.sum()),
        float(((whole["packing"].counts > 0) * whole["copies"]).sum()),
        group_divisors(tokens, torch.tensor([0, 1, 0, 1, 1]), 2),
    )
    total, gradients, sums = torch.zeros((), dtype=torch.float64), [], {}
    for part in parts:
        given = cut(part)
        mine = denominators.of(torch.arange(part.start, part.stop))
        loss, more = microbatch_loss(chosen, **given, denominators=mine, num_lags=3)
        leaves = [given[name] for name in ("current", "entropy", "full_kl")]
        found = torch.autograd.grad(loss, leaves, allow_unused=True)
        gradients.append(
            torch.cat(
                [
                    torch.zeros_like(x) if g is None else g
                    for x, g in zip(leaves, found, strict=True)
                ]
            ).reshape(3, -1)
        )
        total = total + loss.detach()
        add_sums(sums, more)
    return total, torch.cat(gradients, 1), figures_of({n: float(v) for n, v in sums.items()})


EVERYTHING = {
    "correction": {"importance-sampling": {"high": 1.5}, "rejection": {"high": 1.9, "low": 0.4}},
    "entropy_bonus": 0.1,
    "kl": {"coefficient": 0.3, "name": "k3"},
}


@proves(
    *(f"surrogate = {name}" for name in SURROGATES if ":" not in name),
    against=PROPERTY,
    what="packing",
)
@proves(
    *(f"reduce.name = {rule}" for rule in RULES), "entropy_bonus", against=PROPERTY, what="packing"
)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("surrogate", SURROGATES)
def test_loss_and_gradient_do_not_depend_on_packing(surrogate: str, rule: str):
    chosen = algorithm(surrogate=surrogate, reduce=rule, **EVERYTHING)
    loss, gradient, figures = losses(chosen, [range(5)])
    split = losses(chosen, [range(2), range(2, 3), range(3, 5)])
    assert_close(split[0], loss)
    assert_close(split[1], gradient)
    assert split[2] == pytest.approx(figures, rel=1e-5)
    assert gradient[0].abs().max() > 1e-3
    assert gradient[1].abs().max() > 1e-4


@pytest.mark.parametrize("preset", [p for p in PRESETS if p != "m2po"])
def test_presets_do_not_depend_on_packing(preset: str):
    chosen = algorithm(preset=preset)
    loss, gradient, _ = losses(chosen, [range(5)])
    split = losses(chosen, [range(1), range(1, 5)])
    assert_close(split[0], loss)
    assert_close(split[1], gradient)


@proves(*(f"kl.name = {kind}" for kind in KL_KINDS), "entropy_bonus", against=PROPERTY, what="mask")
@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("kl", KL_KINDS)
def test_what_is_masked_changes_neither_value_nor_gradient(kl: str, garbage: float):
    chosen = algorithm(**{**EVERYTHING, "kl": {"coefficient": 0.3, "name": kl}})
    denominators = chosen.denominators(10.0, 4.0)
    results = []
    for value in (0.0, garbage):
        given = cut(range(5))
        mask = given["packing"].mask
        for name, tensor in given.items():
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                changed = torch.where(mask, tensor.detach(), value)
                given[name] = changed.requires_grad_(tensor.requires_grad)
        loss, sums = microbatch_loss(chosen, **given, denominators=denominators, num_lags=2)
        leaves = [given[name] for name in ("current", "entropy")]
        gradient = torch.cat(torch.autograd.grad(loss, leaves))
        results.append((loss.detach(), gradient, torch.stack(list(sums.values()))))
    for clean, dirty in zip(*results, strict=True):
        assert clean.isfinite().all()
        assert torch.equal(clean, dirty)


@proves("kl.name = full", "kl.coefficient", against=DEFINITION, what="in the loss")
def test_the_full_divergence_moves_the_loss_by_its_coefficient():
    without = losses(algorithm(), [range(5)])
    with_kl = losses(algorithm(kl={"coefficient": 0.5, "name": "full"}), [range(5)])
    given = cut(range(5))
    mask, copies = given["packing"].mask, given["copies"][given["packing"].sequence]
    mean = (given["full_kl"] * copies)[mask].sum() / (copies * mask).sum()
    assert_close(with_kl[0] - without[0], 0.5 * mean.detach())


@proves("reduce.denominator = kept", against=DEFINITION)
def test_denominator_kept_counts_kept_tokens_only():
    settings = {"correction": {"rejection": {"high": 1.2}}, "surrogate": "reinforce-is"}
    original, kept = algorithm(**settings), algorithm(reduce={"denominator": "kept"}, **settings)
    given = cut(range(5))
    given["copies"] = None
    mask = given["packing"].mask
    keep = mask & ((given["proximal"] - given["behavior"]).exp() <= 1.2)
    assert 0 < keep.sum() < mask.sum()
    of_all, _ = microbatch_loss(
        original, **given, denominators=original.denominators(float(mask.sum()), 5.0)
    )
    of_kept, _ = microbatch_loss(
        kept,
        **given,
        denominators=kept.denominators(float(mask.sum()), 5.0),
        kept=kept.denominators(float(keep.sum()), 5.0),
    )
    assert_close(of_kept * keep.sum(), of_all * mask.sum())


def test_copies_are_as_if_the_sequence_were_there_so_often():
    chosen = algorithm(**EVERYTHING)
    given = cut(range(5))
    denominators = chosen.denominators(20.0, 7.0)
    once, _ = microbatch_loss(chosen, **given, denominators=denominators)
    total = torch.zeros((), dtype=torch.float64)
    for i, count in enumerate([1, 2, 0, 1, 3]):
        alone = cut(range(i, i + 1))
        alone["copies"] = None
        loss, _ = microbatch_loss(chosen, **alone, denominators=denominators)
        total = total + count * loss
    assert_close(once, total)


def test_a_correction_known_before_is_the_one_that_is_used():
    chosen = algorithm()
    given = cut(range(5))
    given["denominators"] = chosen.denominators(20.0, 5.0)
    known = chosen.correct(
        proximal=given["proximal"],
        behavior=given["behavior"],
        advantages=given["advantages"],
        lags=given["lags"],
        packing=given["packing"],
    )
    loss, _ = microbatch_loss(chosen, **given)
    assert_close(microbatch_loss(chosen, **given, correction=known)[0], loss)
    doubled = replace(known, weights=2 * known.weights)
    assert_close(microbatch_loss(chosen, **given, correction=doubled)[0], 2 * loss)


def test_weights_are_of_the_proximal_policy_that_replaces_the_given_one():
    """Decoupled PPO's factors cancel: q' / mu times pi / q' is pi / mu, whatever q' is."""
    chosen = algorithm(
        surrogate="reinforce-is",
        correction={"importance-sampling": {"high": 1e9}, "approximate-proximal": {}},
    )
    given = cut(range(5))
    given["current"] = given["proximal"].clone().requires_grad_()
    loss, _ = microbatch_loss(chosen, **given, denominators=chosen.denominators(20.0, 5.0))
    plain = algorithm(surrogate="reinforce-is", anchor="behavior", correction="none")
    expected, _ = microbatch_loss(plain, **given, denominators=plain.denominators(20.0, 5.0))
    assert_close(loss, expected)


def test_misaligned_tensors_are_refused_by_name():
    chosen = algorithm()
    given = cut(range(5))
    given["lags"] = given["lags"][1:]
    with pytest.raises(ValueError, match="lags has shape"):
        microbatch_loss(chosen, **given, denominators=chosen.denominators(1.0, 1.0))
    given = cut(range(5))
    given["current"] = given["current"][1:]
    with pytest.raises(ValueError, match="current logprobs have shape"):
        microbatch_loss(chosen, **given, denominators=chosen.denominators(1.0, 1.0))


def test_the_current_policy_is_the_proximal_one_where_no_other_is_known():
    chosen = algorithm(**EVERYTHING)
    given = cut(range(5))
    given["denominators"] = chosen.denominators(20.0, 5.0)
    given["proximal"] = None
    loss, _ = microbatch_loss(chosen, **given)
    given["proximal"] = given["current"].detach()
    assert torch.equal(loss, microbatch_loss(chosen, **given)[0])


def outcomes() -> Outcomes:
    return Outcomes(
        rewards=torch.tensor([1.0, 0.0, 2.0, 2.0]),
        groups=torch.tensor([0, 0, 1, 1]),
        num_groups=2,
        lengths=torch.tensor([8, 4, 6, 7]),
    )


def prepared(**data: object) -> tuple[list[float], list[int]]:
    truncated = torch.tensor([True, False, False, False])
    result = algorithm(data=data).prepared(outcomes(), truncated, torch.Generator().manual_seed(0))
    return result.rewards.tolist(), result.copies.tolist()


@proves("data.bias", "data.scale", "data.clip", "data.normalize = batch", against=DEFINITION)
@proves(
    "data.overlong_buffer", "data.overlong_filter", "data.zero_variance = mask", against=DEFINITION
)
def test_rewards_are_shaped_before_anything_is_compared():
    assert prepared() == ([1.0, 0.0, 2.0, 2.0], [1, 1, 1, 1])
    assert prepared(bias=-1.0, scale=3.0, clip=2.0)[0] == [0.0, -2.0, 2.0, 2.0]
    assert prepared(overlong_buffer=0.5)[0] == [0.0, 0.0, 1.5, 1.25]
    assert prepared(overlong_filter=True)[1] == [0, 1, 1, 1]
    assert prepared(zero_variance="mask")[1] == [1, 1, 0, 0]
    assert sum(prepared(resample="max-min")[1]) == 4
    assert prepared(normalize="batch")[0] == pytest.approx([-0.261, -1.306, 0.783, 0.783], abs=1e-3)


def test_groups_of_equal_rewards_are_left_out_whatever_length_adds_to_them():
    charged = prepared(zero_variance="mask", overlong_buffer=0.5)
    assert charged == ([0.0, 0.0, 1.5, 1.25], [1, 1, 0, 0])
    assert prepared(zero_variance="mask", bias=-2.0, clip=0.5)[1] == [1, 1, 0, 0]


def test_a_users_correction_leaves_out_what_it_rejects():
    chosen = algorithm(correction={f"{OWN}:fresh": {}, "importance-sampling": False})
    given = cut(range(5), seed=4)
    loss, sums = microbatch_loss(chosen, **given, denominators=chosen.denominators(20.0, 5.0))
    (gradient,) = torch.autograd.grad(loss, given["current"])
    mask = given["packing"].mask
    assert (gradient[given["lags"] > 0] == 0).all()
    assert (gradient[mask & (given["lags"] == 0)] != 0).any()
    trained = mask & (given["copies"][given["packing"].sequence] > 0)
    assert float(sums["staleness/masked"]) == int((trained & (given["lags"] > 0)).sum())


DECOUPLED = ("surrogate = ppo-clip", "correction = importance-sampling", "anchor = proximal")
PEERS: dict[str, tuple[str, str, str, dict[str, object]]] = {
    "verl: dual clip, weights q / mu up to 2": (
        VERL,
        "ppo_vanilla",
        "tis2",
        {
            "surrogate": {"clip_low": 0.2, "clip_high": 0.28, "clip_dual": 3.0},
            "correction": {"importance-sampling": {"high": 2.0}},
        },
    ),
    "AReaL: weights q / mu, rejected above 5, original number of tokens": (
        AREAL,
        "decoupled_ppo",
        "0.2_0.28__token_mask_ratio5",
        {
            "surrogate": {"clip_low": 0.2, "clip_high": 0.28},
            "correction": {"importance-sampling": {"high": 1e9}, "rejection": {"high": 5.0}},
        },
    ),
}


@proves(*DECOUPLED, against=VERL, what="composed")
@proves(
    *DECOUPLED,
    "correction = rejection",
    "reduce.denominator = original",
    against=AREAL,
    what="composed",
)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("peer", PEERS)
def test_the_decoupled_losses_of_peers_are_compositions(peer: str, mask: str):
    system, function, variant, settings = PEERS[peer]
    file, rows, chosen = golden(system, function), layout(mask), algorithm(**settings)
    names = ("logp", "old_logp", "rollout_logp", "adv_tok")
    packed = {name: rows.pack(file.input(name)) for name in names}
    current = packed["logp"].clone().requires_grad_()
    loss, _ = microbatch_loss(
        chosen,
        current=current,
        proximal=packed["old_logp"],
        behavior=packed["rollout_logp"],
        advantages=packed["adv_tok"],
        entropy=torch.zeros_like(current),
        packing=rows.packing,
        denominators=chosen.denominators(float(rows.packing.mask.sum()), 32.0),
    )
    (gradient,) = torch.autograd.grad(loss, current)
    key = f"{mask}__{variant}"
    tolerance = {"rtol": 1e-5, "atol": 1e-6}
    assert_close(loss.detach(), file.out(f"loss__{key}").double(), **tolerance)
    assert_close(rows.pad(gradient), file.out(f"grad__{key}").double(), **tolerance)

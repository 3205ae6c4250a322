"""Advantages, returns and reward rules against what verl, slime and AReaL compute."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from docs.generate.evidence import proves
from slipstream.algos.advantages import (
    GrpoOptions,
    Outcomes,
    PassAtKOptions,
    SiblingOptions,
    grpo,
    opo,
    pass_at_k,
    remax,
    rloo,
)
from slipstream.algos.packing import Packing
from slipstream.algos.parts import NoOptions, Options, Part
from slipstream.algos.returns import (
    DiscountOptions,
    GaeOptions,
    TokenOutcomes,
    at_end,
    centered_returns,
    discounted_returns,
    gae,
    moments,
    whiten,
)
from slipstream.algos.shaping import normalized, overlong_penalty, scaled
from tests.support.golden import AREAL, MASKS, SLIME, VERL, Golden, Layout, batch, golden, layout

NUM_GROUPS = 8
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}
VARIANTS = ("g0.99_l0.95", "g1.0_l1.0", "g1.0_l0.95")


def settings(variant: str) -> GaeOptions:
    discount, decay = variant.removeprefix("g").split("_l")
    return GaeOptions(discount=float(discount), decay=float(decay))


def outcomes(file: Golden, mask: str) -> Outcomes:
    """The peer's inputs: a row without tokens has no token that could carry its reward."""
    lengths = layout(mask).packing.counts
    rewards = torch.from_numpy(batch()["rewards"])
    return Outcomes(
        rewards=torch.where(lengths > 0, rewards, 0.0),
        groups=file.input("group"),
        num_groups=NUM_GROUPS,
        lengths=lengths,
        greedy_rewards=torch.full((32,), 0.25, dtype=torch.float64),
    )


def batch_whitened(per_token: Tensor, packing: Packing, epsilon: float = 1e-8) -> Tensor:
    index = torch.zeros_like(packing.sequence)
    whole = moments(per_token, packing.mask, index, 1)
    return whiten(per_token, packing.mask, index, whole, epsilon=epsilon)


def assert_same_inside(ours: Tensor, peer: Tensor, rows: Layout) -> None:
    """Compare packed tokens with padded rows, inside the mask; ours are 0.0 outside it."""
    mask = rows.packing.mask
    assert_close(ours[mask], rows.pack(peer)[mask], **TOLERANCE)
    assert (ours[~mask] == 0.0).all()


# ---- verl --------------------------------------------------------------------

PER_TRAJECTORY = [
    ("grpo", "std", grpo, GrpoOptions()),
    ("grpo", "vec_std", grpo, GrpoOptions()),
    ("grpo", "nostd_drgrpo", grpo, GrpoOptions(divide_by_std=False)),
    ("grpo", "vec_nostd", grpo, GrpoOptions(divide_by_std=False)),
    ("grpo_passk", "std", pass_at_k, PassAtKOptions()),
    ("grpo_passk", "nostd", pass_at_k, PassAtKOptions(divide_by_std=False)),
    ("rloo", "loop", rloo, SiblingOptions()),
    ("rloo", "vec", rloo, SiblingOptions()),
    ("opo", "opo", opo, NoOptions()),
    ("remax", "b0.25", remax, NoOptions()),
]


@proves(*(part for _, _, part, _ in PER_TRAJECTORY), against=VERL)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("function", "variant", "part", "options"), PER_TRAJECTORY)
def test_verl_advantages_of_trajectories(
    function: str, variant: str, part: Part[..., Any], options: Options, mask: str
):
    file, rows = golden(VERL, function), layout(mask)
    ours = part(outcomes(file, mask), options)
    assert ours.dtype == torch.float64
    per_token = torch.where(rows.packing.mask, rows.packing.spread(ours), 0.0)
    assert_same_inside(per_token, file.out(f"adv__{mask}__{variant}"), rows)


@proves(centered_returns, "whiten = batch", against=VERL)
@pytest.mark.parametrize("mask", MASKS)
def test_verl_reinforce_plus_plus_baseline_whitens_over_tokens(mask: str):
    file, rows = golden(VERL, "reinforce_pp_baseline"), layout(mask)
    rewards = at_end(outcomes(file, mask).centered(), rows.packing)
    given = TokenOutcomes(rewards=rewards, packing=rows.packing)
    ours = batch_whitened(centered_returns(given, DiscountOptions()).advantages, rows.packing)
    assert_same_inside(ours, file.out(f"adv__{mask}__b"), rows)


@proves(discounted_returns, "whiten = batch", against=VERL)
@pytest.mark.parametrize("discount", [1.0, 0.99])
@pytest.mark.parametrize("mask", MASKS)
def test_verl_reinforce_plus_plus(mask: str, discount: float):
    file, rows = golden(VERL, "reinforce_pp"), layout(mask)
    rewards = at_end(outcomes(file, mask).rewards, rows.packing)
    given = TokenOutcomes(rewards=rewards, packing=rows.packing)
    ours = discounted_returns(given, DiscountOptions(discount=discount))
    assert_same_inside(ours.returns, file.out(f"returns__{mask}__g{discount}"), rows)
    whitened = batch_whitened(ours.advantages, rows.packing)
    assert_same_inside(whitened, file.out(f"adv__{mask}__g{discount}"), rows)


@proves(gae, "whiten = batch", against=VERL)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("rewards", ["token_rewards_dense", "token_rewards_outcome"])
def test_verl_gae(rewards: str, mask: str, variant: str):
    """Compared inside the mask: outside it verl leaves values, we have 0.0."""
    file, rows = golden(VERL, f"gae__{rewards}"), layout(mask)
    given = TokenOutcomes(
        rewards=rows.pack(file.input("rewards")),
        values=rows.pack(file.input("values")),
        packing=rows.packing,
    )
    ours = gae(given, settings(variant))
    assert_same_inside(ours.advantages, file.out(f"adv_raw__{mask}__{variant}"), rows)
    assert_same_inside(ours.returns, file.out(f"returns__{mask}__{variant}"), rows)
    whitened = batch_whitened(ours.advantages, rows.packing)
    assert_same_inside(whitened, file.out(f"adv_whitened__{mask}__{variant}"), rows)


OVERLONG = [("max17_buf5_pf1.0", 17, 5, 1.0), ("max16_buf4_pf0.5", 16, 4, 0.5)]


@proves("data.overlong_buffer", "data.overlong_penalty", against=VERL)
@proves("data.overlong_buffer", "data.overlong_penalty", against=AREAL)
@pytest.mark.parametrize("peer", [VERL, AREAL])
@pytest.mark.parametrize(("variant", "max_tokens", "buffer_tokens", "factor"), OVERLONG)
def test_verl_and_areal_overlong_penalty(
    peer: str, variant: str, max_tokens: int, buffer_tokens: int, factor: float
):
    """Beyond max_tokens the peers keep falling; eq. 13 of DAPO, and so ours, stays at -factor."""
    file = golden(peer, "overlong" if peer == AREAL else "dapo_overlong")
    lengths = torch.from_numpy(batch()["lengths"])
    ours = overlong_penalty(
        lengths, max_tokens=max_tokens, buffer_tokens=buffer_tokens, factor=factor
    )
    within = lengths <= max_tokens
    expected = file.out(f"reward__{variant}") - file.input("rewards")
    assert_close(ours[within], expected[within], **TOLERANCE)
    assert ours[~within].tolist() == [-factor] * int((~within).sum())
    assert (expected[~within] < -factor).all()


# ---- slime -------------------------------------------------------------------


@proves(grpo, against=SLIME)
@pytest.mark.parametrize(
    ("variant", "part", "options"),
    [("grpo__std1", grpo, GrpoOptions()), ("grpo__std0", grpo, GrpoOptions(divide_by_std=False))],
)
def test_slime_group_rewards(variant: str, part: Part[..., Any], options: Options):
    file = golden(SLIME, "grpo_rewards")
    expected = file.out(f"rewards__{variant}")
    assert_close(part(outcomes(file, "mask_prefix"), options), expected.double(), **TOLERANCE)


@proves(centered_returns, against=SLIME)
def test_slime_centers_rewards_for_reinforce_plus_plus_baseline():
    file = golden(SLIME, "grpo_rewards")
    expected = file.out("rewards__reinforce_plus_plus_baseline__std1")
    assert_close(outcomes(file, "mask_prefix").centered(), expected.double(), **TOLERANCE)


@proves(gae, discounted_returns, against=SLIME)
@pytest.mark.parametrize("variant", VARIANTS[:2])
@pytest.mark.parametrize("how", ["vanilla", "chunked", "batch"])
def test_slime_gae(how: str, variant: str):
    """ "vanilla" and "chunked" take each row as 17 tokens, "batch" as its own length."""
    file, rows = golden(SLIME, "gae"), layout("mask_prefix")
    if how != "batch":
        everything = torch.ones(32, 17, dtype=torch.bool)
        sequence = torch.arange(32).repeat_interleave(17)
        rows = Layout(everything, Packing(everything.flatten(), sequence, 32))
    given = TokenOutcomes(
        rewards=rows.pack(file.input("token_rewards_dense")),
        values=rows.pack(file.input("values")),
        packing=rows.packing,
    )
    ours = gae(given, settings(variant))
    assert_same_inside(ours.advantages, file.out(f"adv__{how}__{variant}"), rows)
    assert_same_inside(ours.returns, file.out(f"ret__{how}__{variant}"), rows)
    if how == "vanilla":
        discount = settings(variant).discount
        returns = discounted_returns(given, DiscountOptions(discount=discount)).returns
        assert_same_inside(returns, file.out(f"disc_returns__g{discount}"), rows)


@proves(discounted_returns, against=SLIME)
@pytest.mark.parametrize("kl_factor", [0.0, 0.1])
@pytest.mark.parametrize("discount", [1.0, 0.99])
@pytest.mark.parametrize("mask", ["mask_prefix", "mask_holes"])
def test_slime_reinforce_plus_plus(mask: str, discount: float, kl_factor: float):
    """slime also discounts the tokens in a hole, we the chosen ones alone (as verl).

    So with a discount and a hole, only the tokens after the last hole of a row are compared; a
    row without a hole is compared as a whole. Without a discount there is no difference.
    """
    file, rows = golden(SLIME, "reinforce_pp"), layout(mask)
    packing = rows.packing
    kl = rows.pack(file.input("logp") - file.input("ref_logp"))
    rewards = at_end(file.input("rewards"), packing) - kl_factor * kl
    given = TokenOutcomes(rewards=rewards, packing=packing)
    ours = discounted_returns(given, DiscountOptions(discount=discount)).returns
    compared = packing.mask
    if discount < 1.0:
        holes = rows.valid & ~rows.mask
        still_ahead = holes.flip(1).cumsum(1).flip(1) > 0
        compared = packing.mask & ~rows.pack(still_ahead)
        assert compared.sum() > 0.6 * packing.mask.sum()
    peer = rows.pack(file.out(f"returns__{mask}__g{discount}_kl{kl_factor}"))
    assert_close(ours[compared], peer[compared].double(), **TOLERANCE)


# ---- AReaL -------------------------------------------------------------------


def areal(name: str, mask: str, variant: str) -> Tensor:
    """One output: AReaL's arrays have 3 prompt tokens in front, and are one token earlier."""
    return golden(AREAL, "compute_advantages").out(f"{name}__{mask}__{variant}")[:, 2:19]


def areal_given(mask: str, rewards: Tensor, *, kl_factor: float, discount: float) -> TokenOutcomes:
    """AReaL's inputs as ours.

    V of the state of a token is what it holds one column earlier. A row that fills the window it
    takes for truncated, and bootstraps with the value after its last token; with us the value
    after the end is 0, so that it goes into the last reward.
    """
    file, rows = golden(AREAL, "compute_advantages"), layout(mask)
    values = torch.cat([torch.zeros(32, 1, dtype=torch.float64), file.input("values")], dim=1)
    lengths = torch.from_numpy(batch()["lengths"])
    after_end = torch.where(lengths == 17, values[:, 17], 0.0)
    kl = rows.pack(file.input("rollout_logp") - file.input("ref_logp"))
    return TokenOutcomes(
        rewards=at_end(rewards + discount * after_end, rows.packing) - kl_factor * kl,
        values=rows.pack(values[:, :17]),
        packing=rows.packing,
    )


AREAL_VARIANTS = {
    "gae": (0.1, 0.99, 0.95),
    "grpo": (0.0, 1.0, 1.0),
    "mask_no_eos": (0.0, 1.0, 1.0),
    "scale_clip": (0.0, 1.0, 1.0),
    "gae_advnorm": (0.0, 0.99, 0.95),
}


def areal_rewards(variant: str) -> Tensor:
    rewards = golden(AREAL, "compute_advantages").input("rewards")
    if variant == "grpo":
        groups = torch.from_numpy(batch()["group"])
        return normalized(
            rewards, groups, NUM_GROUPS, over="group", divide_by_std=True, epsilon=1e-5
        )
    if variant == "scale_clip":
        return scaled(rewards, scale=2.0, bias=-0.5, clip=1.0)
    if variant == "mask_no_eos":
        return torch.where(torch.from_numpy(batch()["lengths"]) == 17, 0.0, rewards)
    return rewards


@proves(gae, "whiten = batch", "data.normalize = group", against=AREAL)
@proves("data.scale", "data.bias", "data.clip", against=AREAL)
@pytest.mark.parametrize("variant", AREAL_VARIANTS)
@pytest.mark.parametrize("mask", ["mask_prefix", "mask_holes"])
def test_areal_compute_advantages(mask: str, variant: str):
    """AReaL computes in float32, where rewards and values cancel: hence the absolute tolerance.

    Its adv_norm divides by std + 1e-5, where we divide by sqrt(var + epsilon): the epsilon that
    makes them the same is solved for.
    """
    kl_factor, discount, decay = AREAL_VARIANTS[variant]
    rows = layout(mask)
    given = areal_given(mask, areal_rewards(variant), kl_factor=kl_factor, discount=discount)
    ours = gae(given, GaeOptions(discount=discount, decay=decay))
    advantages = ours.advantages
    if variant == "gae_advnorm":
        std = advantages[rows.packing.mask].std().item()
        epsilon = (std + 1e-5) ** 2 - std**2
        advantages = batch_whitened(advantages, rows.packing, epsilon)
    for mine, name in ((advantages, "advantages"), (ours.returns, "returns")):
        peer = rows.pack(areal(name, mask, variant))
        inside = rows.packing.mask
        assert_close(mine[inside], peer[inside].double(), **TOLERANCE)


def test_the_golden_masks_have_what_they_are_for():
    masks = {name: batch()[name].astype(bool) for name in MASKS}
    assert np.array_equal(masks["mask_prefix"].sum(1), batch()["lengths"])
    assert (masks["mask_holes"].sum(1) < batch()["lengths"]).sum() == 11
    assert np.flatnonzero(masks["mask_empty"].sum(1) == 0).tolist() == [5, 20]

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from docs.generate.evidence import DEFINITION, PROPERTY, proves
from slipstream.algos.packing import Packing
from slipstream.algos.returns import (
    DiscountOptions,
    GaeOptions,
    Groups,
    OptimalTokenBaselineOptions,
    TokenOutcomes,
    at_end,
    discounted_returns,
    gae,
    moments,
    optimal_token_baseline,
    whiten,
)

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Case:
    """Sequences end to end; masks have holes, at the ends of sequences too, and may be empty."""

    lengths: list[int]
    mask: Tensor
    rewards: Tensor
    values: Tensor

    @property
    def packing(self) -> Packing:
        cu_seqlens = torch.tensor([0, *np.cumsum(self.lengths)])
        return Packing.of(self.mask, cu_seqlens)

    @property
    def given(self) -> TokenOutcomes:
        return TokenOutcomes(rewards=self.rewards, values=self.values, packing=self.packing)

    def rows(self, per_token: Tensor) -> list[Array]:
        """Return the chosen tokens of each sequence."""
        parts = zip(per_token.split(self.lengths), self.mask.split(self.lengths), strict=True)
        return [values[mask].numpy() for values, mask in parts]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    total = sum(lengths)
    chosen = draw(st.sampled_from([0.3, 0.7, 1.0]))
    return Case(
        lengths,
        torch.rand(total, generator=generator) < chosen,
        torch.randn(total, generator=generator, dtype=torch.float64),
        torch.randn(total, generator=generator, dtype=torch.float64),
    )


factors = st.sampled_from([0.0, 0.5, 0.95, 0.99, 1.0])


def plain_returns(rewards: Array, discount: float) -> Array:
    """G_t = sum_l discount**l r_(t+l)."""
    n = len(rewards)
    return np.array([sum(discount**k * rewards[t + k] for k in range(n - t)) for t in range(n)])


def plain_gae(rewards: Array, values: Array, discount: float, decay: float) -> Array:
    """A_t = sum_l (discount * decay)**l d_(t+l), eq. 16 of arXiv 1506.02438."""
    following = np.append(values[1:], 0.0)[: len(values)]
    return plain_returns(rewards + discount * following - values, discount * decay)


def assert_rows(case: Case, ours: Tensor, expected: list[Array]) -> None:
    assert (ours[~case.mask] == 0.0).all()
    for mine, row in zip(case.rows(ours), expected, strict=True):
        np.testing.assert_allclose(mine, row, rtol=1e-9, atol=1e-9)


# ---- returns and GAE ---------------------------------------------------------


@proves(discounted_returns, against=DEFINITION)
@given(case=cases(), discount=factors)
@settings(deadline=None, max_examples=60)
def test_packed_returns_are_those_of_each_sequence_alone(case: Case, discount: float):
    ours = discounted_returns(case.given, DiscountOptions(discount=discount))
    expected = [plain_returns(r, discount) for r in case.rows(case.rewards)]
    assert ours.returns is not None
    assert_rows(case, ours.advantages, expected)
    assert_rows(case, ours.returns, expected)


@proves(gae, "gae: critic_decay", against=DEFINITION)
@given(case=cases(), discount=factors, decay=factors, critic_decay=st.none() | factors)
@settings(deadline=None, max_examples=80)
def test_packed_gae_is_that_of_each_sequence_alone(
    case: Case, discount: float, decay: float, critic_decay: float | None
):
    options = GaeOptions(discount=discount, decay=decay, critic_decay=critic_decay)
    ours = gae(case.given, options)
    rows = list(zip(case.rows(case.rewards), case.rows(case.values), strict=True))
    targets = decay if critic_decay is None else critic_decay
    assert ours.returns is not None
    assert_rows(case, ours.advantages, [plain_gae(r, v, discount, decay) for r, v in rows])
    assert_rows(case, ours.returns, [plain_gae(r, v, discount, targets) + v for r, v in rows])


@proves(gae, discounted_returns, against=PROPERTY, what="mask")
@given(case=cases(), bad=st.sampled_from([torch.nan, torch.inf, -torch.inf]))
@settings(deadline=None, max_examples=40)
def test_nothing_under_the_mask_changes_a_value(case: Case, bad: float):
    spoiled = Case(
        case.lengths,
        case.mask,
        torch.where(case.mask, case.rewards, bad),
        torch.where(case.mask, case.values, bad),
    )
    options = GaeOptions(discount=0.9, critic_decay=1.0, length_adaptive=True)
    for ours, theirs in (
        (gae(spoiled.given, options), gae(case.given, options)),
        (
            discounted_returns(spoiled.given, DiscountOptions()),
            discounted_returns(case.given, DiscountOptions()),
        ),
    ):
        assert torch.equal(ours.advantages, theirs.advantages)
        assert ours.returns is not None
        assert theirs.returns is not None
        assert torch.equal(ours.returns, theirs.returns)


def test_a_long_sequence_in_float32_is_near_float64():
    length = 20_000
    generator = torch.Generator().manual_seed(2)
    values = torch.randn(length, generator=generator, dtype=torch.float64)
    packing = Packing.of(torch.ones(length, dtype=torch.bool), torch.tensor([0, length]))
    rewards = at_end(torch.ones(1, dtype=torch.float64), packing)
    options = GaeOptions(discount=1.0, decay=1.0)
    double = gae(TokenOutcomes(rewards=rewards, values=values, packing=packing), options)
    single = gae(
        TokenOutcomes(rewards=rewards.float(), values=values.float(), packing=packing), options
    )
    assert single.advantages.dtype == torch.float32
    assert_close(single.advantages.double(), double.advantages, rtol=0, atol=1e-4)
    # lambda 1 and discount 1: what is earned from here on, minus V
    assert_close(double.advantages, 1.0 - values, rtol=0, atol=1e-9)


@proves(discounted_returns, against=PROPERTY, what="half")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_values_of_low_precision_are_computed_with_in_float32(dtype: torch.dtype):
    packing = Packing.of(torch.ones(300, dtype=torch.bool), torch.tensor([0, 300]))
    rewards = torch.full((300,), 0.01).to(dtype)
    returns = discounted_returns(
        TokenOutcomes(rewards=rewards, packing=packing), DiscountOptions()
    ).returns
    assert returns is not None
    assert returns.dtype == torch.float32
    assert returns[0].item() == pytest.approx(300 * rewards[0].item(), rel=1e-5)


def test_advantages_carry_no_gradient():
    values = torch.zeros(3, requires_grad=True)
    packing = Packing.of(torch.ones(3, dtype=torch.bool), torch.tensor([0, 3]))
    given_3 = TokenOutcomes(rewards=torch.ones(3), values=values, packing=packing)
    ours = gae(given_3, GaeOptions())
    assert not ours.advantages.requires_grad
    assert ours.returns is not None
    assert not ours.returns.requires_grad


def test_the_last_chosen_token_of_a_sequence_gets_its_reward():
    mask = torch.tensor([True, True, False, False, False, True])
    packing = Packing.of(mask, torch.tensor([0, 3, 5, 6]))
    rewards = torch.tensor([1.0, torch.nan, 3.0])  # the second has no chosen token
    assert at_end(rewards, packing).tolist() == [0.0, 1.0, 0.0, 0.0, 0.0, 3.0]


def test_no_tokens_have_no_advantages():
    packing = Packing.of(torch.zeros(0, dtype=torch.bool), torch.tensor([0]))
    empty = TokenOutcomes(rewards=torch.zeros(0), values=torch.zeros(0), packing=packing)
    assert gae(empty, GaeOptions()).advantages.shape == (0,)
    assert discounted_returns(empty, DiscountOptions()).advantages.shape == (0,)


def test_gae_without_values_is_refused():
    packing = Packing.of(torch.ones(2, dtype=torch.bool), torch.tensor([0, 2]))
    assert gae.needs == {"tokens", "values"}
    with pytest.raises(ValueError, match="gae needs the values"):
        gae(TokenOutcomes(rewards=torch.zeros(2), packing=packing), GaeOptions())


def test_tensors_of_other_tokens_are_refused():
    packing = Packing.of(torch.ones(2, dtype=torch.bool), torch.tensor([0, 2]))
    with pytest.raises(ValueError, match=r"rewards has shape \(3,\), expected \(2,\)"):
        TokenOutcomes(rewards=torch.zeros(3), packing=packing)
    with pytest.raises(ValueError, match="values has shape"):
        TokenOutcomes(rewards=torch.zeros(2), values=torch.zeros(1), packing=packing)


# ---- whitening ---------------------------------------------------------------


@st.composite
def tokens(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    """Values, mask and index of three groups; NaN is outside the mask."""
    n = draw(st.integers(3, 40))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    mask = torch.rand(n, generator=generator) < 0.7
    values = 3 * torch.randn(n, generator=generator, dtype=torch.float64) + 5
    index = torch.randint(0, 3, (n,), generator=generator)
    return torch.where(mask, values, torch.nan), mask, index


@proves("whiten = batch", "whiten = group", against=PROPERTY, what="packing")
@given(given_tokens=tokens(), data=st.data())
@settings(deadline=None, max_examples=50)
def test_whitening_does_not_depend_on_the_split_into_microbatches(
    given_tokens: tuple[Tensor, Tensor, Tensor], data: st.DataObject
):
    values, mask, index = given_tokens
    cut = data.draw(st.integers(0, len(values)))
    whole = whiten(values, mask, index, moments(values, mask, index, 3))
    halves = [tuple(x[part] for x in given_tokens) for part in (slice(cut), slice(cut, None))]
    added = torch.stack([moments(*half, 3) for half in halves]).sum(0)
    assert_close(torch.cat([whiten(*half, added) for half in halves]), whole)


@proves("whiten = batch", "whiten = group", against=PROPERTY, what="copies")
@given(given_tokens=tokens(), seed=st.integers(0, 2**31))
@settings(deadline=None, max_examples=50)
def test_whitening_with_copies_is_that_of_the_batch_with_each_token_repeated(
    given_tokens: tuple[Tensor, Tensor, Tensor], seed: int
):
    generator = torch.Generator().manual_seed(seed)
    copies = torch.randint(0, 4, (len(given_tokens[0]),), generator=generator)
    repeated = [x.repeat_interleave(copies) for x in given_tokens]
    counted = moments(*given_tokens, 3, copies)
    written_out = moments(*repeated, 3)
    assert_close(counted, written_out)
    ours = whiten(*given_tokens, counted).repeat_interleave(copies)
    assert_close(ours, whiten(*repeated, written_out), rtol=1e-6, atol=1e-6)


@proves("whiten = batch", "whiten = group", against=DEFINITION)
@pytest.mark.parametrize("unbiased", [True, False])
@pytest.mark.parametrize("shift_mean", [True, False])
@given(given_tokens=tokens())
@settings(deadline=None, max_examples=30)
def test_each_index_is_whitened_by_its_own_mean_and_variance(
    shift_mean: bool, unbiased: bool, given_tokens: tuple[Tensor, Tensor, Tensor]
):
    values, mask, index = given_tokens
    ours = whiten(
        values,
        mask,
        index,
        moments(values, mask, index, 3),
        shift_mean=shift_mean,
        epsilon=1e-3,
        unbiased=unbiased,
    )
    assert (ours[~mask] == 0.0).all()
    for group in range(3):
        x = values[mask & (index == group)].numpy()
        if len(x) == 0:
            continue
        variance = x.var(ddof=int(unbiased)) if len(x) > 1 else 0.0
        expected = (x - x.mean()) / np.sqrt(variance + 1e-3) + (0.0 if shift_mean else x.mean())
        mine = ours[mask & (index == group)].numpy()
        np.testing.assert_allclose(mine, expected, rtol=1e-9, atol=1e-9)


def test_moments_are_count_sum_and_sum_of_squares():
    values = torch.tensor([1.0, 2.0, torch.inf, 4.0])
    mask = torch.tensor([True, True, False, True])
    ours = moments(values, mask, torch.tensor([0, 0, 0, 2]), 3)
    assert ours.dtype == torch.float64
    assert ours.tolist() == [[2.0, 3.0, 5.0], [0.0, 0.0, 0.0], [1.0, 4.0, 16.0]]
    copies = torch.tensor([3, 1, 2, 2])
    ours = moments(values, mask, torch.tensor([0, 0, 0, 2]), 3, copies)
    assert ours.tolist() == [[4.0, 5.0, 7.0], [0.0, 0.0, 0.0], [2.0, 8.0, 32.0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_whitening_returns_float32_at_least(dtype: torch.dtype):
    values = torch.tensor([1.0, 3.0], dtype=dtype)
    mask, index = torch.ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.int64)
    ours = whiten(values, mask, index, moments(values, mask, index, 1), unbiased=False)
    assert ours.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert ours.tolist() == pytest.approx([-1.0, 1.0])


def test_what_is_equal_to_all_others_is_whitened_to_0():
    values = torch.full((3,), 0.1, dtype=torch.float64)
    mask, index = torch.ones(3, dtype=torch.bool), torch.zeros(3, dtype=torch.int64)
    ours = whiten(values, mask, index, moments(values, mask, index, 1))
    assert_close(ours, torch.zeros_like(ours), rtol=0, atol=1e-9)


@proves(
    "whiten = batch-mean",
    "whiten = group-mean",
    "whiten = batch-leave-one-out",
    "whiten = group-leave-one-out",
    against=DEFINITION,
)
@pytest.mark.parametrize("leave_one_out", [True, False])
@given(given_tokens=tokens())
@settings(deadline=None, max_examples=30)
def test_each_index_is_centered_by_its_mean_or_by_that_of_the_others(
    leave_one_out: bool, given_tokens: tuple[Tensor, Tensor, Tensor]
):
    values, mask, index = given_tokens
    counted = moments(values, mask, index, 3)
    ours = whiten(values, mask, index, counted, divide_by_std=False, leave_one_out=leave_one_out)
    assert (ours[~mask] == 0.0).all()
    for group in range(3):
        x = values[mask & (index == group)].numpy()
        expected = []
        for i in range(len(x)):
            among = np.delete(x, i) if leave_one_out else x
            expected.append(x[i] - (among.mean() if len(among) else 0.0))
        mine = ours[mask & (index == group)].numpy()
        np.testing.assert_allclose(mine, expected, rtol=1e-9, atol=1e-9)


# ---- optimal token baseline --------------------------------------------------


@st.composite
def steps(draw: st.DrawFn) -> TokenOutcomes:
    """Sequences of several groups, in any order, with the policy's figures for their tokens."""
    case = draw(cases())
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    total, count = len(case.mask), len(case.lengths)
    chosen = torch.rand(total, generator=generator, dtype=torch.float64) * 0.98 + 0.01
    others = torch.rand(total, generator=generator, dtype=torch.float64) * (1 - chosen)
    groups = draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
    return TokenOutcomes(
        rewards=case.rewards,
        packing=case.packing,
        proximal=chosen.log(),
        squares=chosen.square() + others.square(),
        groups=Groups(of_sequence=torch.tensor(groups), num_groups=3, longest=9),
    )


def stated_otb(step: TokenOutcomes, discount: float, *, zero_tail: bool) -> list[float]:
    """B_t = sum_i W_it G_it / sum_i W_it, over the siblings that have a token t; one by one."""
    assert step.proximal is not None
    assert step.squares is not None
    assert step.groups is not None
    packing, result = step.packing, [0.0] * len(step.rewards)
    sequences = [
        [t for t in range(len(result)) if packing.mask[t] and packing.sequence[t] == s]
        for s in range(packing.num_sequences)
    ]
    returns = [
        plain_returns(step.rewards[places].numpy(), discount) if places else np.zeros(0)
        for places in sequences
    ]
    weights = [
        np.cumsum([1 - 2 * float(step.proximal[t].exp()) + float(step.squares[t]) for t in places])
        for places in sequences
    ]
    for mine, places in enumerate(sequences):
        group = step.groups.of_sequence[mine]
        family = [s for s, g in enumerate(step.groups.of_sequence) if g == group and sequences[s]]
        for t, place in enumerate(places):
            there = [s for s in family if len(sequences[s]) > t]
            total = sum(weights[s][t] for s in there)
            baseline = sum(weights[s][t] * returns[s][t] for s in there) / total if total else 0.0
            if len(family) == 1 or (zero_tail and len(there) == 1):
                baseline = 0.0
            result[place] = returns[mine][t] - baseline
    return result


@proves(optimal_token_baseline, against=DEFINITION)
@pytest.mark.parametrize("tail", ["own", "zero"])
@given(step=steps(), discount=st.sampled_from([0.5, 1.0]))
@settings(deadline=None, max_examples=40)
def test_the_baseline_weighs_siblings_by_the_energy_of_their_way(
    tail: Literal["own", "zero"], step: TokenOutcomes, discount: float
):
    options = OptimalTokenBaselineOptions(tail=tail, discount=discount)
    found = optimal_token_baseline(step, options).advantages
    expected = stated_otb(step, discount, zero_tail=tail == "zero")
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-7, atol=1e-7)


@proves(optimal_token_baseline, against=PROPERTY, what="packing")
@given(step=steps(), data=st.data())
@settings(deadline=None, max_examples=20)
def test_the_baseline_is_of_all_ranks_whatever_each_of_them_holds(
    step: TokenOutcomes, data: st.DataObject
):
    assert step.proximal is not None
    assert step.squares is not None
    assert step.groups is not None
    groups = step.groups
    cut = data.draw(st.integers(0, step.packing.num_sequences))
    options = OptimalTokenBaselineOptions()
    sent: list[Tensor] = []

    def part(first: int, last: int, total: Tensor | None) -> Tensor:
        at = (step.packing.sequence >= first) & (step.packing.sequence < last)

        def summed(values: Tensor) -> Tensor:
            sent.append(values)
            return values if total is None else total

        return optimal_token_baseline(
            TokenOutcomes(
                rewards=step.rewards[at],
                proximal=step.proximal[at],  # type: ignore[index]  # asserted above
                squares=step.squares[at],  # type: ignore[index]  # asserted above
                packing=Packing(
                    step.packing.mask[at], step.packing.sequence[at] - first, last - first
                ),
                groups=replace(groups, of_sequence=groups.of_sequence[first:last], summed=summed),
            ),
            options,
        ).advantages

    halves = [(0, cut), (cut, step.packing.num_sequences)]
    for first, last in halves:
        part(first, last, None)
    total = torch.stack(sent).sum(0)
    found = torch.cat([part(first, last, total) for first, last in halves])
    assert_close(found, optimal_token_baseline(step, options).advantages)


@pytest.mark.parametrize("lacking", ["groups", "proximal", "squares"])
def test_optimal_baseline_names_the_missing_input(lacking: str):
    packing = Packing.of(torch.ones(2, dtype=torch.bool), torch.tensor([0, 2]))
    given_step = TokenOutcomes(
        rewards=torch.zeros(2),
        packing=packing,
        proximal=torch.full((2,), -1.0),
        squares=torch.ones(2),
        groups=Groups(of_sequence=torch.tensor([0]), num_groups=1, longest=2),
    )
    options = OptimalTokenBaselineOptions()
    assert optimal_token_baseline(given_step, options).advantages.tolist() == [0.0, 0.0]
    without: dict[str, Any] = {lacking: None}
    with pytest.raises(ValueError, match="needs groups, proximal and squares"):
        optimal_token_baseline(replace(given_step, **without), options)

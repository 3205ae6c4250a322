"""Chunked log-probabilities against plain torch, in float64 unless a test states otherwise.

How the rows are split over ranks is tests/integration/test_linear_logprobs_ranks.py.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from docs.generate.evidence import DEFINITION, PROPERTY, proves
from slipstream.algos.kernels import BeyondKernelError
from slipstream.algos.logprobs import linear_logprobs as linear_module
from slipstream.algos.logprobs.chunks import Chunk
from slipstream.algos.logprobs.linear_logprobs import (
    Reference,
    TokenLogprobs,
    linear_logprobs,
    squared_probabilities,
)
from slipstream.algos.logprobs.sampling import Kept, OutputLayer, product
from slipstream.algos.packing import Packing
from slipstream.algos.reduce import Denominators, reduced
from slipstream.algos.surrogates import PpoOptions, SurrogateInputs, ppo_clip

T, H, V = 11, 5, 29
REAL = 24  # of the V rows; the others are padding where a test asks for it
BARRED = (1, 20, 30)  # the last is not a row


@dataclass(frozen=True)
class Case:
    """Two models at the same tokens, and weights that mix the results into one number."""

    hidden: Tensor
    weight: Tensor
    target: Tensor
    mix: Tensor  # [3, T]
    reference: tuple[Tensor, Tensor] | None = None
    temperature: Tensor | None = None
    barred: Tensor | None = None
    vocab_size: int | None = None
    kept: Kept | None = None

    def layer(self, weight: Tensor) -> OutputLayer:
        return OutputLayer(weight=weight, vocab_size=self.vocab_size, barred_ids=BARRED)

    def ours(self, chunk_columns: int | None = 10) -> TokenLogprobs:
        reference = None
        if self.reference is not None:
            reference = Reference(self.reference[0], self.layer(self.reference[1]))
        return linear_logprobs(
            self.hidden,
            self.layer(self.weight),
            self.target,
            temperature=self.temperature,
            barred=self.barred,
            kept=self.kept,
            reference=reference,
            chunk_columns=chunk_columns,
        )

    def plain(self) -> TokenLogprobs:
        """The definitions. A token that cannot be chosen has no column, or adds nothing."""
        logprobs = self.log_softmax(self.hidden, self.weight)
        chosen = logprobs.gather(-1, self.target.unsqueeze(-1)).squeeze(-1)
        entropy = -xlogy(logprobs.exp(), logprobs)
        if self.reference is None:
            return TokenLogprobs(chosen, entropy)
        others = self.log_softmax(*self.reference)
        gap = torch.where(logprobs == -torch.inf, 0.0, logprobs - others)
        return TokenLogprobs(chosen, entropy, xlogy(logprobs.exp(), gap))

    def log_softmax(self, hidden: Tensor, weight: Tensor) -> Tensor:
        exact = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        logits = hidden.to(exact) @ weight.to(exact).T
        if self.temperature is not None:
            logits = logits / self.temperature.unsqueeze(-1)
        logits = logits[:, : self.vocab_size]
        if self.barred is not None:
            columns = torch.zeros(logits.shape[-1], dtype=torch.bool)
            columns[[i for i in BARRED if i < len(columns)]] = True
            logits = logits.masked_fill(self.barred.unsqueeze(-1) & columns, -torch.inf)
        if self.kept is not None:
            is_kept = torch.zeros(logits.shape, dtype=torch.bool)
            for row, token_id in zip(*(part.tolist() for part in self.kept[1:]), strict=True):
                is_kept[row, token_id] = True
            left_out = self.kept.is_truncated.unsqueeze(-1) & ~is_kept
            logits = logits.masked_fill(left_out, -torch.inf)
        return logits.log_softmax(-1)

    def mixed(self, result: TokenLogprobs) -> Tensor:
        parts = [part for part in result if part is not None]
        return sum((part * mix).sum() for part, mix in zip(parts, self.mix, strict=False))

    def gradients(self, value: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(value, (self.hidden, self.weight))


def xlogy(weights: Tensor, values: Tensor) -> Tensor:
    return (weights * torch.where(weights == 0, 0.0, values)).sum(-1)


def case(*, kl: bool = True, shaped: bool = True, num_tokens: int = T, scale: float = 1.0) -> Case:
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> Tensor:
        return scale * torch.randn(*shape, generator=generator, dtype=torch.float64)

    plain = Case(
        hidden=normal(num_tokens, H).requires_grad_(),
        weight=normal(V, H).requires_grad_(),
        target=torch.randint(2, 20, (num_tokens,), generator=generator),
        mix=normal(3, num_tokens),
        reference=(normal(num_tokens, H + 2), normal(V, H + 2)) if kl else None,
    )
    if not shaped:
        return plain
    return replace(
        plain,
        temperature=0.5 + torch.rand(num_tokens, generator=generator, dtype=torch.float64),
        barred=torch.rand(num_tokens, generator=generator) < 0.5,
        vocab_size=REAL,
    )


def truncated(one: Case, *, most: int = 7) -> Case:
    """The case with a few tokens kept at most positions, the target among them."""
    generator = torch.Generator().manual_seed(8)
    is_truncated = torch.rand(len(one.target), generator=generator) < 0.7
    rows, ids = [], []
    for row in is_truncated.nonzero().flatten().tolist():
        count = int(torch.randint(1, most + 1, (1,), generator=generator))
        drawn = torch.randperm(REAL, generator=generator)[:count].tolist()
        chosen = {int(one.target[row]), *drawn}
        rows += [row] * len(chosen)
        ids += sorted(chosen)
    return replace(one, kept=Kept(is_truncated, torch.tensor(rows), torch.tensor(ids)))


SHAPES: dict[str, Callable[[], Case]] = {
    "plain": lambda: case(shaped=False),
    "tempered-barred-padded": case,
    "truncated": lambda: truncated(case(shaped=False)),
    "all-of-it": lambda: truncated(case()),
}


def assert_same(got: tuple[Tensor, ...], expected: tuple[Tensor, ...], tolerance: float) -> None:
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert (a - b).abs().max().item() < tolerance


@proves(
    "log-probabilities", "entropy", "kl.name = full", against=DEFINITION, what="value, gradient"
)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("alone", ["logprobs", "entropy", "kl", "mixed"])
def test_values_and_gradients_are_those_of_log_softmax(alone: str, shape: str):
    one = SHAPES[shape]()
    got, expected = one.ours(), one.plain()
    assert_same(got, expected, 1e-13)
    if alone == "mixed":
        values = one.mixed(got), one.mixed(expected)
    else:
        values = tuple((getattr(result, alone) * one.mix[0]).sum() for result in (got, expected))
    assert values[0].abs() > 0.1, "nothing was compared"
    assert_same(*map(one.gradients, values), 1e-12)


@pytest.mark.parametrize("alone", ["logprobs", "entropy", "kl"])
def test_numbers_of_tokens_may_have_any_strides(alone: str):
    plain = case(shaped=False)
    apart = torch.full((2 * T,), torch.nan, dtype=torch.float64)
    apart[::2] = torch.linspace(0.5, 2.0, T)
    for one in (plain, replace(plain, temperature=apart[::2])):
        got, expected = one.ours(), one.plain()
        assert_same(got, expected, 1e-13)
        values = (getattr(result, alone).sum() for result in (got, expected))  # one gradient, T x
        assert_same(*map(one.gradients, values), 1e-12)


@proves("sum of squared probabilities", against=DEFINITION)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_sum_of_squares_is_that_of_the_softmax(shape: str):
    one = SHAPES[shape]()
    found = squared_probabilities(
        one.hidden,
        one.layer(one.weight),
        temperature=one.temperature,
        barred=one.barred,
        kept=one.kept,
    )
    probabilities = one.log_softmax(one.hidden, one.weight).exp()
    assert found.tolist() == pytest.approx(probabilities.square().sum(-1).tolist())
    assert not found.requires_grad


@proves("log-probabilities", "entropy", "kl.name = full", against=PROPERTY, what="packing")
@pytest.mark.parametrize("chunk_columns", [1, 2, 4, V - 1, V, V + 1, None])
@pytest.mark.parametrize("shape", ["tempered-barred-padded", "all-of-it"])
def test_the_chunk_size_changes_nothing(chunk_columns: int | None, shape: str):
    one, (expected, gradients) = SHAPES[shape](), in_chunks_of_three(shape)
    got = one.ours(chunk_columns)
    assert_same(got, expected, 5e-14)  # sums of up to 12, in another order
    assert_same(one.gradients(one.mixed(got)), gradients, 1e-12)


@cache
def in_chunks_of_three(shape: str) -> tuple[TokenLogprobs, tuple[Tensor, ...]]:
    one = SHAPES[shape]()
    result = one.ours(3)
    return result, one.gradients(one.mixed(result))


def test_a_token_that_was_the_only_one_kept_is_certain_and_has_no_gradient():
    one = truncated(case(shaped=False), most=1)
    alone = replace(one, kept=Kept(torch.ones(T, dtype=torch.bool), torch.arange(T), one.target))
    result = alone.ours()
    for part in result:
        assert part is not None
        assert torch.equal(part, torch.zeros(T, dtype=torch.float64))
    for gradient in alone.gradients(alone.mixed(result)):
        assert gradient.abs().max() < 1e-14


def published_sampler(name: str, probabilities: list[float], limit: float) -> dict[int, float]:
    """Return the distribution that a truncated sampler draws from, by token.

    Nucleus sampling (arXiv 1904.09751): the smallest set of the likeliest tokens that has at least
    the limit; min-p (arXiv 2407.01082): tokens of at least the limit times the likeliest one's;
    top-k: the k likeliest. Each is divided by what its tokens have together.
    """
    falling = sorted(range(len(probabilities)), key=lambda token: -probabilities[token])
    kept = []
    for token in falling:
        before = sum(probabilities[other] for other in kept)
        is_in = {
            "top-p": before < limit,
            "min-p": probabilities[token] >= limit * probabilities[falling[0]],
            "top-k": len(kept) < limit,
        }[name]
        if is_in:
            kept.append(token)
    total = sum(probabilities[token] for token in kept)
    return {token: probabilities[token] / total for token in kept}


@proves("log-probabilities", "entropy", against=DEFINITION, what="truncated")
@pytest.mark.parametrize(("name", "limit"), [("top-p", 0.7), ("min-p", 0.3), ("top-k", 4)])
def test_kept_tokens_have_the_distribution_of_the_published_sampler(name: str, limit: float):
    one = replace(case(kl=False), barred=None)
    assert one.temperature is not None
    logits = (one.hidden @ one.weight.T).detach()[:, :REAL]
    ids, rows, targets, logprobs, entropies, slopes = [], [], [], [], [], []
    for row, temperature in zip(logits.tolist(), one.temperature.tolist(), strict=True):
        powers = [math.exp(x / temperature) for x in row]
        drawn = published_sampler(name, [x / sum(powers) for x in powers], limit)
        target = max(drawn) if len(drawn) > 1 else next(iter(drawn))
        rows += [len(targets)] * len(drawn)
        ids += drawn
        targets.append(target)
        logprobs.append(math.log(drawn[target]))
        entropies.append(-sum(p * math.log(p) for p in drawn.values()))
        by_logit = torch.zeros(V, dtype=torch.float64)  # of the log-probability
        for token, p in drawn.items():
            by_logit[token] = ((token == target) - p) / temperature
        slopes.append(by_logit)
    assert 1 < len(ids) / len(targets) < REAL / 2
    kept = Kept(torch.ones(T, dtype=torch.bool), torch.tensor(rows), torch.tensor(ids))
    found = replace(one, kept=kept, target=torch.tensor(targets)).ours()
    assert found.logprobs.tolist() == pytest.approx(logprobs)
    assert found.entropy.tolist() == pytest.approx(entropies)
    (by_hidden,) = torch.autograd.grad(found.logprobs.sum(), one.hidden)
    torch.testing.assert_close(by_hidden, torch.stack(slopes) @ one.weight.detach())


def test_kept_tokens_are_told_of_the_position_before():
    kept = Kept(
        torch.tensor([False, True, False, True]), torch.tensor([1, 1, 3]), torch.tensor([5, 6, 7])
    )
    before = kept.before()
    assert before.is_truncated.tolist() == [True, False, True, False]
    assert before.rows.tolist() == [0, 0, 2]
    assert before.ids.tolist() == [5, 6, 7]


def test_without_a_reference_there_is_no_kl_and_the_rest_is_the_same():
    one, without = case(), replace(case(), reference=None)
    assert without.ours().kl is None
    assert_same(without.ours()[:2], one.ours()[:2], 1e-15)
    assert_same(
        *(without.gradients(without.mixed(f())) for f in (without.ours, without.plain)), 1e-12
    )


def test_kl_from_itself_is_zero_and_so_is_its_gradient():
    one = case()
    one = replace(one, reference=(one.hidden, one.weight))
    kl = one.ours().kl
    assert kl is not None
    assert torch.equal(kl, torch.zeros(T, dtype=torch.float64))
    for gradient in one.gradients((kl * one.mix[2]).sum()):
        assert gradient.abs().max() < 1e-14


def test_the_reference_gets_no_gradient():
    one = case()
    hidden, weight = (tensor.requires_grad_() for tensor in one.reference)
    one.mixed(one.ours()).backward()
    assert hidden.grad is None
    assert weight.grad is None


@pytest.mark.parametrize("barred_target", [BARRED[0], REAL])
def test_what_cannot_be_chosen_gets_no_gradient_and_stays_finite(barred_target: int):
    one = case()
    one = replace(one, barred=torch.ones(T, dtype=torch.bool))
    result = replace(one, target=torch.full((T,), barred_target)).ours()
    assert (result.logprobs < -1e29).all()
    by_hidden, by_weight = one.gradients(1e20 * one.mixed(result))
    assert by_hidden.isfinite().all()
    assert by_weight.isfinite().all()
    dead = [*BARRED[:2], *range(REAL, V)]
    assert torch.equal(by_weight[dead], torch.zeros(len(dead), H, dtype=torch.float64))
    assert (by_weight[2:20].abs() > 0).all()


def test_large_gradients_do_not_meet_barred_logits_in_float32():
    one = case()
    one = replace(
        one,
        hidden=one.hidden.detach().float().requires_grad_(),
        weight=one.weight.detach().float().requires_grad_(),
        reference=tuple(tensor.float() for tensor in one.reference),
        temperature=one.temperature.float(),
    )
    for gradient in one.gradients(1e12 * one.mixed(one.ours())):
        assert gradient.isfinite().all()


@proves("log-probabilities", "entropy", against=PROPERTY, what="extremes")
def test_extreme_logits_stay_finite_and_right():
    one = case(scale=40.0)
    got = one.ours()
    assert_same(got, one.plain(), 1e-10)
    for gradient in one.gradients(one.mixed(got)):
        assert gradient.isfinite().all()


def test_targets_that_are_no_tokens_do_no_harm_where_nothing_is_asked():
    one = case()
    asked = torch.arange(T) % 2 == 0
    values = []
    for other in (0, -100, V, 10**9):
        result = replace(one, target=torch.where(asked, one.target, other)).ours().logprobs
        assert result.isfinite().all()
        loss = torch.where(asked, result, 0.0).sum()
        values.append(torch.cat([g.flatten() for g in one.gradients(loss)]))
    assert all(torch.equal(value, values[0]) for value in values)


@pytest.mark.parametrize("tempered", [True, False])
def test_numbers_of_rows_may_lie_anywhere(tempered: bool):
    one = replace(case(shaped=False), target=torch.tensor([[3, 0]]).expand(T, 2)[:, 0])
    if tempered:
        one = replace(one, temperature=torch.tensor(0.7).expand(T))  # float32 beside float64
    values = [
        sum(part.sum() for part in result if part is not None)  # gradients are expanded numbers
        for result in (one.ours(), one.plain())
    ]
    assert_same(*map(one.gradients, values), 1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_not_a_number_is_no_number_in_the_results(shape: str):
    one = SHAPES[shape]()
    hidden = one.hidden.detach().clone()
    hidden[3] = torch.nan
    one = replace(one, hidden=hidden.requires_grad_())
    for part in one.ours():
        assert part is not None
        assert part.isnan().tolist() == [row == 3 for row in range(T)]
    by_hidden, _ = one.gradients(one.mixed(one.ours()))
    assert by_hidden.isnan().any(-1).tolist() == [row == 3 for row in range(T)]


def test_a_kernel_refuses_logits_whose_columns_are_apart():
    triton_logits = pytest.importorskip("slipstream.algos.logprobs.triton_logits")
    chunk = Chunk(torch.ones(V, T).t(), torch.zeros(T, dtype=torch.int64), None, num_real=V)
    with pytest.raises(BeyondKernelError, match="11 numbers apart"):
        triton_logits.statistics(chunk)


def test_no_tokens():
    one = case(num_tokens=0)
    result = one.ours()
    assert [tuple(part.shape) for part in result] == [(0,), (0,), (0,)]
    by_hidden, by_weight = one.gradients(one.mixed(result))
    assert by_hidden.shape == (0, H)
    assert torch.equal(by_weight, torch.zeros(V, H, dtype=torch.float64))


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_either_side_may_be_frozen(frozen: str):
    one = case()
    expected = dict(zip(("hidden", "weight"), one.gradients(one.mixed(one.plain())), strict=True))
    half = replace(one, **{frozen: getattr(one, frozen).detach()})
    other = "weight" if frozen == "hidden" else "hidden"
    (gradient,) = torch.autograd.grad(half.mixed(half.ours()), getattr(half, other))
    assert (gradient - expected[other]).abs().max() < 1e-12


def test_a_second_derivative_is_refused_and_not_wrong():
    one = case()
    squared = one.ours().logprobs.square().sum()
    (first,) = torch.autograd.grad(squared, one.hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@proves("log-probabilities", "entropy", against=PROPERTY, what="half")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrower_types_are_summed_in_float32_and_as_near_as_plain_ones(dtype: torch.dtype):
    one = case(shaped=False)

    def cast(to: torch.dtype) -> Case:
        # Always the rounded numbers: what differs is how they are computed with.
        hidden, weight = (t.detach().to(dtype).to(to) for t in (one.hidden, one.weight))
        return replace(
            one,
            hidden=hidden.requires_grad_(),
            weight=weight.requires_grad_(),
            reference=tuple(tensor.to(dtype).to(to) for tensor in one.reference),
        )

    narrow, exact = cast(dtype), cast(torch.float64)
    got, plain = narrow.ours(), narrow.plain()
    assert {part.dtype for part in got} == {torch.float32}
    # Both read equally rounded logits of up to 10; float32 rounds them to 1e-6, twice.
    assert_same(got, plain, 4e-6)
    wanted = exact.gradients(exact.mixed(exact.plain()))
    ours, plains = narrow.gradients(narrow.mixed(got)), narrow.gradients(narrow.mixed(plain))
    for gradient, of_plain, expected in zip(ours, plains, wanted, strict=True):
        assert gradient.dtype == dtype
        # Twice: ours reads logits less their log-sum, where plain torch has what it kept. And by
        # what float32 has of these logits, where the roundings of plain torch happen to cancel.
        most = 2 * (of_plain - expected).norm() + 1e-6 * expected.norm()
        assert (gradient - expected).norm() < most


@proves("log-probabilities", "entropy", "kl.name = full", against=DEFINITION, what="half")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_narrow_types_are_not_rounded_to_them(dtype: torch.dtype):
    given = case(scale=2.0)
    hidden, weight = (t.detach().to(dtype) for t in (given.hidden, given.weight))
    reference = tuple(t.to(dtype) for t in given.reference or ())
    narrow = replace(
        given,
        hidden=hidden.requires_grad_(),
        weight=weight.requires_grad_(),
        reference=reference,
        temperature=given.temperature.float(),
        mix=given.mix.float(),
    )
    exact = replace(
        given,
        hidden=hidden.detach().double().requires_grad_(),
        weight=weight.detach().double().requires_grad_(),
        reference=tuple(t.double() for t in reference),
        temperature=narrow.temperature.double(),
    )
    got, wanted = narrow.ours(), exact.plain()
    rounded = (hidden @ weight.T).float()
    assert (rounded - hidden.double() @ weight.double().T).abs().max() > 4e-3, "too small to show"
    for part, right in zip(got, wanted, strict=True):
        assert (part - right).abs().max() < 2e-5
    squares = squared_probabilities(
        narrow.hidden, narrow.layer(weight), temperature=narrow.temperature, barred=narrow.barred
    )
    probabilities = exact.log_softmax(exact.hidden, exact.weight).exp()
    assert (squares - probabilities.square().sum(-1)).abs().max() < 1e-5
    rounding = torch.finfo(dtype).eps
    for gradient, right in zip(
        narrow.gradients(narrow.mixed(got)), exact.gradients(exact.mixed(wanted)), strict=True
    ):
        # The gradient by logits is rounded for the product, and the result once more.
        assert (gradient - right).norm() < rounding * right.norm()


@pytest.mark.parametrize("scale", [1.0, 20.0])
def test_rows_of_several_blocks_with_growing_logits(scale: float):
    generator = torch.Generator().manual_seed(9)
    rows = 9000  # kernels take 4096 at a time
    growth = torch.linspace(0.5, 1.0, rows, dtype=torch.float64).unsqueeze(-1)
    one = replace(
        case(num_tokens=3),
        weight=scale * growth * torch.randn(rows, H, generator=generator, dtype=torch.float64),
        reference=(torch.ones(3, 2), growth.expand(-1, 2)),
        target=torch.tensor([0, 4100, rows - 1]),
        vocab_size=rows - 7,
    )
    one = replace(
        one,
        hidden=one.hidden.detach().float().requires_grad_(),
        weight=one.weight.detach().float().requires_grad_(),
        reference=tuple(tensor.float() for tensor in one.reference or ()),
        temperature=one.temperature.float(),
        mix=one.mix * torch.tensor([[1.0, 1.0, 0.0], [1.0] * 3, [1.0] * 3]),  # the last is padding
    )
    exact = replace(
        one,
        hidden=one.hidden.detach().double().requires_grad_(),
        weight=one.weight.detach().double().requires_grad_(),
        reference=tuple(tensor.double() for tensor in one.reference or ()),
        temperature=one.temperature.double(),
        target=one.target.clamp(max=rows - 8),
    )
    for chunk_columns in (None, 5000):
        got, wanted = one.ours(chunk_columns), exact.plain()
        for part, right in zip(got[1:], wanted[1:], strict=True):
            assert (part - right).abs().max() < 1e-5 * max(1.0, right.abs().max().item())
        assert (got.logprobs - wanted.logprobs)[:2].abs().max() < 1e-5 * scale
        assert got.logprobs[2] < -1e29
        ours, right = one.gradients(one.mixed(got)), exact.gradients(exact.mixed(wanted))
        for gradient, expected in zip(ours, right, strict=True):
            assert (gradient - expected).abs().max() < 1e-5 * scale * expected.abs().max()


@pytest.mark.parametrize("shape", ["plain", "all-of-it"])
def test_logits_that_fit_are_kept_and_multiplied_once(shape: str, monkeypatch: pytest.MonkeyPatch):
    one = SHAPES[shape]()
    products = []

    class Products(TorchDispatchMode):
        @override
        def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> object:  # noqa: ANN001
            products.extend([func] * (func is torch.ops.aten.mm.default))
            return func(*args, **(kwargs or {}))

    def counted() -> tuple[int, tuple[Tensor, ...]]:
        products.clear()
        with Products():
            value = one.mixed(one.ours(V))
            return len(products), torch.autograd.grad(value, (one.hidden, one.weight))

    _, kept = counted()
    with_kept = len(products)
    monkeypatch.setattr(linear_module, "KEPT_BYTES", 2 * 4 * T * V - 1)
    forward, again = counted()
    assert forward == 2  # of the policy and of the reference
    assert len(products) - with_kept == 2
    assert_same(kept, again, 1e-15)


def test_a_second_backward_pass_over_kept_logits_gives_the_same():
    one = case()
    value = one.mixed(one.ours(V))
    first = torch.autograd.grad(value, (one.hidden, one.weight), retain_graph=True)
    assert_same(one.gradients(value), first, 1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_the_weight_is_added_to_a_given_total(dtype: torch.dtype):
    given = case(shaped=False)
    one = replace(
        given,
        hidden=given.hidden.detach().to(dtype).requires_grad_(),
        weight=given.weight.detach().to(dtype).requires_grad_(),
        reference=None,
    )
    expected = one.gradients(one.mixed(one.ours()))
    total = torch.ones(V, H)
    layer = OutputLayer(weight=one.weight, gradient=total)
    result = linear_logprobs(one.hidden, layer, one.target, chunk_columns=10)
    one.mixed(result).backward()
    assert one.weight.grad is not None
    assert one.weight.grad._nnz() == 0  # autograd has none of it
    assert torch.equal(one.hidden.grad, expected[0])
    rounding = torch.finfo(dtype).eps
    assert (total - 1.0 - expected[1]).norm() < max(rounding, 1e-6) * expected[1].norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gpu_multiplies_narrow_types_into_float32(dtype: torch.dtype):
    widened = []

    class Products(TorchDispatchMode):
        @override
        def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> object:  # noqa: ANN001
            if func is torch.ops.aten.mm.dtype:
                widened.append(args[2])
            return func(*args, **(kwargs or {}))

    # A GPU's shapes and types without a GPU; no more than this can be asked of it.
    with FakeTensorMode(), Products():
        left = torch.empty(T, H, dtype=dtype, device="cuda")
        right = torch.empty(H, V, dtype=dtype, device="cuda")
        assert product(left, right).dtype == torch.float32
    assert widened == ([torch.float32] if dtype == torch.bfloat16 else [])


def test_group_of_one_does_not_communicate():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        layer = OutputLayer(weight=torch.zeros(V, H), group=dist.group.WORLD)
        assert layer.split is None
        assert layer.first_row == 0
    finally:
        dist.destroy_process_group()


# ---- torch.compile -----------------------------------------------------------


def compiled(
    function: Callable[..., Tensor], *, whole: bool = True
) -> tuple[Callable[..., Tensor], object]:
    """Return a function compiled (whole: without graph breaks), and what counts its graphs."""
    from torch._dynamo.testing import CompileCounterWithBackend  # a second of every collection

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    inner = torch.compile(function, backend=counter, fullgraph=whole)

    def call(*arguments: Tensor) -> Tensor:
        with warnings.catch_warnings():
            # torch itself instantiates the autograd function that it traces.
            warnings.filterwarnings("ignore", "<class 'torch.autograd.function.Function'>")
            # And reads gradients of what it hands from one graph to the next.
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
            return inner(*arguments)

    return call, counter


# `make test` compiles a loss below; what these compile it computes without torch.compile, above.
@pytest.mark.slow
@pytest.mark.parametrize("whole", [True, False])
def test_compiled_results_are_the_same(whole: bool):
    one = case()

    def value(hidden: Tensor, weight: Tensor) -> Tensor:
        return one.mixed(replace(one, hidden=hidden, weight=weight).ours())

    graph, counter = compiled(value, whole=whole)
    if whole and torch.__version__ < "2.13":  # which would compile wrong gradients
        with pytest.raises(torch._dynamo.exc.Unsupported):
            graph(one.hidden, one.weight)
        return
    got, expected = graph(one.hidden, one.weight), value(one.hidden, one.weight)
    assert counter.frame_count == 1 or not whole
    assert got.item() == pytest.approx(expected.item(), abs=1e-12)
    assert_same(one.gradients(got), one.gradients(expected), 1e-12)


def test_a_loss_compiled_whole_is_the_same():
    generator = torch.Generator().manual_seed(7)
    current, anchor, advantages = torch.randn(3, 12, generator=generator, dtype=torch.float64)
    current.requires_grad_()
    mask = torch.arange(12) % 5 != 0
    cu_seqlens = torch.tensor([0, 4, 9, 12])
    denominators = Denominators(num_tokens=20.0, num_sequences=4.0)
    options = PpoOptions(clip_high=0.28, clip_dual=3.0)

    packing = Packing.of(mask, cu_seqlens)  # once for all losses of a microbatch

    def loss(current: Tensor) -> Tensor:
        inputs = SurrogateInputs(
            current=current, anchor=anchor, behavior=anchor, advantages=advantages, packing=packing
        )
        terms = ppo_clip.function(inputs, options)
        return reduced(terms.per_token, packing, denominators, "sequence-mean-token-mean")

    whole, counter = compiled(loss)
    got, expected = whole(current), loss(current)
    assert counter.frame_count == 1
    assert got.item() == pytest.approx(expected.item(), abs=1e-14)
    gradients = [torch.autograd.grad(value, current)[0] for value in (got, expected)]
    assert gradients[1].abs().max() > 0.01
    assert (gradients[0] - gradients[1]).abs().max() < 1e-14

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from algos.logprobs import vocab_parallel_logprobs

T, V = 9, 24


def reference(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The definitions, in double precision."""
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    return chosen, -(logprobs.exp() * logprobs).sum(-1)


def case(num_padded: int = 0, scale: float = 4.0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    logits = scale * torch.randn(T, V, generator=generator)
    target = torch.randint(0, V - num_padded, (T,), generator=generator)
    weights = torch.randn(2, T, generator=generator)
    return logits, target, weights


def gradient(logits: Tensor, values: tuple[Tensor, Tensor], weights: Tensor) -> Tensor:
    (values[0] * weights[0] + values[1] * weights[1]).sum().backward()
    return logits.grad


@pytest.fixture
def group_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("num_padded", [0, 3])
def test_values_and_gradients_are_those_of_log_softmax_over_the_true_vocabulary(num_padded: int):
    logits, target, weights = case(num_padded)
    vocab_size = V - num_padded
    mine = logits.clone().requires_grad_()
    exact = logits.double()[:, :vocab_size].requires_grad_()

    got = vocab_parallel_logprobs(mine, target, vocab_size=vocab_size)
    expected = reference(exact, target)
    for a, b in zip(got, expected, strict=True):
        assert (a - b).abs().max() < 2e-6
    got_gradient = gradient(mine, got, weights)
    expected_gradient = gradient(exact, expected, weights)
    assert (got_gradient[:, :vocab_size] - expected_gradient).abs().max() < 2e-6
    assert got_gradient[:, vocab_size:].abs().sum() == 0


def test_gradient_of_one_result_alone():
    logits, target, _ = case()
    for i in range(2):
        mine = logits.clone().requires_grad_()
        exact = logits.double().requires_grad_()
        vocab_parallel_logprobs(mine, target)[i].sum().backward()
        reference(exact, target)[i].sum().backward()
        assert (mine.grad - exact.grad).abs().max() < 2e-6


def test_gradient_agrees_with_finite_differences_in_direction():
    logits, target, weights = case(scale=1.0)

    def value(x: Tensor) -> Tensor:
        logprobs, entropy = vocab_parallel_logprobs(x, target)
        return (logprobs * weights[0] + entropy * weights[1]).sum()

    mine = logits.clone().requires_grad_()
    value(mine).backward()
    step = 1e-2 * torch.randn(T, V, generator=torch.Generator().manual_seed(4))
    difference = value(logits + step) - value(logits - step)
    assert difference.item() == pytest.approx(2 * (mine.grad * step).sum().item(), rel=1e-2)


def test_extreme_logits_stay_finite():
    logits = torch.tensor([[1e4, -1e4, 0.0], [3e4, 3e4, -3e4]], requires_grad=True)
    logprobs, entropy = vocab_parallel_logprobs(logits, torch.tensor([1, 0]))
    (logprobs.sum() + entropy.sum()).backward()
    assert logprobs.tolist() == pytest.approx([-2e4, -0.6931472])
    assert entropy.tolist() == pytest.approx([0.0, 0.6931472])
    assert logits.grad.isfinite().all()


def test_half_precision_logits_are_computed_in_single_precision():
    logits, target, weights = case()
    half = logits.bfloat16().requires_grad_()
    got = vocab_parallel_logprobs(half, target)
    expected = vocab_parallel_logprobs(logits.bfloat16().float(), target)
    assert got[0].dtype is torch.float32
    assert torch.equal(got[0], expected[0])
    assert gradient(half, got, weights).dtype is torch.bfloat16


def test_inputs_are_left_alone():
    logits, target, _ = case(num_padded=3)
    before = logits.clone()
    vocab_parallel_logprobs(logits, target, vocab_size=V - 3)
    assert torch.equal(logits, before)


def test_group_of_one_is_no_group(group_of_one: dist.ProcessGroup):
    logits, target, _ = case()
    alone = vocab_parallel_logprobs(logits, target)
    grouped = vocab_parallel_logprobs(logits, target, group=group_of_one)
    assert all(torch.equal(a, b) for a, b in zip(alone, grouped, strict=True))

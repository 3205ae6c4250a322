import math

import pytest
import torch
from torch import Tensor

from algos.batch import TrainBatch
from algos.losses import Clip, clipped_surrogate, decoupled_ppo_loss

WIDE = Clip(low=0.999, high=1e6)


def make_batch(
    current: Tensor, proximal: Tensor, behavior: Tensor, **overrides: object
) -> TrainBatch:
    fields: dict[str, object] = {
        "current_logprobs": current,
        "proximal_logprobs": proximal,
        "behavior_logprobs": behavior,
        "advantages": torch.tensor([1.0, -1.0, 0.5]),
        "loss_mask": torch.tensor([True, True, False]),
        "global_num_tokens": 2,
    }
    return TrainBatch(**(fields | overrides))


def logprobs(*values: float) -> Tensor:
    return torch.tensor(values)


def test_on_policy_gradient_is_minus_advantage_over_token_count():
    current = logprobs(-1.0, -2.0, -3.0).requires_grad_()
    batch = make_batch(current, current.detach(), current.detach())
    decoupled_ppo_loss(batch, Clip(), max_correction=5.0).backward()
    torch.testing.assert_close(current.grad, torch.tensor([-0.5, 0.5, 0.0]))


def test_the_loss_is_the_capped_correction_times_the_clipped_surrogate():
    current, proximal = logprobs(-1.0, -2.0, 0.0), logprobs(-1.5, -1.9, 0.0)
    behavior = logprobs(-1.2, -2.3, 0.0)
    loss = decoupled_ppo_loss(make_batch(current, proximal, behavior), Clip(), max_correction=1.4)
    first = math.exp(-0.3) * -min(math.exp(0.5), 1.2)
    second = 1.4 * -min(-math.exp(-0.1), -math.exp(-0.1))
    assert loss.item() == pytest.approx((first + second) / 2, rel=1e-6)


@pytest.mark.parametrize("garbage", [float("-inf"), float("inf"), float("nan")])
@pytest.mark.parametrize(
    "where", ["current_logprobs", "proximal_logprobs", "behavior_logprobs", "advantages"]
)
def test_masked_token_never_matters_whatever_stands_there(garbage: float, where: str):
    values = {
        "current_logprobs": logprobs(-1.1, -2.0, -3.0),
        "proximal_logprobs": logprobs(-1.0, -2.1, -3.0),
        "behavior_logprobs": logprobs(-1.2, -2.0, -3.0),
        "advantages": torch.tensor([1.0, -1.0, 0.5]),
    }
    rest = {"loss_mask": torch.tensor([True, True, False]), "global_num_tokens": 2}
    losses = []
    for last in (values[where][2].item(), garbage):
        tensors = {name: value.clone() for name, value in values.items()}
        tensors[where][2] = last
        batch = TrainBatch(**tensors, **rest)
        losses.append(decoupled_ppo_loss(batch, Clip(), max_correction=5.0))
    assert losses[1].item() == losses[0].item()


def test_the_gradient_of_a_masked_token_is_zero_even_when_behavior_is_infinite():
    current = logprobs(-1.0, -2.0, -3.0).requires_grad_()
    batch = make_batch(current, current.detach(), logprobs(-1.0, -2.0, float("-inf")))
    decoupled_ppo_loss(batch, Clip(), max_correction=5.0).backward()
    assert current.grad is not None
    assert current.grad.tolist() == [-0.5, 0.5, 0.0]


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "pulls"),
    [(0.5, 1.0, False), (0.5, -1.0, True), (-0.5, -1.0, False), (-0.5, 1.0, True)],
)
def test_the_clip_stops_the_pull_away_from_the_anchor_but_not_the_way_back(
    log_ratio: float, advantage: float, pulls: bool
):
    current = logprobs(log_ratio, 0.0, 0.0).requires_grad_()
    anchor = logprobs(0.0, 0.0, 0.0)
    batch = make_batch(current, anchor, anchor, advantages=torch.tensor([advantage, 0.0, 0.0]))
    decoupled_ppo_loss(batch, Clip(), max_correction=5.0).backward()
    assert current.grad is not None
    assert (current.grad[0].item() != 0.0) is pulls


def test_the_clip_is_around_the_proximal_policy_and_not_around_behavior():
    current = logprobs(0.0, 0.0, 0.0).requires_grad_()
    far = logprobs(-3.0, 0.0, 0.0)
    decoupled_ppo_loss(
        make_batch(current, current.detach(), far), Clip(), max_correction=2.0
    ).backward()
    assert current.grad is not None
    assert current.grad[0].item() == pytest.approx(-2.0 / 2)


def test_correction_is_capped():
    current = logprobs(0.0, 0.0, 0.0)
    stale = make_batch(current, current, logprobs(-5.0, 0.0, 0.0))
    loss = decoupled_ppo_loss(stale, WIDE, max_correction=2.0)
    torch.testing.assert_close(loss, torch.tensor((-2.0 * 1.0 + 1.0) / 2))


def test_the_correction_carries_no_gradient():
    proximal = logprobs(-1.0, -2.0, -3.0).requires_grad_()
    current = logprobs(-1.0, -2.0, -3.0).requires_grad_()
    decoupled_ppo_loss(
        make_batch(current, proximal, logprobs(-1.5, -2.0, -3.0)), WIDE, max_correction=5.0
    ).backward()
    assert proximal.grad is None
    assert current.grad is not None


def test_shares_of_two_microbatches_add_up_to_the_loss_of_one():
    torch.manual_seed(0)
    current, proximal, behavior, advantages = torch.randn(4, 10) * 0.2
    mask = torch.arange(10) % 3 > 0

    def loss(part: slice) -> Tensor:
        return decoupled_ppo_loss(
            TrainBatch(
                current_logprobs=current[part],
                proximal_logprobs=proximal[part],
                behavior_logprobs=behavior[part],
                advantages=advantages[part],
                loss_mask=mask[part],
                global_num_tokens=int(mask.sum()),
            ),
            Clip(),
            max_correction=5.0,
        )

    torch.testing.assert_close(loss(slice(4)) + loss(slice(4, 10)), loss(slice(10)))


def test_the_surrogate_takes_the_worse_of_the_plain_and_the_clipped_value():
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.1])
    advantages = torch.tensor([2.0, -2.0, 2.0, -2.0, 1.0])
    per_token = clipped_surrogate(ratio, advantages, Clip(low=0.2, high=0.3))
    torch.testing.assert_close(per_token, torch.tensor([-2.6, 3.0, -1.0, 1.6, -1.1]))


def test_misaligned_batch_names_the_tensor():
    current = logprobs(-1.0, -2.0, -3.0)
    with pytest.raises(ValueError, match=r"advantages has shape \(2,\), expected \(3,\)"):
        make_batch(current, current, current, advantages=torch.zeros(2))


def test_a_batch_without_tokens_to_train_is_refused():
    current = logprobs(-1.0, -2.0, -3.0)
    with pytest.raises(ValueError, match="global_num_tokens must be >= 1, got 0"):
        make_batch(current, current, current, global_num_tokens=0)

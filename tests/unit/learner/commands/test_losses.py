"""Losses of tenants, and their gradients, from their formulas by hand."""

import pytest
import torch

from slipstream.learner.commands.losses import loss_of

LOGPROBS = [-1.0, -2.0, -0.5]
OLD = [-1.5, -1.0, -0.5]  # ratios e^0.5, e^-1 and 1
ADVANTAGES = [1.0, -1.0, 2.0]
UP, DOWN = 1.6487212707, 0.3678794412


def column(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).unsqueeze(1)


@pytest.mark.parametrize(
    ("name", "options", "loss", "gradient"),
    [
        ("importance_sampling", {}, -(UP - DOWN + 2.0), [-UP, DOWN, -2.0]),
        ("ppo", {}, -(1.2 - 0.8 + 2.0), [0.0, 0.0, -2.0]),
        ("ppo", {"clip_high_threshold": 2.0}, -(UP - 0.8 + 2.0), [-UP, 0.0, -2.0]),
        ("cispo", {}, -(-1.2 + 0.8 * 2.0 - 1.0), [-1.2, 0.8, -2.0]),
        (
            "dro",
            {"beta": 0.5},
            -(-1.0 - 0.25 * 0.25 + 2.0 - 0.25 - 1.0),
            [-(1.0 - 0.25), -(-1.0 + 0.5), -2.0],
        ),
    ],
)
def test_a_loss_and_its_gradient(
    name: str, options: dict[str, float], loss: float, gradient: list[float]
):
    logprobs = column(LOGPROBS).requires_grad_()
    inputs = {"logprobs": column(OLD), "advantages": column(ADVANTAGES)}
    found = loss_of(name, logprobs, inputs, options)  # type: ignore[arg-type]
    found.backward()
    assert found.item() == pytest.approx(loss)
    assert logprobs.grad is not None
    assert logprobs.grad.flatten().tolist() == pytest.approx(gradient)


def test_weights_of_cross_entropy_and_masks_of_others():
    logprobs = column(LOGPROBS)
    found = loss_of("cross_entropy", logprobs, {"weights": column([1.0, 0.5, -1.0])}, {})
    assert found.item() == pytest.approx(1.0 + 1.0 - 0.5)
    inputs = {"logprobs": column(OLD), "advantages": column(ADVANTAGES)}
    masked = inputs | {"mask": column([0.0, 0.0, 1.0])}
    assert loss_of("importance_sampling", logprobs, masked, {}).item() == pytest.approx(-2.0)

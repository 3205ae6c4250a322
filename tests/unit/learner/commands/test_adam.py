"""AdamW of a tenant against torch's."""

import pytest
import torch

from slipstream.learner.commands.adam import Moments, update
from slipstream.wire.messages.commands import OptimStep

STEPS = [
    OptimStep(lr=1e-2, beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.0),
    OptimStep(lr=3e-3, beta1=0.8, beta2=0.99, epsilon=1e-6, weight_decay=0.1),
    OptimStep(lr=1e-3, beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.0, clip=0.5),
]


def test_steps_with_other_numbers_each_time_are_those_of_torch():
    random = torch.Generator().manual_seed(1)
    start = [torch.randn(3, 4, generator=random), torch.randn(5, generator=random)]
    moments = Moments.of(start)
    theirs = [torch.nn.Parameter(weight.clone()) for weight in start]
    optimizer = torch.optim.AdamW(theirs)
    for step in STEPS:
        gradients = [torch.randn(w.shape, generator=random) for w in start]
        norm = float(torch.cat([g.flatten() for g in gradients]).norm())
        update(moments, gradients, norm, step)
        for parameter, gradient in zip(theirs, gradients, strict=True):
            parameter.grad = gradient.clone()
        if step.clip:
            torch.nn.utils.clip_grad_norm_(theirs, step.clip)
        optimizer.param_groups[0].update(
            lr=step.lr,
            betas=(step.beta1, step.beta2),
            eps=step.epsilon,
            weight_decay=step.weight_decay,
        )
        optimizer.step()
        for ours, parameter in zip(moments.weights, theirs, strict=True):
            assert torch.allclose(ours, parameter, atol=1e-6)
    assert moments.step == len(STEPS)


def test_a_gradient_below_the_limit_is_not_clipped():
    step = OptimStep(lr=1.0, beta1=0.0, beta2=0.0, epsilon=1.0, weight_decay=0.0, clip=10.0)
    moments = Moments.of([torch.zeros(1)])
    update(moments, [torch.tensor([3.0])], 3.0, step)
    assert moments.weights[0].item() == pytest.approx(-3.0 / 4.0)

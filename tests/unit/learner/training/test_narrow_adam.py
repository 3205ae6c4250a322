"""Updates with moments in bfloat16."""

import torch

from slipstream.learner.training.narrow_adam import NarrowAdamW


def test_a_large_weight_is_updated_in_parts_as_its_parts_would_be():
    large = torch.linspace(-1, 1, 11).view(-1, 1)
    gradient = large.sin()
    several = [torch.nn.Parameter(part.clone()) for part in torch.split(large, 4)]
    whole = torch.nn.Parameter(large)
    options = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1}
    for weights, gradients in (([whole], [gradient]), (several, torch.split(gradient, 4))):
        optimizer = torch.optim.AdamW(weights, **options)
        optimizer.__class__ = NarrowAdamW
        optimizer.most_at_once = 4
        for _ in range(2):
            for weight, of_weight in zip(weights, gradients, strict=True):
                weight.grad = of_weight
            optimizer.step()
        assert [float(optimizer.state[w]["step"]) for w in weights] == [2.0] * len(weights)
    assert torch.equal(whole.detach(), torch.cat([part.detach() for part in several]))
    assert not torch.equal(whole.detach(), torch.linspace(-1, 1, 11).view(-1, 1))

"""AdamW with moments that are bfloat16 in memory and float32 in computation.

Megatron's precision-aware optimizer needs Transformer Engine; this one needs only torch.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam
from typing_extensions import override

MOMENTS = ("exp_avg", "exp_avg_sq")


class NarrowAdamW(torch.optim.AdamW):
    """Updates one weight after the other, with torch's own kernels.

    An ``AdamW`` is turned into this class by ``__class__``: torch makes no optimizer for views, and
    the weights of Megatron's distributed optimizer are views.
    """

    most_at_once = 1 << 24
    """Numbers of a weight that are updated at once, with two in float32 for each."""

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all weights that have a gradient.

        Raises:
            ValueError: there is a closure.
        """
        if closure is not None:
            raise ValueError("there is nothing to evaluate again")
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, group)

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, whatever the type of its moments."""
        super().load_state_dict(state_dict)  # gives moments the weights' type
        for state in self.state.values():
            for name in MOMENTS:
                if name in state:
                    state[name] = state[name].to(torch.bfloat16)

    def _update(self, weight: Tensor, group: dict[str, Any]) -> None:
        state = self.state[weight]
        if "exp_avg" not in state:
            for name in MOMENTS:
                state[name] = torch.zeros_like(weight, dtype=torch.bfloat16)
        if "step" not in state:
            state["step"] = no_updates(weight, group)
        tensors = [weight, weight.grad, *(state[name] for name in MOMENTS)]
        flat = (torch.split(tensor.view(-1), self.most_at_once) for tensor in tensors)
        parts, step = list(zip(*flat, strict=True)), state["step"]
        before = step.clone() if len(parts) > 1 else step
        for part in parts:
            step.copy_(before)  # every part is of the same update
            self._update_part(*part, step=step, group=group)

    def _update_part(
        self,
        weight: Tensor,
        gradient: Tensor,
        *moments: Tensor,
        step: Tensor,
        group: dict[str, Any],
    ) -> None:
        first, second = (moment.float() for moment in moments)
        beta1, beta2 = group["betas"]
        adam(
            [weight],
            [gradient],
            [first],
            [second],
            [],
            [step],
            foreach=False,
            fused=bool(group.get("fused")),
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=getattr(self, "found_inf", None),
            decoupled_weight_decay=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        for moment, value in zip(moments, (first, second), strict=True):
            moment.copy_(value)


def no_updates(weight: Tensor, group: dict[str, Any]) -> Tensor:
    """Return Adam's count before the first update, on the device where its kernels read it."""
    place = weight.device if group.get("fused") else torch.device("cpu")
    return torch.zeros((), dtype=torch.float32, device=place)

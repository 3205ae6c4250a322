"""Defects of Megatron's HybridDeviceOptimizer; a test fails when one of them is gone upstream.

It keeps a share of bfloat16 weights in float32 on the host and updates them there. It cannot be
made for float32 weights: a distributed optimizer gives it views of them.

- Its settings query the version of Transformer Engine, which fails if that is absent.
- It asks ``is_cuda`` which weights are the device's: on a machine without CUDA no weight is, and
  the first update fails.
- If both optimizers have the same class (without Transformer Engine), a loaded state is on the
  host for all of them. A loaded state keeps the weights in float32 twice until the next update.
"""

from typing import Any

import torch
from megatron.core.optimizer import optimizer_config
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.utils import get_te_version
from torch import Tensor

Groups = list[dict[str, Any]]
Pairs = dict[Tensor, Tensor]


def install() -> None:
    """Replace the defective methods; a second call does nothing."""
    HybridDeviceOptimizer._get_sub_optimizer_param_groups = _param_groups
    HybridDeviceOptimizer._move_new_state_to_right_device = _state_beside_weights
    if get_te_version() is None:
        optimizer_config.is_te_min_version = _is_no_version


def _is_no_version(*_args: object, **_kwargs: object) -> bool:
    return False


def _param_groups(
    optimizer: HybridDeviceOptimizer, offload_fraction: float
) -> tuple[Groups, Groups, Pairs, Pairs, Pairs]:
    """Replace the method: the first weights go to the host until they are enough."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    wanted = offload_fraction * sum(weight.numel() for weight in weights)
    on_host: Groups = []
    on_device: Groups = []
    host_copies: Pairs = {}
    float32_copies: Pairs = {}
    num_away = 0
    for group in optimizer.param_groups:
        ours, theirs = ({**group, "params": []} for _ in range(2))
        for weight in group["params"]:
            inner = weight
            is_away = num_away < wanted
            if is_away:
                num_away += weight.numel()
                inner = weight.detach().to("cpu", copy=True)
            if optimizer.param_update_in_fp32 and weight.dtype != torch.float32:
                inner = inner.detach().clone().float()
                float32_copies[weight] = inner
            if is_away:
                host_copies[weight] = inner
            (theirs if is_away else ours)["params"].append(inner)
        on_device += [ours] if ours["params"] else []
        on_host += [theirs] if theirs["params"] else []
    weight_of_copy = {copy: weight for weight, copy in host_copies.items()}
    return on_host, on_device, host_copies, weight_of_copy, float32_copies


def _state_beside_weights(optimizer: HybridDeviceOptimizer) -> None:
    """Replace the method: a state is on the device where its weight is updated."""
    for sub_optimizer in optimizer.sub_optimizers:
        for weight, state in sub_optimizer.state.items():
            for name, value in state.items():
                if name == "master_param":  # the weight was made equal to it
                    state[name] = weight
                elif isinstance(value, Tensor):
                    state[name] = value.to(weight.device)
            optimizer.state[optimizer.inner_param_to_orig_param[weight]] = state

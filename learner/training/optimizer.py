"""Megatron's optimizer, driven a piece at a time so that nothing is computed or read twice.

Megatron's own ``step`` prepares gradients and computes their norm once more, and without
Transformer Engine reads the norm of every parameter on its own, each a wait for the GPU.
"""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from slipstream.learner.training.narrow_adam import MOMENTS, NarrowAdamW, no_updates

MegatronOptimizer = Any  # megatron is untyped
_HYBRID_SETTINGS = (
    "offload_fraction",
    "cpu_optimizer_cls",
    "gpu_optimizer_cls",
    "param_update_in_fp32",
    "pin_cpu_grads",
    "pin_cpu_params",
    "overlap_cpu_optimizer_d2h_h2d",
)


def use_fused_kernels(optimizer: MegatronOptimizer) -> None:
    """Have torch's Adam update each parameter by one kernel, without tensors in between.

    torch's default takes another 4 bytes per parameter while it updates.
    """
    for inner in _torch_optimizers(optimizer):  # a hybrid one uses them anyway
        if isinstance(inner, torch.optim.Adam):
            for group in inner.param_groups:
                group.update(fused=True, foreach=False)
            put_steps_in_place(optimizer)


def narrow_moments(optimizer: MegatronOptimizer) -> None:
    """Have torch's AdamW keep its moments in bfloat16."""
    for inner in _torch_optimizers(optimizer):
        inner.__class__ = NarrowAdamW


def begin_steps(optimizer: MegatronOptimizer) -> None:
    """Give an optimizer the state of Adam that it has after its first update, if it needs it.

    Megatron reads a checkpoint into what is there, and torch's Adam has nothing before. Megatron
    itself makes what is float32 and not divided.
    """
    for one in _parts(optimizer):
        is_divided = isinstance(one, DistributedOptimizer)
        hybrid = one.optimizer if isinstance(one.optimizer, HybridDeviceOptimizer) else None
        is_narrow = isinstance(one.optimizer, NarrowAdamW)
        if not is_divided and not is_narrow:
            continue
        for inner in hybrid.sub_optimizers if hybrid is not None else [one.optimizer]:
            for group in inner.param_groups:
                for parameter in group["params"]:
                    state = inner.state[parameter]
                    if state:
                        continue
                    dtype = torch.bfloat16 if is_narrow else parameter.dtype
                    for name in MOMENTS:
                        state[name] = torch.zeros_like(parameter, dtype=dtype)
                    if is_divided:
                        state["step"] = no_updates(parameter, group)
        if hybrid is not None:
            hybrid._sync_sub_optimizers_state_to_hdo()


def without_hybrid_settings(state: object) -> None:
    """Take out of an optimizer's state what only the hybrid one has in its groups, also classes.

    Then any optimizer reads it, and nothing but data is in a checkpoint.
    """
    if isinstance(state, dict):
        for group in state.get("param_groups", ()):
            for name in _HYBRID_SETTINGS:
                group.pop(name, None)
        for value in state.values():
            without_hybrid_settings(value)


def put_steps_in_place(optimizer: MegatronOptimizer) -> None:
    """Move Adam's counts of updates to where its kernels read them, as after loading them.

    Fused kernels read them from the parameters' device, all others from the host.
    """
    for inner in _torch_optimizers(optimizer):
        if isinstance(inner, HybridDeviceOptimizer):
            continue  # has them beside what they belong to
        for group in inner.param_groups:
            for parameter in group["params"]:
                state = inner.state.get(parameter, {})
                if isinstance(state.get("step"), Tensor):
                    place = parameter.device if group.get("fused") else torch.device("cpu")
                    state["step"] = state["step"].to(place, torch.float32)


def optimizer_tensors(optimizer: MegatronOptimizer) -> list[Tensor]:
    """Return the weights that the optimizer updates on the device, and its state of each.

    Each once: the state of a hybrid one has the weights, too.
    """
    inners = [
        inner.gpu_optimizer if isinstance(inner, HybridDeviceOptimizer) else inner
        for inner in _torch_optimizers(optimizer)
    ]
    inners = [inner for inner in inners if inner is not None]  # all is updated on the host
    weights = [w for inner in inners for group in inner.param_groups for w in group["params"]]
    states = [state for inner in inners for state in inner.state.values()]
    values = [value for state in states for value in state.values() if isinstance(value, Tensor)]
    return list({id(tensor): tensor for tensor in weights + values}.values())


@torch.no_grad()
def gradient_norm(optimizer: MegatronOptimizer) -> Tensor:
    """Return the norm of the prepared gradients over all ranks of a model, where they are. []."""
    total: Tensor | None = None
    for one in _parts(optimizer):
        find = getattr(one, "get_grads_for_grad_norm", None) or one.get_main_grads_for_grad_norm
        gradients = find()
        norms = torch._foreach_norm(gradients) if gradients else ()
        square = (
            torch.stack(norms).float().square().sum()
            if norms
            else torch.zeros((), device=one.get_loss_scale().device)
        )
        dist.all_reduce(square, group=one.get_grad_stats_parallel_group())
        total = square if total is None else total + square
    if total is None:
        raise ValueError("there is no optimizer")
    return total.sqrt()


def step_with(optimizer: MegatronOptimizer, norm: float) -> None:
    """Clip the prepared gradients, which have this norm, and update the weights by them."""
    for one in _parts(optimizer):
        if one.config.clip_grad > 0.0:
            clip_grad_by_total_norm_fp32(
                one.get_parameters(),
                one.config.clip_grad,
                norm,
                one.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8,
            )
    optimizer.step_with_ready_grads()


def _parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Return the optimizers that Megatron chains, or the only one."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _torch_optimizers(optimizer: MegatronOptimizer) -> list[torch.optim.Optimizer]:
    return [one.optimizer for one in _parts(optimizer)]

"""Megatron's optimizer, driven piece by piece so that nothing is computed or read twice.

Megatron's own ``step`` prepares gradients and computes their norm again, and without Transformer
Engine reads the norm of every parameter separately, each time waiting for the GPU.
"""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import OptimizerConfig, ParamKey, get_standard_config_overrides
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor
from typing_extensions import override

from slipstream.learner.config import LearnerSection
from slipstream.learner.training.narrow_adam import MOMENTS, NarrowAdamW, no_updates
from slipstream.wire.models.families.tables import TOWER

MegatronOptimizer = Any  # megatron is untyped
_OF_VISION = "is_decoupled_lr"  # Megatron's mark of groups with a rate of their own
_OF_CLIPPING = 1e-6  # added to a norm that divides, as in Megatron
_HYBRID_SETTINGS = (
    "offload_fraction",
    "cpu_optimizer_cls",
    "gpu_optimizer_cls",
    "param_update_in_fp32",
    "pin_cpu_grads",
    "pin_cpu_params",
    "overlap_cpu_optimizer_d2h_h2d",
)


def make_scheduler(
    optimizer: MegatronOptimizer, settings: LearnerSection, *, decay_steps: int
) -> OptimizerParamScheduler:
    """Return a scheduler that has set the learning rate of the first step.

    The warm-up is (s + 1) / (w + 1) of learner.lr at step s of w: Megatron's own would train the
    first step with 0. After a resume the settings override those of the checkpoint; the number of
    steps taken comes from the checkpoint. learner.lr_min is reached at ``decay_steps``.
    """
    warmup = settings.lr_warmup_steps
    return _Scheduler(
        settings.vision_lr_scale,
        optimizer,
        init_lr=settings.lr / (warmup + 1),
        max_lr=settings.lr,
        min_lr=settings.lr_min,
        lr_warmup_steps=warmup,
        lr_decay_steps=max(decay_steps, warmup + 1),
        lr_decay_style=settings.lr_schedule,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
        wsd_decay_steps=settings.wsd_decay_steps,
        lr_wsd_decay_style=settings.wsd_decay,
    )


class _Scheduler(OptimizerParamScheduler):  # type: ignore[misc]  # megatron is untyped
    """A scheduler with a factor on the rate of the vision tower."""

    def __init__(self, vision_scale: float, *given: object, **named: object) -> None:
        self._vision_scale = vision_scale
        super().__init__(*given, **named)

    @override
    def get_lr(self, param_group: dict[str, Any]) -> float:
        """Return the rate of a group of parameters."""
        rate: float = super().get_lr(param_group)
        return rate * (self._vision_scale if param_group.get(_OF_VISION) else 1.0)


def overrides(config: OptimizerConfig, *, trains_vision: bool) -> dict[ParamKey, Any] | None:
    """Return what some parameters have of their own; None is Megatron's usual.

    Those of a vision tower are groups of their own, whatever their rate: a checkpoint has them.
    """
    if not trains_vision:
        return None
    usual: dict[ParamKey, Any] = get_standard_config_overrides(config)
    return usual | {ParamKey(name=f"*{TOWER}*"): {_OF_VISION: True}}


def use_fused_kernels(optimizer: MegatronOptimizer) -> None:
    """Have torch's Adam update each parameter by one kernel, without intermediate tensors.

    torch's default takes another 4 bytes per parameter during an update.
    """
    for inner in _torch_optimizers(optimizer):  # a hybrid optimizer uses them anyway
        if isinstance(inner, torch.optim.Adam):
            for group in inner.param_groups:
                group.update(fused=True, foreach=False)
    put_steps_in_place(optimizer)


def narrow_moments(optimizer: MegatronOptimizer) -> None:
    """Have torch's AdamW keep its moments in bfloat16."""
    for inner in _torch_optimizers(optimizer):
        inner.__class__ = NarrowAdamW


def begin_steps(optimizer: MegatronOptimizer) -> None:
    """Give an optimizer Adam's state as after its first update, if needed.

    Megatron reads a checkpoint into existing state, and torch's Adam has none before its first
    update. For a float32 optimizer that is not divided, Megatron itself makes the state.
    """
    for part in _parts(optimizer):
        is_divided = isinstance(part, DistributedOptimizer)
        hybrid = part.optimizer if isinstance(part.optimizer, HybridDeviceOptimizer) else None
        is_narrow = isinstance(part.optimizer, NarrowAdamW)
        if not is_divided and not is_narrow:
            continue
        for inner in hybrid.sub_optimizers if hybrid is not None else [part.optimizer]:
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
    """Remove entries that only the hybrid optimizer has in its groups, classes among them.

    Then any optimizer reads the state, and a checkpoint holds only data.
    """
    if isinstance(state, dict):
        for group in state.get("param_groups", ()):
            for name in _HYBRID_SETTINGS:
                group.pop(name, None)
        for value in state.values():
            without_hybrid_settings(value)


def put_steps_in_place(optimizer: MegatronOptimizer) -> None:
    """Move Adam's counts of updates to the device where its kernels read them, after loading.

    Fused kernels read them from the parameters' device, all others from the host.
    """
    for inner in _torch_optimizers(optimizer):
        if isinstance(inner, HybridDeviceOptimizer):
            continue  # has them with their weights
        for group in inner.param_groups:
            for parameter in group["params"]:
                state = inner.state.get(parameter, {})
                if isinstance(state.get("step"), Tensor):
                    place = parameter.device if group.get("fused") else torch.device("cpu")
                    state["step"] = state["step"].to(place, torch.float32)


def optimizer_tensors(optimizer: MegatronOptimizer) -> tuple[list[Tensor], list[Tensor]]:
    """Return the weights that the optimizer updates on the device, and their moments and counts.

    A hybrid optimizer has the weights in its state, too; they come once.
    """
    inners = [
        inner.gpu_optimizer if isinstance(inner, HybridDeviceOptimizer) else inner
        for inner in _torch_optimizers(optimizer)
    ]
    inners = [inner for inner in inners if inner is not None]  # all is updated on the host
    weights = [w for inner in inners for group in inner.param_groups for w in group["params"]]
    states = [state for inner in inners for state in inner.state.values()]
    values = [value for state in states for value in state.values() if isinstance(value, Tensor)]
    known = {id(weight) for weight in weights}
    return weights, [value for value in values if id(value) not in known]


@torch.no_grad()
def gradient_norm(optimizer: MegatronOptimizer) -> Tensor:
    """Return the norm of the prepared gradients over all ranks of a model, on their device. []."""
    total: Tensor | None = None
    for part in _parts(optimizer):
        find = getattr(part, "get_grads_for_grad_norm", None) or part.get_main_grads_for_grad_norm
        gradients = find()
        norms = torch._foreach_norm(gradients) if gradients else ()
        square = (
            torch.stack(norms).float().square().sum()
            if norms
            else torch.zeros((), device=part.get_loss_scale().device)
        )
        dist.all_reduce(square, group=part.get_grad_stats_parallel_group())
        total = square if total is None else total + square
    if total is None:
        raise ValueError("there is no optimizer")
    return total.sqrt()


@torch.no_grad()
def step_with(optimizer: MegatronOptimizer, norm: Tensor, is_bad: Tensor) -> None:
    """Clip the prepared gradients and update the weights, in one pass of fused AdamW.

    Without weights on the host, nothing waits for the device.

    Args:
        optimizer: its torch optimizers have fused kernels.
        norm: [] of the prepared gradients, over all ranks of the model.
        is_bad: [] 1.0 where weights and optimizer must not change, 0.0 elsewhere; equal on all
            ranks.
    """
    clip = optimizer.config.clip_grad
    scale = ((norm + _OF_CLIPPING) / clip).clamp(min=1.0).float() if clip > 0.0 else None
    wanted = {norm.device: (scale, is_bad.float())}
    for inner in _updating(optimizer):
        place = next(weight.device for group in inner.param_groups for weight in group["params"])
        if place not in wanted:  # a copy without a wait could be read before it is there
            wanted[place] = (None if scale is None else scale.to(place), is_bad.float().to(place))
        inner.grad_scale, inner.found_inf = wanted[place]
    optimizer.step_with_ready_grads()


def leave_out_stubs(optimizer: MegatronOptimizer) -> None:
    """Leave optimizers without a parameter out of a chain with others: its state would fail.

    Where adapters are of experts alone, Megatron chains one for all other parameters besides.
    """
    if trained := [part for part in _parts(optimizer) if not part.is_stub_optimizer]:
        optimizer.chained_optimizers = trained


def _parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Return the optimizers that Megatron chains, or the only one."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _torch_optimizers(optimizer: MegatronOptimizer) -> list[torch.optim.Optimizer]:
    inners = (part.optimizer for part in _parts(optimizer))
    return [inner for inner in inners if inner is not None]  # None where a rank trains nothing


def _updating(optimizer: MegatronOptimizer) -> list[Any]:
    """Return the optimizers that update weights: of a hybrid one, those inside of it."""
    inners = _torch_optimizers(optimizer)
    updating = [adam for inner in inners for adam in getattr(inner, "sub_optimizers", [inner])]
    # A rank's share of a distributed optimizer may have no weight of a group, or none at all.
    return [adam for adam in updating if any(group["params"] for group in adam.param_groups)]

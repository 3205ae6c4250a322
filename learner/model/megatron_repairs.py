"""Workarounds for defects of Megatron-Core; a test fails when a defect is gone upstream.

- Without Transformer Engine the import of ``te_general_gemm`` in its router fails as a whole and
  leaves the name undefined: every forward pass with ``moe_router_dtype`` raises a NameError.
- Without Transformer Engine latent attention still assumes it: the import gives stand-ins that are
  no classes, and a check whether a layer is an instance of one raises a TypeError.
- Gradients of experts are summed over too few ranks where ``expert_model_parallel_size`` is 1 and
  ``tensor_model_parallel_size`` is not: see ``mark_expert``.
- A distributed optimizer around torch's Adam, which keeps a count of updates per parameter, cannot
  be loaded: a checkpoint has no such tensor per parameter. Loading then gives all parameters one
  tensor to count in, which each of them advances.
- A checkpoint of a distributed optimizer with several buckets has wrong moments: the gathered state
  is without the padding at the end of buckets, and is read by places that count it.
- A distributed optimizer reads the gradients of views of float32 weights, which it has set itself:
  torch warns of each place that does so.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils
from torch import Tensor

from slipstream.learner.model import hybrid_repairs

_MARK = "_slipstream_repaired"


def install() -> None:
    """Make the repairs that are replacements; a second call does nothing."""
    hybrid_repairs.install()
    warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor that is not a leaf")
    vars(moe_utils).setdefault("te_general_gemm", None)
    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.HAVE_TE = False
    if getattr(DistributedOptimizer, _MARK, False):
        return
    setattr(DistributedOptimizer, _MARK, True)
    DistributedOptimizer._set_main_param_and_optimizer_states = _setting_states(
        DistributedOptimizer._set_main_param_and_optimizer_states
    )
    DistributedOptimizer.load_state_dict = _loading_states(DistributedOptimizer.load_state_dict)
    DistributedOptimizer.get_parameter_state_dp_zero = _keeping_places(
        DistributedOptimizer.get_parameter_state_dp_zero
    )


def mark_expert(parameter: torch.nn.Parameter) -> None:
    """Have an expert's gradient summed over the ranks that hold the same expert."""
    parameter.allreduce = False  # type: ignore[attr-defined]  # Megatron's mark


def _keeping_places(
    original: Callable[..., dict[Any, Any] | None],
) -> Callable[..., dict[Any, Any] | None]:
    def gathered(optimizer: DistributedOptimizer, **options: object) -> dict[Any, Any] | None:
        state = original(optimizer, **options)
        if state is None:
            return None
        is_empty = bool(options.get("empty_data"))  # a place to read into
        for number, buffer in enumerate(optimizer.buffers):
            for tensors in state[number].values():
                for name, value in tensors.items():
                    if isinstance(value, Tensor):
                        tensors[name] = _in_place(value, buffer, is_empty=is_empty)
        return state

    return gathered


def _in_place(state: Tensor, buffer: Any, *, is_empty: bool) -> Tensor:  # noqa: ANN401  # megatron is untyped
    """Return a buffer's state [elements without padding] with the padding of its buckets."""
    if is_empty:  # no page of it is touched
        return state.new_zeros(buffer.numel) if len(buffer.buckets) > 1 else state
    parts = torch.split(state, [bucket.numel_unpadded for bucket in buffer.buckets])
    if len(parts) == 1:
        return state
    padded = state.new_zeros(buffer.numel)
    for bucket, part in zip(buffer.buckets, parts, strict=True):
        padded[bucket.offset : bucket.offset + len(part)] = part
    return padded


def _setting_states(
    original: Callable[..., None],
) -> Callable[[DistributedOptimizer, torch.nn.Parameter, dict[str, Tensor]], None]:
    def set_states(
        optimizer: DistributedOptimizer, parameter: torch.nn.Parameter, tensors: dict[str, Tensor]
    ) -> None:
        group, order = optimizer.model_param_group_index_map[parameter]
        main = optimizer.optimizer.param_groups[group]["params"][order]
        state = optimizer.optimizer.state[main]
        step = state.pop("step", None)
        try:
            with torch.no_grad():
                original(optimizer, parameter, tensors)
        finally:
            if step is not None:
                state["step"] = step

    return set_states


def _loading_states(
    original: Callable[..., None],
) -> Callable[[DistributedOptimizer, dict[str, Any]], None]:
    def load(optimizer: DistributedOptimizer, state_dict: dict[str, Any]) -> None:
        original(optimizer, state_dict)
        for state in optimizer.optimizer.state.values():
            if isinstance(state.get("step"), Tensor):
                state["step"] = state["step"].clone()

    return load

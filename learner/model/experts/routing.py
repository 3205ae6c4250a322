"""Brings the choices that come with a microbatch to the routers of Megatron's layers.

A microbatch's layout reaches every layer; a hook there passes the choices to the router, also when
activations are recomputed.
"""

import types
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor


def hand_on_choices(layer: torch.nn.Module) -> None:
    """Have a transformer layer pass its router the choices that come with a microbatch.

    ``layer.mlp.router`` has an attribute ``choices``; a layer without a router stays unchanged.
    """
    mlp: Any = layer.mlp
    router = getattr(mlp, "router", None)
    if router is None:
        return

    def hand_on(_layer: torch.nn.Module, _args: object, named: dict[str, Any]) -> None:
        router.choices = named["packed_seq_params"].choices

    layer.register_forward_pre_hook(hand_on, with_kwargs=True)
    if mlp.moe_layer_recompute:  # recomputed alone, after other microbatches
        mlp.moe_layer_recompute = False
        mlp.forward = types.MethodType(_recomputed, mlp)


def _recomputed(mlp: MoELayer, hidden: Tensor, *_rest: object, **_named: object) -> object:
    """Replace the layer's forward: recompute it in the backward pass, by the same choices."""
    choices = mlp.router.choices

    def compute(hidden: Tensor) -> object:
        mlp.router.choices = choices
        return MoELayer.forward(mlp, hidden)

    return tensor_parallel.checkpoint(compute, False, hidden)

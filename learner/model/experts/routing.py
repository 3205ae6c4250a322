"""Brings the choices that come with a microbatch to the routers of Megatron's layers.

A microbatch's layout reaches every layer; a hook there passes the choices to the router, also when
activations are recomputed.
"""

from typing import Any

import torch


def hand_on_choices(layer: torch.nn.Module) -> None:
    """Have a transformer layer pass its router the choices that come with a microbatch.

    ``layer.mlp.router`` has an attribute ``choices``; a layer without a router stays unchanged.
    """
    router = getattr(layer.mlp, "router", None)
    if router is None:
        return

    def hand_on(_layer: torch.nn.Module, _args: object, named: dict[str, Any]) -> None:
        router.choices = named["packed_seq_params"].choices

    layer.register_forward_pre_hook(hand_on, with_kwargs=True)

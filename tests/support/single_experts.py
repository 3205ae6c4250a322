"""Megatron's own experts, one after another, with its own dispatcher: what groups must compute."""

import copy
from typing import Any

import torch
from torch import Tensor


def single_weights(experts: Any) -> dict[str, Tensor]:  # noqa: ANN401
    """Return the weights of a rank's ``GroupedExperts`` by the names of Megatron's."""
    stacks = {
        f"{name}.{kind}": getattr(experts, name + ("_bias" if kind == "bias" else ""))
        for name in ("linear_fc1", "linear_fc2")
        for kind in ("weight", "bias")
    }
    return {
        f"local_experts.{number}.{name}": weight
        for name, stack in stacks.items()
        if stack is not None
        for number, weight in enumerate(stack)
    }


def megatrons_experts(mlp: Any) -> Any:  # noqa: ANN401
    """Return Megatron's module for a layer's experts, with weights of its own."""
    from megatron.core.activations import quick_gelu
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    submodules = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    groups = get_default_pg_collection()
    config, form = copy.copy(mlp.config), mlp.config.expert_activation
    if form.slope != 1.0:  # Megatron's other gate has this one slope
        config.activation_func, config.bias_activation_fusion = quick_gelu, False
        config.glu_linear_offset = form.offset
        config.activation_func_clamp_value = form.limit
    single = SequentialMLP(mlp.num_local_experts, config, submodules, pg_collection=groups)
    # It adds a bias in place, which autograd refuses.
    for expert in single.local_experts if config.add_bias_linear else ():
        expert.linear_fc2.register_forward_hook(
            lambda _module, _inputs, out: (out[0].clone(), out[1])
        )
    return single


def compute_one_by_one(mlp: Any, *, copied: bool = False) -> Any:  # noqa: ANN401
    """Have a layer with experts compute as Megatron would, with its own router.

    It computes with the weights of the layer, or ``copied`` ones. Returns Megatron's module.
    """
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    single = megatrons_experts(mlp)
    if copied:
        single.to(mlp.experts.linear_fc1.device).load_state_dict(
            single_weights(mlp.experts), strict=False
        )
    dispatcher = MoEAlltoAllTokenDispatcher(
        mlp.num_local_experts,
        mlp.local_expert_indices,
        config=mlp.config,
        pg_collection=get_default_pg_collection(),
    )

    def forward(hidden: Tensor, *_rest: object, **_named: object) -> tuple[Tensor, None]:
        weights, chosen = mlp.router(hidden)
        nowhere = weights.new_zeros(len(chosen), mlp.config.num_moe_experts)
        everywhere = nowhere.scatter(-1, chosen, weights)
        rows, shares = dispatcher.dispatch_preprocess(
            hidden, nowhere.bool().scatter(-1, chosen, True), everywhere
        )
        for name in ("input_splits", "output_splits"):  # numbers, as of a GPU
            if isinstance(sizes := getattr(dispatcher, name), Tensor):
                setattr(dispatcher, name, sizes.tolist())
        rows, shares = dispatcher.token_dispatch(rows, shares)
        rows, counts, shares = dispatcher.dispatch_postprocess(rows, shares)
        weights_of_layer = {} if copied else single_weights(mlp.experts)
        outputs, _ = torch.func.functional_call(single, weights_of_layer, (rows, counts, shares))
        outputs = dispatcher.token_combine(dispatcher.combine_preprocess(outputs))
        outputs = dispatcher.combine_postprocess(outputs)
        shared = mlp.shared_experts_compute(hidden)
        return outputs if shared is None else outputs + shared, None

    mlp.forward = forward
    return single

"""Experts of a rank as two stacks of weights, and the layer that computes with them.

It replaces Megatron's experts, which are computed one after another, and its dispatcher. Weights
keep their names and places in checkpoints and in what is published.

Shapes: T tokens of this rank, H hidden size, k experts of a token; M rows, sorted by expert; E
experts of this rank, I inner channels of this rank's part of each.
"""

import types
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.tensor_parallel.random import get_expert_parallel_rng_tracker_name
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor
from typing_extensions import override

from slipstream.learner.model.experts.expert_exchange import Exchange
from slipstream.learner.model.experts.expert_places import Places
from slipstream.learner.model.experts.grouped_products import grouped_linear, with_bias
from slipstream.learner.model.fused_gradients import main_gradient_of
from slipstream.learner.model.kernels.swiglu import swiglu
from slipstream.learner.model.kernels.swiglu_form import PLAIN, Form
from slipstream.learner.model.rank_model import ADAPTER
from slipstream.wire.models.hf_config import HfConfig

Replica = tuple[int, int, int]  # Megatron's numbers of a copy; the first, (0, 0, 0), is written


class GroupedExperts(MegatronModule):  # type: ignore[misc]  # megatron is untyped
    """Experts of this rank.

    ``linear_fc1`` is [E, 2I, H], gates first, then ups; ``linear_fc2`` is [E, H, I]. With biases
    ``linear_fc1_bias`` is [E, 2I] and ``linear_fc2_bias`` [E, H]. Where ranks divide each expert,
    each part is computed as an expert, and a token is sent to all parts; experts with biases are
    not divided.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        pg_collection: Any,  # noqa: ANN401  # megatron is untyped
        name: str | None = None,  # noqa: ARG002  # megatron-core 0.19 passes it
    ) -> None:
        super().__init__(config=config)
        self._count = num_local_experts
        self._groups = pg_collection
        parts: int = pg_collection.expt_tp.size()
        inner, hidden = config.moe_ffn_hidden_size // parts, config.hidden_size
        self.linear_fc1 = self._made((num_local_experts, 2 * inner, hidden), config.init_method, 1)
        self.linear_fc2 = self._made(
            (num_local_experts, hidden, inner), config.output_layer_init_method, 2
        )
        self.linear_fc1_bias: torch.nn.Parameter | None = None
        self.linear_fc2_bias: torch.nn.Parameter | None = None
        if config.add_bias_linear:
            zeros = torch.nn.init.zeros_
            self.linear_fc1_bias = self._made((num_local_experts, 2 * inner), zeros, 1)
            self.linear_fc2_bias = self._made((num_local_experts, hidden), zeros, 1)
        self._form: Form = getattr(config, "expert_activation", PLAIN)

    def _made(self, shape: tuple[int, ...], init: Any, divided: int) -> torch.nn.Parameter:  # noqa: ANN401
        on_cpu = self.config.use_cpu_initialization
        where = "cpu" if on_cpu else torch.cuda.current_device()
        weight = torch.nn.Parameter(
            torch.empty(shape, dtype=self.config.params_dtype, device=where)
        )
        # A mark of biases, too, with which every rank counts its own in norms of gradients.
        tensor_parallel.set_tensor_model_parallel_attributes(weight, True, divided, 1)
        if self.config.perform_initialization and on_cpu:
            init(weight)
        elif self.config.perform_initialization:
            tracker = tensor_parallel.get_cuda_rng_tracker()
            with tracker.fork(get_expert_parallel_rng_tracker_name()):
                init(weight)
        return weight

    @override
    def forward(self, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Return the weighted sum of the outputs of each token's experts, [T, H].

        The host waits for the device only if other ranks have experts too, and once.

        Args:
            tokens: [T, H].
            weights: [T, k] float32.
            chosen: [T, k] int64, numbers of experts in the whole model.
        """
        group, parts = self._groups.tp_ep, self._groups.expt_tp.size()
        if parts > 1:
            first = chosen + (parts - 1) * self._count * (chosen // self._count)
            steps = self._count * torch.arange(parts, device=chosen.device)
            chosen = (first.unsqueeze(-1) + steps).flatten(1)
            weights = weights.unsqueeze(-1).expand(-1, -1, parts).flatten(1)
        places = Places.of(chosen, group.size() * self._count)
        rows, weights = places.taken(tokens), places.chosen(weights)
        if group.size() == 1:
            return places.summed(self._outputs(rows, weights, places.ends))
        exchange = Exchange.of(places.ends, group)
        outputs = self._outputs(exchange.there(rows), exchange.there(weights), exchange.ends)
        return places.summed(exchange.back(outputs))

    def _outputs(self, rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        gate_up = self._product("linear_fc1", rows, ends)
        if self.linear_fc1_bias is not None:
            gate_up = with_bias(gate_up, self.linear_fc1_bias, ends)
        weights = weights.unsqueeze(-1)
        inner = swiglu(gate_up, weights, self._form)
        outputs = self._product("linear_fc2", inner, ends)
        if self.linear_fc2_bias is None:
            return outputs
        return with_bias(outputs, self.linear_fc2_bias, ends, weights)

    def _product(self, name: str, rows: Tensor, ends: Tensor) -> Tensor:
        """Return each row times the weight of its expert, with what an adapter adds."""
        weight: torch.nn.Parameter = getattr(self, name)
        product = grouped_linear(rows, weight, ends, main_gradient_of(weight, self.config))
        adapter = dict(getattr(self, ADAPTER, {})).get(name)
        return product if adapter is None or not adapter.is_on else product + adapter(rows, ends)

    def adapt(self, name: str, adapter: torch.nn.Module) -> None:
        """Have an adapter add to the product with the weights of this name."""
        if not hasattr(self, ADAPTER):
            self.add_module(ADAPTER, torch.nn.ModuleDict())
        getattr(self, ADAPTER)[name] = adapter

    @override
    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the weights in the form of Megatron's single experts, which is the whole model's.

        A file has the weights of all experts of a layer as one tensor, and of all parts of them.
        """
        axis, groups = len(sharded_offsets), self._groups
        of_experts = (axis, groups.ep.rank(), groups.ep.size())
        part, parts = groups.expt_tp.rank(), groups.expt_tp.size()
        replica = (0, 0, groups.expt_dp.rank())

        def share(
            key: str, weight: Tensor, replica: Replica, divided: int, number: int, of: int
        ) -> ShardedTensor:
            offsets = (*sharded_offsets, of_experts, (axis + divided, number, of))
            return ShardedTensor.from_rank_offsets(
                key, weight, *offsets, replica_id=replica, prepend_axis_num=axis
            )

        def gates_and_ups(
            key: str, weight: Tensor, replica: Replica, *_flattened: object
        ) -> list[ShardedTensor]:
            halves = enumerate(weight.chunk(2, dim=1))
            return [share(key, half, replica, 1, n * parts + part, 2 * parts) for n, half in halves]

        key = f"{prefix}experts.linear_fc"
        biases = {
            f"{prefix}linear_fc{number}_bias": ShardedTensor.from_rank_offsets(
                f"{key}{number}.bias",
                bias,
                *sharded_offsets,
                of_experts,
                replica_id=replica,
                prepend_axis_num=axis,
            )
            for number, bias in ((1, self.linear_fc1_bias), (2, self.linear_fc2_bias))
            if bias is not None
        }
        return biases | {
            f"{prefix}linear_fc1": ShardedTensorFactory(
                f"{key}1.weight",
                self.linear_fc1,
                gates_and_ups,
                lambda halves: torch.cat(halves, dim=1),
                replica,
            ),
            f"{prefix}linear_fc2": share(
                f"{key}2.weight", self.linear_fc2, replica, 2, part, parts
            ),
        }


def activation_of(hf: HfConfig) -> Form:
    """Return the activation of a model's experts."""
    activation = hf.family.activation
    limit = hf.swiglu_limit if activation.is_limited else None
    return Form(activation.slope, activation.offset, limit)


def compute_in_groups(layer: torch.nn.Module) -> None:
    """Have a layer with ``GroupedExperts`` compute with them; other layers stay unchanged."""
    if isinstance(layer.mlp, MoELayer):
        layer.mlp.forward = types.MethodType(_forward, layer.mlp)


def _forward(
    mlp: MoELayer, hidden: Tensor, *_rest: object, **_named: object
) -> tuple[Tensor, None]:
    """Replace the layer's forward. [T, B, H] -> [T, B, H]; there is no bias."""
    if not mlp.moe_layer_recompute:
        return _computed(mlp, hidden), None
    choices = mlp.router.choices  # other microbatches may come before it is computed again

    def again(hidden: Tensor) -> Tensor:
        mlp.router.choices = choices
        return _computed(mlp, hidden)

    return tensor_parallel.checkpoint(again, False, hidden), None


def _computed(mlp: MoELayer, hidden: Tensor) -> Tensor:
    weights, chosen = mlp.router(hidden)
    output: Tensor = mlp.experts(hidden.flatten(0, 1), weights, chosen).view_as(hidden)
    shared = mlp.shared_experts_compute(hidden)
    return output if shared is None else output + shared

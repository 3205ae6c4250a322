"""Low-rank adapters of a Megatron model's linear layers, latent attention and experts included.

Shapes: r rank, I size of a layer's input and O of one of its outputs.
"""

import re
import types
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

from slipstream.learner.model import device
from slipstream.learner.model.adapters.additions import Adapter, ExpertAdapter, LayerShare, LowRank
from slipstream.learner.model.adapters.low_rank import drawn
from slipstream.learner.model.latent_attention import WholeLinear
from slipstream.learner.model.rank_model import ADAPTER, RankModel, is_expert, single_weights
from slipstream.learner.model.weights.gathering import parameter_of, split_of
from slipstream.learner.model.weights.hf_weights import geometry_of
from slipstream.learner.model.weights.shards import Shard
from slipstream.wire.models.adapters import AdapterFacts, check_targets, is_target, peft_names_of
from slipstream.wire.models.families.tables import FusionKind, HfTensor, Parameter, without_expert

_WEIGHT = ".weight"
_OF_EXPERT = re.compile(r"(.+\.experts)\.local_experts\.\d+\.(\w+)\.weight")


@dataclass(frozen=True, slots=True)
class _Adapted:
    """A weight with an adapter."""

    adapter: Adapter
    parameter: Parameter  # contents of the weight
    expert: int | None = None  # number among this rank's experts


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """This rank's share of a tensor of PEFT's, or of an expert's part of it."""

    name: str
    tensor: Tensor
    place: LayerShare
    dim: int  # dimension that ranks may split
    parameter: Parameter  # the tensor in the whole model
    of_experts: bool

    def shard(self) -> Shard:
        """Return the share as part of the tensor."""
        if self.place.dim != self.dim:
            return Shard(self.parameter, self.tensor)
        return Shard(self.parameter, self.tensor, self.dim, self.place.rank, self.place.ranks)


class LoraAdapters:
    """Adapters of a rank's part of a model, by the names of their layers' weights."""

    def __init__(
        self, of: Mapping[str, _Adapted], facts: AdapterFacts, chunks: Sequence[torch.nn.Module]
    ) -> None:
        """Take the adapters of ``add_adapters``, which a model's ``chunks`` have now."""
        self._of = dict(of)
        self._adapters = list(dict.fromkeys(adapted.adapter for adapted in self._of.values()))
        self.facts = facts
        self._chunks = chunks
        self._layers = [
            (layer, layer._modules[ADAPTER])
            for chunk in chunks
            for layer in chunk.modules()
            if ADAPTER in layer._modules
        ]

    def attach(self) -> None:
        """Give the layers these adapters, in place of another set's of the same weights.

        A model has the parameters of the attached set alone. Other sets keep their values.
        """
        _detach(self._chunks)
        for layer, adapter in self._layers:
            layer.add_module(ADAPTER, adapter)

    def merged(self, name: str, weight: Tensor) -> Tensor:
        """Return a weight with its adapter's addition; unchanged without an adapter."""
        found = self._of.get(name)
        return weight if found is None else found.adapter.merged(weight, found.expert)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Switch the adapters off for a block."""
        for adapter in self._adapters:
            adapter.is_on = False
        try:
            yield
        finally:
            for adapter in self._adapters:
                adapter.is_on = True

    def held(self) -> Iterator[HeldTensor]:
        """Yield this rank's share of each tensor; of experts, a view of what is trained."""
        for adapted in self._of.values():
            adapter = adapted.adapter
            for at, part in adapter.by_position.items():
                named = peft_parameters(adapted.parameter.tensors[at], self.facts)
                for parameter, whole, dim in zip(
                    named, (part.lora_A, part.lora_B), (1, 0), strict=True
                ):
                    own = whole if adapted.expert is None else single_weights(whole)[adapted.expert]
                    (name,) = parameter.names
                    yield HeldTensor(name, own, adapter.place, dim, parameter, adapter.of_experts)

    def named_tensors(self) -> Iterator[tuple[str, Tensor, LayerShare, int]]:
        """Yield PEFT's name of each tensor, this rank's share, and the dimension that is split."""
        for held in self.held():
            yield held.name, held.tensor, held.place, held.dim

    def owned(self) -> Iterator[tuple[str, Shard]]:
        """Yield the parts that this rank owns, by PEFT's names: the first copy of each."""
        for held in self.held():
            copy, number = _copies(of_experts=held.of_experts)
            if copy == 0 and (held.place.dim == held.dim or number == 0):
                yield held.name, held.shard()

    def sharded_state(self, prefix: str) -> dict[str, Any]:
        """Return the adapters as Megatron's sharded state, by names of the whole model."""
        return {
            key: _sharded(prefix + key, parameter, adapter, dim, rows)
            for key, parameter, adapter, dim, rows in self._trained()
        }

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Load the state read for ``sharded_state``."""
        for key, parameter, *_ in self._trained():
            parameter.copy_(state[key])

    def _trained(self) -> Iterator[tuple[str, torch.nn.Parameter, Adapter, int, list[int] | None]]:
        """Yield key, parameter, adapter, dimension that may be split, and rows of B's matrices."""
        for adapter in self._adapters:
            for at, part in adapter.by_position.items():
                tensor = adapter.place.parameter.tensors[at]
                a, b = (without_expert(name)[0] for name in peft_names_of(tensor.name, self.facts))
                yield a, part.lora_A, adapter, 1, None
                yield b, part.lora_B, adapter, 0, adapter.place.rows(tensor)


def _copies(*, of_experts: bool) -> tuple[int, int]:
    """Return the numbers of this rank among those with copies of a share, and of a whole layer."""
    if of_experts:
        return (
            parallel_state.get_expert_data_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_rank(),
        )
    return (
        parallel_state.get_data_parallel_rank(with_context_parallel=True),
        parallel_state.get_tensor_model_parallel_rank(),
    )


def _sharded(
    key: str, parameter: torch.nn.Parameter, adapter: Adapter, dim: int, rows: list[int] | None
) -> ShardedTensor | ShardedTensorFactory:
    """Return a parameter's place in a checkpoint; each of several matrices of rows has a key."""
    offsets = []
    if adapter.of_experts:
        ranks = parallel_state.get_expert_model_parallel_world_size()
        offsets.append((0, parallel_state.get_expert_model_parallel_rank(), ranks))
    dim += len(offsets)
    copy, number = _copies(of_experts=adapter.of_experts)
    if adapter.place.dim == dim - len(offsets):
        offsets.append((dim, adapter.place.rank, adapter.place.ranks))
        number = 0

    def share(key: str, tensor: Tensor, replica: tuple[int, int, int]) -> ShardedTensor:
        return ShardedTensor.from_rank_offsets(key, tensor, *offsets, replica_id=replica)

    def matrices(
        key: str, tensor: Tensor, replica: tuple[int, int, int], *_flattened: object
    ) -> list[ShardedTensor]:
        parts = enumerate(torch.split(tensor, rows or [], dim))
        return [share(f"{key}.{at}", part, replica) for at, part in parts]

    replica = (0, number, copy)
    if rows is None or len(rows) == 1:
        return share(key, parameter, replica)
    return ShardedTensorFactory(
        key, parameter, matrices, lambda parts: torch.cat(parts, dim), replica
    )


def peft_parameters(tensor: HfTensor, facts: AdapterFacts) -> tuple[Parameter, Parameter]:
    """Return the tensors A and B of PEFT's for a tensor, or for one expert of a tensor of all."""
    a, b = peft_names_of(tensor.name, facts)
    plain = replace(tensor, is_transposed=False)
    kind: FusionKind = "gate_up" if tensor.below else "copy"
    return (
        Parameter("copy", (replace(plain, name=a, below=(), is_interleaved=False),)),
        Parameter(kind, (replace(plain, name=b),)),
    )


def add_adapters(model: RankModel, facts: AdapterFacts, *, seed: int) -> RankModel:
    """Freeze a model and give its layers adapters, which add nothing yet; return the model.

    Values are the same in any layout: each A is drawn whole, from the seed and its name. Another
    set of adapters of the same weights is detached.

    Raises:
        ConfigError: ``lora.targets`` names no layer of the model.
    """
    check_targets(model.hf_config, facts.targets)
    _detach(model.chunks)
    model.requires_grad_(False)
    maker = _Maker(model, facts, seed)
    layers = {id(layer.weight): layer for layer in _linear_layers(model)}
    found: dict[str, _Adapted] = {}
    stacks = defaultdict[tuple[str, str], dict[str, Parameter]](dict)
    for name, weight in model.named_parameters():
        parameter = parameter_of(model, name) if name.endswith(_WEIGHT) else None
        if parameter is None or not maker.wanted(parameter):
            continue
        if (expert := _OF_EXPERT.fullmatch(name)) is not None:
            stacks[expert[1], expert[2]][name] = parameter
        elif (layer := layers.get(id(weight))) is not None:
            adapter = maker.adapter([parameter], split_of(name, weight))
            layer.add_module(ADAPTER, adapter)
            layer.forward = types.MethodType(_adapted, layer)
            found[name] = _Adapted(adapter, parameter)
    weights = dict(model.named_parameters())
    experts = {
        f"decoder.layers.{number}.mlp.experts": layer.mlp.experts
        for number, layer in model.numbered_layers()
        if isinstance(layer.mlp, MoELayer)
    }
    for (prefix, kind), parameters in stacks.items():
        name = next(iter(parameters))
        adapter = maker.adapter(list(parameters.values()), split_of(name, weights[name]))
        experts[prefix].adapt(kind, adapter)
        for number, (name, parameter) in enumerate(parameters.items()):
            found[name] = _Adapted(adapter, parameter, number)
    if model.config.recompute_granularity is not None and model.first is not None:
        hooks = model.first.embedding._forward_hooks
        if _with_gradient not in hooks.values():  # another set of these weights registered it
            model.first.embedding.register_forward_hook(_with_gradient)
    model.adapters = LoraAdapters(found, facts, model.chunks)
    return model


def _detach(chunks: Sequence[torch.nn.Module]) -> None:
    for chunk in chunks:
        for layer in list(chunk.modules()):
            layer._modules.pop(ADAPTER, None)


def _linear_layers(model: RankModel) -> Iterator[torch.nn.Module]:
    kinds = tensor_parallel.ColumnParallelLinear | tensor_parallel.RowParallelLinear | WholeLinear
    for chunk in model.chunks:
        for module in chunk.modules():
            if isinstance(module, kinds) and getattr(module, "weight", None) is not None:
                yield module


@dataclass(frozen=True, slots=True)
class _Maker:
    """Makes adapters of a model's layers."""

    model: RankModel
    facts: AdapterFacts
    seed: int

    def wanted(self, parameter: Parameter) -> dict[int, HfTensor]:
        """Return the tensors of a parameter that get an adapter, by position."""
        return {
            at: tensor
            for at, tensor in enumerate(parameter.tensors)
            if is_target(tensor.name, self.facts.targets)
        }

    def adapter(
        self, parameters: Sequence[Parameter], split: tuple[int | None, int, int]
    ) -> Adapter:
        """Return the adapter of a layer, or of the same layer of several experts."""
        model, rank = self.model, self.facts.rank
        of_experts = is_expert(parameters[0].names[0])
        place = LayerShare(parameters[0], geometry_of(model.hf_config), *split)
        parts = {}
        for at, tensor in self.wanted(parameters[0]).items():
            _, size = tensor.shape_of_one(model.hf_config.sizes)
            columns = place.share(size, 1)
            drawn_a = [
                drawn(rank, size, seed=self.seed, name=_name_of(parameter.tensors[at]))[:, columns]
                for parameter in parameters
            ]
            a = torch.stack(drawn_a) if of_experts else drawn_a[0]
            a = a.to(model.config.params_dtype).contiguous()
            parts[at] = LowRank(a, a.new_zeros(*a.shape[:-2], sum(place.rows(tensor)), rank))
        kind = ExpertAdapter if of_experts else Adapter
        tokens = model.config.sequence_parallel
        adapter = kind(place, parts, scale=self.facts.scale, sequence_parallel=tokens)
        return adapter.to(device.device())


def _name_of(tensor: HfTensor) -> str:
    """Return a name that only one matrix has."""
    return tensor.name if tensor.expert is None else f"{tensor.name}.{tensor.expert}"


def _adapted(
    layer: torch.nn.Module, hidden: Tensor, *args: object, **kwargs: object
) -> Tensor | tuple[Tensor, Tensor | None]:
    """Replace a layer's forward; Megatron's layers return a bias, too."""
    output: Tensor | tuple[Tensor, Tensor | None] = type(layer).forward(
        layer, hidden, *args, **kwargs
    )
    adapter = getattr(layer, ADAPTER, None)  # the attached set may have none for this layer
    if adapter is None or not adapter.is_on:
        return output
    added: Tensor = adapter(hidden)
    return output + added if isinstance(output, Tensor) else (output[0] + added, output[1])


def _with_gradient(_module: torch.nn.Module, _arguments: object, output: Tensor) -> Tensor:
    """Give the embedding's output a gradient, so that later layers take part in the backward pass.

    Recomputed layers get no gradient for their weights unless their input has one.
    """
    return output.requires_grad_() if torch.is_grad_enabled() else output

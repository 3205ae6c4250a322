"""Low-rank adapters of a Megatron model's linear layers (Hu et al., arXiv:2106.09685).

An adapter adds s B A x to the output W x of a layer whose weight W does not change. Megatron's
fused layers have one pair of A and B for each tensor that Hugging Face's model has there, as PEFT
has them, and their outputs are fused as the weights are.

A layer that splits its output over tensor-parallel ranks splits B by rows, and has A whole; a layer
that splits its input splits A by columns, and has B whole. Ranks exchange the r numbers per token
between the two. So every gradient is complete on each rank; with sequence parallelism, the gradient
of a whole matrix is the sum over ranks, which Megatron computes for parameters that have its mark.

Shapes: r rank, I size of the layer's input and O of one of its outputs, in the whole model or in a
rank's share; S tokens of this rank between layers, T after they were gathered.
"""

import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.utils import (
    make_sharded_tensor_for_checkpoint,
    make_tp_sharded_tensor_for_checkpoint,
)
from torch import Tensor
from typing_extensions import override

from slipstream.learner.model import device
from slipstream.learner.model.adapters.low_rank import drawn
from slipstream.learner.model.rank_model import ADAPTER, RankModel
from slipstream.learner.model.weights.gathering import parameter_of, split_of
from slipstream.learner.model.weights.hf_weights import geometry_of
from slipstream.learner.model.weights.shards import Geometry, Shard, fuse
from slipstream.wire.models.adapters import AdapterFacts, check_targets, layer_of, peft_names
from slipstream.wire.models.families.tables import HfTensor, Parameter

_WEIGHT = ".weight"


@dataclass(frozen=True, slots=True)
class LayerShare:
    """A layer's tensors in the whole model, and this rank's share of them."""

    parameter: Parameter
    geometry: Geometry  # sizes of the whole model
    dim: int | None  # dimension of the weight that ranks split: 0 splits B and not A, 1 A and not B
    rank: int
    ranks: int

    def share(self, size: int, dim: int) -> slice:
        """Return this rank's slice of a length of the whole model, along a dimension."""
        if dim != self.dim:
            return slice(0, size)
        part = size // self.ranks
        return slice(self.rank * part, (self.rank + 1) * part)


class LowRank(torch.nn.Module):
    """A and B of one Hugging Face tensor."""

    def __init__(self, a: Tensor, b: Tensor) -> None:
        """Take this rank's shares: a [r, I], b [O, r]."""
        super().__init__()
        self.lora_A = torch.nn.Parameter(a)  # PEFT's names
        self.lora_B = torch.nn.Parameter(b)


class Adapter(torch.nn.Module):
    """The addition to one layer. Its parts are the layer's parts that have an adapter."""

    def __init__(
        self,
        place: LayerShare,
        parts: Mapping[int, LowRank],
        outputs: Sequence[int],
        *,
        scale: float,
        sequence_parallel: bool,
    ) -> None:
        """Take the parts by position in the layer; ``outputs`` are its outputs' sizes [O]."""
        super().__init__()
        self.place = place
        self._parts = dict(parts)
        self.parts = torch.nn.ModuleList(parts.values())  # registers their parameters
        self.is_on = True
        self._outputs = outputs
        self._scale = scale
        self._sequence_parallel = sequence_parallel
        for part in parts.values():
            for parameter, dim in ((part.lora_A, 1), (part.lora_B, 0)):
                if place.dim == dim:
                    tensor_parallel.set_tensor_model_parallel_attributes(parameter, True, dim, 1)
                else:
                    tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(
                        parameter
                    )
                    parameter.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]  # Megatron's mark

    def named_parts(self) -> Iterator[tuple[HfTensor, LowRank]]:
        """Yield the tensors of the whole model that have an adapter."""
        for at, tensor in enumerate(self.place.parameter.tensors):
            if at in self._parts:
                yield tensor, self._parts[at]

    @override
    def forward(self, hidden: Tensor) -> Tensor:
        """Return the addition to the layer's output. [S, 1, I] -> [T or S, 1, sum of O]."""
        down = torch.cat([part.lora_A for part in self._parts.values()])
        low = self._exchanged(F.linear(hidden, down)).chunk(len(self._parts), dim=-1)
        up = {
            at: F.linear(part_low, part.lora_B) * self._scale
            for (at, part), part_low in zip(self._parts.items(), low, strict=True)
        }
        first = next(iter(up.values()))
        return self._fused(
            [
                up[at] if at in up else first.new_zeros(*first.shape[:-1], size)
                for at, size in enumerate(self._outputs)
            ],
            dim=-1,
        )

    def _exchanged(self, low: Tensor) -> Tensor:
        """Return the input of B, exchanged between ranks. Shapes [S or T, 1, n r]."""
        found: Any = low  # megatron is untyped
        if self.place.dim == 0 and self._sequence_parallel:
            found = gather_from_sequence_parallel_region(low, tensor_parallel_output_grad=True)
        elif self.place.dim == 0:
            found = copy_to_tensor_model_parallel_region(low)
        elif self.place.dim == 1 and self._sequence_parallel:
            found = reduce_scatter_to_sequence_parallel_region(low)
        elif self.place.dim == 1:
            found = reduce_from_tensor_model_parallel_region(low)
        exchanged: Tensor = found
        return exchanged

    @torch.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        """Return the layer's weight [sum of O, I] with the addition, in its type."""
        changes = []
        for at, size in enumerate(self._outputs):
            part = self._parts.get(at)
            if part is None:
                changes.append(weight.new_zeros(size, weight.shape[1], dtype=torch.float32))
            else:
                changes.append(part.lora_B.float() @ part.lora_A.float() * self._scale)
        return (weight.float() + self._fused(changes, dim=0)).to(weight.dtype)

    def _fused(self, parts: list[Tensor], *, dim: int) -> Tensor:
        """Return outputs of the layer's parts along a dimension, fused as in the layer."""
        if self.place.parameter.kind == "copy":
            return parts[0]
        along = [part.movedim(dim, 0) for part in parts]
        groups = self.place.geometry.num_groups(self.place.parameter.kind, self.place.ranks)
        return fuse(*along, num_groups=groups).movedim(0, dim)


class LoraAdapters:
    """Adapters of a rank's part of a model, by the names of their layers' weights."""

    def __init__(
        self,
        of: Mapping[str, Adapter],
        facts: AdapterFacts,
        chunks: Sequence[torch.nn.Module],
        layers: Sequence[tuple[torch.nn.Module, Adapter]],
    ) -> None:
        """Take the adapters of ``add_adapters``, with their ``layers`` in a model's ``chunks``."""
        self._of = dict(of)
        self.facts = facts
        self._chunks = chunks
        self._layers = layers

    def attach(self) -> None:
        """Give the layers these adapters, in place of another set's of the same weights.

        A model has the parameters of the attached set alone. Other sets keep their values.
        """
        _detach(self._chunks)
        for layer, adapter in self._layers:
            layer.add_module(ADAPTER, adapter)

    def merged(self, name: str, weight: Tensor) -> Tensor:
        """Return a weight with its adapter's addition; unchanged without an adapter."""
        adapter = self._of.get(name)
        return weight if adapter is None else adapter.merged(weight)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Switch the adapters off for a block."""
        for adapter in self._of.values():
            adapter.is_on = False
        try:
            yield
        finally:
            for adapter in self._of.values():
                adapter.is_on = True

    def named_tensors(self) -> Iterator[tuple[str, torch.nn.Parameter, LayerShare, int]]:
        """Yield PEFT's name of each tensor, this rank's share, and the dimension that is split."""
        for adapter in self._of.values():
            for tensor, part in adapter.named_parts():
                a, b = peft_names(tensor.name)
                yield a, part.lora_A, adapter.place, 1
                yield b, part.lora_B, adapter.place, 0

    def owned(self) -> Iterator[tuple[str, Shard]]:
        """Yield the parts that this rank owns, by PEFT's names: the first copy of each."""
        copy = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        first = parallel_state.get_tensor_model_parallel_rank() == 0
        for name, parameter, place, dim in self.named_tensors():
            if copy == 0 and place.dim == dim:
                yield name, Shard(one_tensor(name), parameter, dim, place.rank, place.ranks)
            elif copy == 0 and first:
                yield name, Shard(one_tensor(name), parameter)

    def sharded_state(self, prefix: str) -> dict[str, Any]:
        """Return the adapters as Megatron's sharded state, by names of the whole model."""
        state: dict[str, Any] = {}
        for name, parameter, place, dim in self.named_tensors():
            if place.dim == dim:
                make: Callable[..., object] = make_tp_sharded_tensor_for_checkpoint
                state[name] = make(parameter, prefix + name, tp_axis=dim)
            else:
                state[name] = make_sharded_tensor_for_checkpoint(parameter, prefix + name)
        return state

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Load the state read for ``sharded_state``."""
        for name, parameter, _, _ in self.named_tensors():
            parameter.copy_(state[name])


def add_adapters(model: RankModel, facts: AdapterFacts, *, seed: int) -> RankModel:
    """Freeze a model and give its layers adapters, which add nothing yet; return the model.

    Values are the same in any layout: each A is drawn whole, from the seed and its name. Another
    set of adapters of the same weights is detached.

    Raises:
        ConfigError: ``lora.targets`` names no layer of the model, or experts.
    """
    check_targets(model.hf_config.family, facts.targets)
    _detach(model.chunks)
    model.requires_grad_(False)
    modules = {id(layer.weight): layer for layer in _linear_layers(model)}
    found: dict[str, Adapter] = {}
    layers: list[tuple[torch.nn.Module, Adapter]] = []
    for name, weight in model.named_parameters():
        if not name.endswith(_WEIGHT) or id(weight) not in modules:
            continue
        layer, parameter = modules[id(weight)], parameter_of(model, name)
        wanted = {
            at: tensor
            for at, tensor in enumerate(parameter.tensors)
            if layer_of(tensor.name) in facts.targets
        }
        if not wanted:
            continue
        place = LayerShare(parameter, geometry_of(model.hf_config), *split_of(name, weight))
        adapter = _adapter_for(model, place, wanted, facts, seed)
        layers.append((layer, adapter.to(device.device())))
        layer.forward = types.MethodType(_adapted, layer)
        found[name] = adapter
    if model.config.recompute_granularity is not None and model.first is not None:
        model.first.embedding.register_forward_hook(_with_gradient)
    model.adapters = adapters = LoraAdapters(found, facts, model.chunks, layers)
    adapters.attach()
    return model


def _detach(chunks: Sequence[torch.nn.Module]) -> None:
    for chunk in chunks:
        for layer in list(chunk.modules()):
            layer._modules.pop(ADAPTER, None)


def _linear_layers(model: RankModel) -> Iterator[torch.nn.Module]:
    kinds = tensor_parallel.ColumnParallelLinear | tensor_parallel.RowParallelLinear
    for chunk in model.chunks:
        for module in chunk.modules():
            if isinstance(module, kinds) and getattr(module, "weight", None) is not None:
                yield module


def _adapter_for(
    model: RankModel,
    place: LayerShare,
    wanted: Mapping[int, HfTensor],
    facts: AdapterFacts,
    seed: int,
) -> Adapter:
    sizes, dtype = model.hf_config.sizes, model.config.params_dtype
    outputs, parts = [], {}
    for at, tensor in enumerate(place.parameter.tensors):
        whole_output, whole_input = tensor.whole_shape(sizes)
        rows = place.share(whole_output, 0)
        outputs.append(rows.stop - rows.start)
        if at in wanted:
            columns = place.share(whole_input, 1)
            a = drawn(facts.rank, whole_input, seed=seed, name=tensor.name)[:, columns]
            b = torch.zeros(rows.stop - rows.start, facts.rank, dtype=dtype)
            parts[at] = LowRank(a.to(dtype).contiguous(), b)
    return Adapter(
        place, parts, outputs, scale=facts.scale, sequence_parallel=model.config.sequence_parallel
    )


def one_tensor(name: str) -> Parameter:
    """Return a parameter that is a single unchanged tensor."""
    return Parameter("copy", (HfTensor(name, ()),))


def _adapted(
    layer: torch.nn.Module, hidden: Tensor, *args: object, **kwargs: object
) -> tuple[Tensor, Tensor | None]:
    """Replace a layer's forward."""
    output, bias = type(layer).forward(layer, hidden, *args, **kwargs)
    adapter = getattr(layer, ADAPTER, None)  # the attached set may have none for this layer
    if adapter is None or not adapter.is_on:
        return output, bias
    return output + adapter(hidden), bias


def _with_gradient(_module: torch.nn.Module, _arguments: object, output: Tensor) -> Tensor:
    """Give the embedding's output a gradient, so that later layers take part in the backward pass.

    Recomputed layers get no gradient for their weights unless their input has one.
    """
    return output.requires_grad_() if torch.is_grad_enabled() else output

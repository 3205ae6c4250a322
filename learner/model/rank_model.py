"""A rank's part of a model: the layers of its pipeline stage, in one chunk or several.

Interleaved pipelines give a rank several chunks. Their parameters are named here as in the whole
model: by the layer's and the expert's numbers there.
"""

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol, Self

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from slipstream.wire.models.adapters import AdapterFacts
from slipstream.wire.models.hf_config import HfConfig

ADAPTER = "adapter"  # name of the adapter within its layer
_LAYER = re.compile(r"(?<=decoder\.layers\.)\d+")
_STACK = re.compile(
    r"(?<=\.experts\.)(linear_fc[12])(_bias)?$"
)  # weights or biases of a rank's experts, one after another
_SINGLE = "_slipstream_single"  # attribute of a stack: its storage, and weights of single experts
# Weights that no gradient reaches, which stay as they were, in float32.
FIXED_WEIGHTS = (".router.correction_bias", ".self_attention.A_log")
TIED_OUTPUT = "output_layer.weight"  # copy of the embedding, on the last of several stages


class Adapters(Protocol):
    """Adapters of a rank's part of a model (adapters/lora.py)."""

    facts: AdapterFacts

    def merged(self, name: str, weight: Tensor) -> Tensor:
        """Return a weight with its adapter's addition; unchanged without an adapter."""
        ...

    def off(self) -> AbstractContextManager[None]:
        """Switch the adapters off for a block."""
        ...

    def attach(self) -> None:
        """Give the layers these adapters, in place of another set's."""
        ...

    def sharded_state(self, prefix: str) -> dict[str, Any]:
        """Return the adapters as Megatron's sharded state, by names of the whole model."""
        ...

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Load the state read for ``sharded_state``."""
        ...


class RankModel:
    """Chunks of a model on this rank, in the order in which a token passes them."""

    def __init__(self, chunks: list[GPTModel], hf: HfConfig) -> None:
        """Take the chunks of one model whose architecture is ``hf``."""
        self.chunks = chunks
        self.hf_config = hf
        self.adapters: Adapters | None = None  # set if only adapters are trained

    def sharing(self) -> "RankModel":
        """Return a model of the same weights, for another set of adapters."""
        return RankModel(self.chunks, self.hf_config)

    @property
    def config(self) -> TransformerConfig:
        """Megatron's description of the whole model."""
        return self.chunks[0].config

    @property
    def first(self) -> GPTModel | None:
        """The chunk with the embedding, if it is on this rank."""
        return self.chunks[0] if self.chunks[0].pre_process else None

    @property
    def last(self) -> GPTModel | None:
        """The chunk with the output layer, if it is on this rank."""
        return self.chunks[-1] if self.chunks[-1].post_process else None

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's parameters by their names in the whole model, without adapters."""
        for name, tensor in self.named_weights():
            if not name.endswith(FIXED_WEIGHTS):
                yield name, tensor

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's weights for a Hugging Face folder: parameters and fixed ones.

        Those of an expert are a part of the parameter that holds all experts, without a gradient.
        """
        per_rank = (self.config.num_moe_experts or 0) // self.config.expert_model_parallel_size
        first_expert = per_rank * parallel_state.get_expert_model_parallel_rank()
        for number, chunk in enumerate(self.chunks):
            stage = number if len(self.chunks) > 1 else None
            offset: int = get_transformer_layer_offset(self.config, stage)
            buffers = chunk.named_buffers()
            fixed = ((n, buffer) for n, buffer in buffers if n.endswith(FIXED_WEIGHTS))
            for name, tensor in (*chunk.named_parameters(), *fixed):
                if f".{ADAPTER}." in name:
                    continue
                whole_name = _moved(name, _LAYER, offset)
                if _STACK.search(name):
                    yield from _of_experts(whole_name, tensor, first_expert)
                else:
                    yield whole_name, tensor

    def numbered_layers(self) -> Iterator[tuple[int, torch.nn.Module]]:
        """Yield this rank's layers by their numbers in the whole model."""
        for number, chunk in enumerate(self.chunks):
            stage = number if len(self.chunks) > 1 else None
            offset: int = get_transformer_layer_offset(self.config, stage)
            yield from enumerate(chunk.decoder.layers, offset)

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Yield this rank's parameters, those of adapters too."""
        for chunk in self.chunks:
            yield from chunk.parameters()

    def train(self) -> Self:
        """Switch to training."""
        for chunk in self.chunks:
            chunk.train()
        return self

    def requires_grad_(self, requires_grad: bool) -> Self:
        """Switch gradients."""
        for chunk in self.chunks:
            chunk.requires_grad_(requires_grad)
        return self

    def sharded_state_dict(self, prefix: str = "") -> dict[str, Any]:
        """Return the weights as Megatron's sharded state, by chunk; only adapters if there are."""
        if self.adapters is not None:
            return self.adapters.sharded_state(prefix)
        return {
            str(number): chunk.sharded_state_dict(prefix=prefix)
            for number, chunk in enumerate(self.chunks)
        }

    def load_state_dict(self, state: dict[str, Any], prefix: str = "") -> None:
        """Load the state read for ``sharded_state_dict``."""
        if self.adapters is not None:
            self.adapters.load_state(state)
            return
        for number, chunk in enumerate(self.chunks):
            weights: dict[str, Tensor] = state[str(number)]
            chunk.load_state_dict(
                {name.removeprefix(prefix): value for name, value in weights.items()}
            )


def is_expert(name: str) -> bool:
    """Return True for a parameter that is divided as experts are."""
    return ".experts." in name


def single_weights(stack: Tensor) -> list[Tensor]:
    """Return the parts of a stack [E, ...] of a rank's experts, without gradients.

    They are kept as long as the stack has its storage: none can be made while it is empty.
    """
    place = stack.untyped_storage()._cdata
    known, weights = getattr(stack, _SINGLE, (0, []))
    if known != place:
        weights = list(stack.detach())
        for weight in weights:
            tensor_parallel.copy_tensor_model_parallel_attributes(weight, stack)
            weight.partition_dim = stack.partition_dim - 1  # type: ignore[attr-defined]  # its mark
        setattr(stack, _SINGLE, (place, weights))
    singles: list[Tensor] = weights
    return singles


def _of_experts(name: str, stack: Tensor, first: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of single experts, [E, ...], by their names in the whole model."""
    found = _STACK.search(name)
    kind = "bias" if found is not None and found[2] else "weight"
    for number, weight in enumerate(single_weights(stack), first):
        yield _STACK.sub(rf"local_experts.{number}.\g<1>.{kind}", name), weight


def _moved(name: str, number: re.Pattern[str], by: int) -> str:
    return number.sub(lambda found: str(int(found[0]) + by), name)

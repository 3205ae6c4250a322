"""How Megatron-Core parameters become Hugging Face tensors, for dense Llama and Qwen models.

Pure: names and tensors in, names and tensors out. Megatron fuses the query, key and value
projections into one matrix, group by group, and the gate and up projections into another.

Shapes: H query heads, G key and value heads (query groups), D channels per head, F size of the
feed-forward layer, E size of the hidden state. All functions take the whole model's sizes or one
tensor-parallel rank's share of them, since ranks hold whole query groups.
"""

import re
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

MappingKind = Literal["copy", "qkv", "gate_up", "vocab"]

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT_LAYER = "output_layer.weight"
FINAL_NORM = "decoder.final_layernorm.weight"

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_COPIED = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}
_FUSED: dict[str, tuple[MappingKind, tuple[str, ...]]] = {
    "self_attention.linear_qkv.weight": ("qkv", tuple(f"self_attn.{p}_proj.weight" for p in "qkv")),
    "self_attention.linear_qkv.bias": ("qkv", tuple(f"self_attn.{p}_proj.bias" for p in "qkv")),
    "mlp.linear_fc1.weight": ("gate_up", ("mlp.gate_proj.weight", "mlp.up_proj.weight")),
}


@dataclass(frozen=True)
class HfMapping:
    """The Hugging Face tensors that one Megatron parameter holds.

    ``copy`` is one tensor as it is; ``vocab`` is one tensor whose rows were padded; ``qkv`` and
    ``gate_up`` are several tensors fused along the first dimension.
    """

    kind: MappingKind
    names: tuple[str, ...]


def hf_mapping(megatron_name: str, *, tied_embeddings: bool) -> HfMapping:
    """Return how the named Megatron parameter becomes Hugging Face tensors.

    Raises:
        KeyError: the name belongs to no parameter of the supported models.
    """
    if megatron_name == EMBEDDING or (megatron_name == OUTPUT_LAYER and tied_embeddings):
        return HfMapping("vocab", ("model.embed_tokens.weight",))
    if megatron_name == OUTPUT_LAYER:
        return HfMapping("vocab", ("lm_head.weight",))
    if megatron_name == FINAL_NORM:
        return HfMapping("copy", ("model.norm.weight",))
    found = _LAYER.fullmatch(megatron_name)
    if found is None:
        raise KeyError(megatron_name)
    prefix, inner = f"model.layers.{found[1]}.", found[2]
    if inner in _COPIED:
        return HfMapping("copy", (prefix + _COPIED[inner],))
    if inner not in _FUSED:
        raise KeyError(megatron_name)
    kind, names = _FUSED[inner]
    return HfMapping(kind, tuple(prefix + name for name in names))


def split_qkv(
    fused: Tensor, *, num_heads: int, num_groups: int, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the projections in a fused matrix or bias.

    Args:
        fused: [(H + 2G) * D, ...]: for each group its H/G query heads, its key, its value.
        num_heads: H.
        num_groups: G.
        head_dim: D.

    Returns:
        Query [H * D, ...], key [G * D, ...] and value [G * D, ...].
    """
    rest = fused.shape[1:]
    sizes = [num_heads // num_groups * head_dim, head_dim, head_dim]
    grouped = fused.view(num_groups, sum(sizes), *rest)
    query, key, value = torch.split(grouped, sizes, dim=1)
    return query.reshape(-1, *rest), key.reshape(-1, *rest), value.reshape(-1, *rest)


def fuse_qkv(query: Tensor, key: Tensor, value: Tensor, *, num_groups: int) -> Tensor:
    """Return the fused projection; the inverse of ``split_qkv``.

    Args:
        query: [H * D, ...].
        key: [G * D, ...].
        value: [G * D, ...].
        num_groups: G.

    Returns:
        [(H + 2G) * D, ...].
    """
    rest = query.shape[1:]
    by_group = [part.reshape(num_groups, -1, *rest) for part in (query, key, value)]
    return torch.cat(by_group, dim=1).reshape(-1, *rest)


def split_gate_up(fused: Tensor) -> tuple[Tensor, Tensor]:
    """Return gate [F, E] and up [F, E] of a fused projection [2F, E], as views of it."""
    gate, up = fused.chunk(2)
    return gate, up


def fuse_gate_up(gate: Tensor, up: Tensor) -> Tensor:
    """Return the fused projection [2F, E] of gate [F, E] and up [F, E]."""
    return torch.cat([gate, up])

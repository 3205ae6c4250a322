"""Causal attention over packed sequences on a GPU: flash-attn, or torch's own kernel.

Shapes: T tokens of B sequences; h query heads, g key and value heads, d channels per head.
"""

import inspect
from collections.abc import Callable, Mapping, Set
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor

from slipstream.wire.errors import ConfigError

try:
    from flash_attn import flash_attn_varlen_func
except ImportError:
    flash_attn_varlen_func = None


class AttentionBounds(NamedTuple):
    """Bounds of the queries and the keys of each sequence.

    A sequence with fewer queries than keys has the queries of its last tokens. A sequence without
    queries may have keys, which stay unused.
    """

    queries: Tensor  # [B + 1] int32; sequence i has queries queries[i] to queries[i + 1]
    keys: Tensor  # [B + 1] int32, the same of keys
    max_queries: int  # most queries of a sequence
    max_keys: int


def has_kernel(query: Tensor) -> bool:
    """Return True if ``cuda_attention`` takes such tensors: on a GPU, in a narrow type."""
    return query.is_cuda and query.dtype in {torch.bfloat16, torch.float16}


def cuda_attention(
    query: Tensor, key: Tensor, value: Tensor, bounds: AttentionBounds, scale: float
) -> Tensor:
    """Return causal attention [Q, h, v] for query [Q, h, d], key [T, g, d] and value [T, g, v].

    The kernels take only values of d channels: narrower ones are padded.

    Args:
        query: queries of Q tokens.
        key: keys of all tokens.
        value: values of all tokens.
        bounds: bounds of the sequences.
        scale: factor of the scores.
    """
    width = value.size(-1)
    if width < query.size(-1):
        value = F.pad(value, (0, query.size(-1) - width))
        return cuda_attention(query, key, value, bounds, scale)[..., :width]
    if flash_attn_varlen_func is not None:
        flash: Tensor = flash_attn_varlen_func(
            query,
            key,
            value,
            *bounds,
            softmax_scale=scale,
            causal=True,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return flash
    from torch.nn.attention.varlen import varlen_attn

    chosen = {"scale": scale, "window_size": (-1, 0), "enable_gqa": True}
    output = varlen_attn(query, key, value, *bounds, **taken_by(varlen_attn, chosen))
    return output if isinstance(output, Tensor) else output[0]


def taken_by(function: Callable[..., object], chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``chosen`` that this torch's ``varlen_attn`` accepts.

    torch 2.11 has no ``enable_gqa``: its kernel takes fewer key and value heads without it.

    Raises:
        ConfigError: ``varlen_attn`` has no scale or no window, as in torch 2.10.
    """
    known = _parameters_of(function)
    if missing := {"scale", "window_size"} - known:
        raise ConfigError(
            f"torch {torch.__version__} has no causal attention for sequences of different "
            f"lengths (varlen_attn without {', '.join(sorted(missing))}): install torch >= 2.11 or "
            "flash-attn"
        )
    return {name: value for name, value in chosen.items() if name in known}


@cache
def _parameters_of(function: Callable[..., object]) -> Set[str]:
    return inspect.signature(function).parameters.keys()

"""Attention over packed sequences on a GPU: FlashAttention 4, flash-attn 2, or torch's own.

Shapes: T tokens of B sequences; h query heads, g key and value heads, d channels per head.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence, Set
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor
from torch.nn import attention

from slipstream.wire.errors import ConfigError
from slipstream.wire.models.hf_config import HfConfig

try:
    from flash_attn import flash_attn_varlen_func
except ImportError:
    flash_attn_varlen_func = None

_FLASH_4 = "FA4"  # its name in torch's registry
_WIDTH = 32  # channels of a head for which every kernel is made are a multiple of it
_AGREE = 0.03  # difference of kernels in bfloat16, relative and absolute


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


def register_flash_4(attempt: Callable[[], Sequence[Tensor]]) -> str:
    """Have torch's ``varlen_attn`` run FlashAttention 4; return the reason if it cannot, else "".

    torch 2.11 and 2.13 can register it, and fail when they call releases newer than they are, as
    torch 2.14 does not: it is tried, and its results are compared, before a model runs on it.

    Args:
        attempt: attention and its gradients, by whatever ``varlen_attn`` runs.
    """
    try:
        importlib.import_module("flash_attn.cute")
        before = attempt()
        attention.activate_flash_attention_impl(_FLASH_4)
        for ours, theirs in zip(attempt(), before, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=_AGREE, atol=_AGREE)
    except Exception as error:  # noqa: BLE001 of torch's registry, or a compiler
        if has_flash_4():
            attention.restore_flash_attention_impl()
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    return ""


def choose_attention(
    hf: HfConfig,
    device: torch.device,
    dtype: torch.dtype,
    *,
    register: Callable[[Callable[[], Sequence[Tensor]]], str] = register_flash_4,
) -> str:
    """Choose what computes attention in this process, and return its name for the log.

    FlashAttention 4 comes first: it is written for Hopper and Blackwell, the others for Ampere.

    Args:
        hf: model; FlashAttention 4 is tried with its heads.
        device: device of the model.
        dtype: type of its weights.
        register: registers FlashAttention 4 on a GPU.
    """
    like = torch.empty(0, device=device, dtype=dtype)
    if not has_kernel(like):
        return "torch's scaled_dot_product_attention"
    refused = register(lambda: _attempt(hf, like))
    if not refused:
        return "FlashAttention 4 under torch's varlen_attn"
    other = "torch's own varlen_attn" if flash_attn_varlen_func is None else "flash-attn 2"
    return f"{other}; FlashAttention 4 cannot be had: {refused}"


def has_flash_4() -> bool:
    """Return True if torch's ``varlen_attn`` runs FlashAttention 4."""
    current = getattr(attention, "current_flash_attention_impl", None)  # none in torch 2.10
    return current is not None and current() == _FLASH_4


def _attempt(hf: HfConfig, like: Tensor) -> list[Tensor]:
    """Return attention of a few tokens and its gradients, with the heads of a model.

    Of three sequences one has more keys than queries, and one has no queries. A window of a model's
    layers is tried, too.
    """
    queries, keys = (
        like.new_tensor(ends, dtype=torch.int32) for ends in ([0, 3, 3, 5], [0, 4, 6, 8])
    )
    sizes = [(5, hf.num_attention_heads), (8, hf.num_query_groups), (8, hf.num_query_groups)]
    given = [
        (torch.arange(tokens * heads * hf.kv_channels, device=like.device) + number)
        .sin()
        .to(like.dtype)
        .view(tokens, heads, -1)
        .requires_grad_()
        for number, (tokens, heads) in enumerate(sizes)
    ]
    bounds, found = AttentionBounds(queries, keys, 3, 4), list[Tensor]()
    for window in {None, *map(hf.window_of, range(hf.num_hidden_layers))}:
        last = None if window is None else min(window, 2)  # so narrow that it acts
        output = _varlen(given[0], given[1], given[2], bounds, hf.kv_channels**-0.5, last)
        found += [output, *torch.autograd.grad(output.float().square().sum(), given)]
    return found


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
    if flash_attn_varlen_func is not None and not has_flash_4():
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
    return _varlen(query, key, value, bounds, scale)


def attention_in_segments(
    query: Tensor, key: Tensor, value: Tensor, bounds: AttentionBounds, scale: float
) -> Tensor:
    """Return attention [N, h, d] of patches to all of their segment, for [N, h, d] of each.

    Heads of a vision tower have 64, 72 or 80 channels: the last two are padded to 96, as kernels do
    inside.
    """
    width = query.size(-1)
    missing = -width % _WIDTH
    query, key, value = (F.pad(tensor, (0, missing)) for tensor in (query, key, value))
    if flash_attn_varlen_func is not None and not has_flash_4():
        output: Tensor = flash_attn_varlen_func(
            query,
            key,
            value,
            *bounds,
            softmax_scale=scale,
            causal=False,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
    else:
        output = _varlen(query, key, value, bounds, scale, is_causal=False)
    return output[..., :width]


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: AttentionBounds,
    scale: float,
    window: int | None = None,
    *,
    is_causal: bool = True,
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    before = -1 if window is None else window - 1  # tokens before its own that a token sees
    after = 0 if is_causal else -1
    chosen = {"scale": scale, "window_size": (before, after), "enable_gqa": True}
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

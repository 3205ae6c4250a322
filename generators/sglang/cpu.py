"""Shims for SGLang 0.5.23 without CUDA; call ``prepare()`` before importing it.

This works because our servers fork their processes on a CPU: changes made here reach them all.
Remove at an SGLang release whose CPU build can be installed from a package index.
"""

import importlib
import importlib.machinery
import itertools
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from slipstream.generators.sglang import cpu_linear_attention

_HOST_MEMORY = "sglang.srt.mem_cache.pool_host.common"
_ATTENTION = "sglang.srt.layers.attention.torch_native_backend"
_LOGITS = "sglang.srt.layers.logits_processor"
_BLOCK = 1024  # tokens of the vocabulary whose weights are widened at once, into the cache
_PADDING = 2  # limit of a batch of attention: computed cells per needed cell


def prepare() -> None:
    """Make this process and its forks able to import and run SGLang on a CPU."""
    # SGLang imports its GPU kernels at the top of modules whose CPU paths never call them.

    def missing(name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)

        def unavailable(*_args: object, **_kwargs: object) -> None:
            raise NotImplementedError(f"sgl_kernel.{name} does not exist on a CPU")

        return unavailable

    module = types.ModuleType("sgl_kernel")
    module.__spec__ = importlib.machinery.ModuleSpec("sgl_kernel", None, is_package=True)
    module.__path__ = []
    module.__dict__["__getattr__"] = missing
    sys.modules["sgl_kernel"] = module
    sys.modules.update(cpu_linear_attention.offer(module))


@contextmanager
def uncompiled() -> Iterator[None]:
    """Make torch.compile and torch.compiler.disable do nothing in modules imported meanwhile.

    A server on a CPU runs eagerly, and importing the compiler takes seconds.
    """

    def decorated(function: object = None, **_options: object) -> object:
        return function if function is not None else decorated

    compiling, disabling = torch.compile, torch.compiler.disable
    torch.compile = torch.compiler.disable = decorated  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile, torch.compiler.disable = compiling, disabling


def without_pinned_memory() -> None:
    """Give SGLang's adapters plain memory where they request pinned memory.

    Without an accelerator torch cannot pin memory, and raises. SGLang 0.5.23 requests it on every
    device (lora/layers.py:145, 594 and others, lora/backend/torch_backend.py:225-245); only
    lora/mem_pool.py:163 checks the device first. Remove when all of them check it.
    """
    if torch.cuda.is_available():
        return
    for name in ("tensor", "zeros"):
        make = getattr(torch, name)

        def unpinned(
            *arguments: object,
            _make: Callable[..., Tensor] = make,
            pin_memory: bool = False,  # noqa: ARG001 memory cannot be pinned
            **options: object,
        ) -> Tensor:
            return _make(*arguments, **options)

        setattr(torch, name, unpinned)

    def itself(tensor: Tensor, _device: object = None) -> Tensor:
        return tensor

    setattr(torch.Tensor, "pin_memory", itself)  # noqa: B010 mypy takes it for an assignment


def take_sinks() -> None:
    """Have SGLang's ``torch_native`` attention take sinks, which the functions below compute.

    Import SGLang's modules first.
    """
    backend = importlib.import_module(_ATTENTION).TorchNativeAttnBackend
    for name in ("forward_extend", "forward_decode"):
        forward = getattr(backend, name)

        def with_sinks(
            self: Any,  # noqa: ANN401
            *args: object,
            _forward: Callable[..., Tensor] = forward,
            sinks: Tensor | None = None,
            **named: object,
        ) -> Tensor:
            self._sinks = sinks
            return _forward(self, *args, **named)

        setattr(backend, name, with_sinks)
    backend._sinks = None


def batch_decode_attention() -> None:
    """Replace the decode loop of SGLang's ``torch_native`` attention by one batched call.

    SGLang runs one attention per sequence and layer. A decode step has one query token per
    sequence, so one padded gather and one masked call do the whole batch: the same numbers in
    far fewer steps. Import SGLang's modules first.
    """
    backend = importlib.import_module(_ATTENTION).TorchNativeAttnBackend
    init_metadata = backend.init_forward_metadata
    per_sequence = backend._run_sdpa_forward_decode

    def init_forward_metadata(self: Any, forward_batch: object) -> None:  # noqa: ANN401
        init_metadata(self, forward_batch)
        self._decode_gather = None  # the same for all layers of one forward pass

    def decode(
        self: Any,  # noqa: ANN401
        query: Tensor,  # [B, query heads, head size]
        output: Tensor,  # like query; written in place
        k_cache: Tensor,  # [slots, key heads, head size]
        v_cache: Tensor,
        req_to_token: Tensor,  # [requests, positions] -> slot
        req_pool_indices: Tensor,  # [B]
        seq_lens: Tensor,  # [B]
        encoder_lens: Tensor | None,
        scaling: float | None = None,
        enable_gqa: bool = False,
        causal: bool = False,
        sliding_window_size: int | None = None,
        **rest: object,
    ) -> Tensor:
        batch = len(seq_lens)
        if encoder_lens is not None or any(rest.values()) or len(query) != batch:
            given = query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens
            options = {"scaling": scaling, "enable_gqa": enable_gqa, "causal": causal, **rest}
            options["sliding_window_size"] = sliding_window_size
            result: Tensor = per_sequence(self, *given, encoder_lens, **options)
            return result
        if getattr(self, "_decode_gather", None) is None:
            self._decode_gather = _gather_plan(req_to_token, req_pool_indices, seq_lens)
        slots, visible = self._decode_gather
        key, value = (_gathered(cache, slots, batch, query.dtype) for cache in (k_cache, v_cache))
        heads = key.shape[1] if enable_gqa else query.shape[1]
        folded = query.reshape(batch, heads, -1, query.shape[-1])  # query heads of one key head
        if sliding_window_size is not None:
            first = seq_lens - 1 - sliding_window_size
            visible = visible & (torch.arange(key.shape[2]) >= first[:, None, None, None])
        if self._sinks is not None:
            sinks = self._sinks.view(heads, -1, 1)
            key, value, visible = _with_sinks(key, value, visible, sinks)
        attended = scaled_dot_product_attention(
            folded, key, value, attn_mask=visible, scale=scaling
        )
        output.copy_(attended.reshape(output.shape))
        return output

    backend.init_forward_metadata = init_forward_metadata
    # Data-parallel attention fills batches up with sequences of this length.
    backend.get_cpu_graph_seq_len_fill_value = lambda _self: 1
    backend._run_sdpa_forward_decode = decode


def extend_without_prefix_queries() -> None:
    """Replace the prefill loop of SGLang's ``torch_native`` attention.

    SGLang computes queries for all positions of a sequence, even cached ones, and discards those: a
    turn of seven tokens after 500 costs as much as 507, sequence by sequence. Here only the new
    tokens are queries, and sequences of similar length share a call: the same numbers. Import
    SGLang's modules first.
    """
    backend = importlib.import_module(_ATTENTION).TorchNativeAttnBackend
    per_sequence = backend._run_sdpa_forward_extend

    def extend(
        self: Any,  # noqa: ANN401
        query: Tensor,  # [new tokens, query heads, head size]
        output: Tensor,  # like query; written in place
        k_cache: Tensor,  # [slots, key heads, head size]
        v_cache: Tensor,
        req_to_token: Tensor,  # [requests, positions] -> slot
        req_pool_indices: Tensor,  # [B]
        seq_lens: Tensor,  # [B], cached and new
        extend_prefix_lens: Tensor,  # [B], cached
        extend_seq_lens: Tensor,  # [B], new
        encoder_lens: Tensor | None = None,
        scaling: float | None = None,
        enable_gqa: bool = False,
        causal: bool = False,
        sliding_window_size: int | None = None,
        **rest: object,
    ) -> Tensor:
        if encoder_lens is not None or any(rest.values()) or not causal:
            given = query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens
            lengths = extend_prefix_lens, extend_seq_lens, encoder_lens
            options = {"scaling": scaling, "enable_gqa": enable_gqa, "causal": causal, **rest}
            options["sliding_window_size"] = sliding_window_size
            result: Tensor = per_sequence(self, *given, *lengths, **options)
            return result
        new = extend_seq_lens.tolist()
        starts = list(itertools.accumulate(new, initial=0))
        for first, last in _alike(seq_lens.tolist(), new):
            tokens, run = slice(starts[first], starts[last]), slice(first, last)
            slots, _ = _gather_plan(req_to_token, req_pool_indices[run], seq_lens[run])
            key, value = (
                _gathered(cache, slots, last - first, query.dtype) for cache in (k_cache, v_cache)
            )
            asked = query[tokens], key, value, extend_prefix_lens[run], extend_seq_lens[run]
            output[tokens] = _attended(
                *asked,
                scaling=scaling,
                enable_gqa=enable_gqa,
                before=sliding_window_size,
                sinks=self._sinks,
            )
        return output

    backend._run_sdpa_forward_extend = extend


def widen_output_layer_by_blocks() -> None:
    """Compute logits in float32 without a float32 copy of the whole output layer.

    SGLang widens all of its weights at every step, which takes several times the product itself.
    Import SGLang's modules first.
    """
    module = importlib.import_module(_LOGITS)
    compute = module.LogitsProcessor._compute_lm_head

    def compute_lm_head(
        self: Any,  # noqa: ANN401
        hidden_states: Tensor,  # [T, H]
        lm_head: torch.nn.Module,
        embedding_bias: Tensor | None = None,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        weight = getattr(lm_head, "weight", None)  # [V, H]
        if (
            not self.use_fp32_lm_head
            or not isinstance(weight, Tensor)
            or weight.dtype == torch.float32
            or hasattr(lm_head, "set_lora")
            or module.should_apply_lm_head_quant_method(lm_head, lm_head.quant_method)
        ):
            logits: Tensor = compute(self, hidden_states, lm_head, embedding_bias, out=out)
            return logits
        return _widened_product(hidden_states.float(), weight)

    module.LogitsProcessor._compute_lm_head = compute_lm_head


def allocate_without_cuda() -> None:
    """Allocate host memory without CUDA on a CPU; returning the chosen experts needs such memory.

    SGLang pins it through CUDA for every device that it does not name. Import its modules first.
    """
    module = importlib.import_module(_HOST_MEMORY)

    def allocate(
        dims: tuple[int, ...], dtype: torch.dtype, device: str, *_pinning: object, **_more: object
    ) -> Tensor:
        return torch.empty(dims, dtype=dtype, device=device)

    module.ALLOC_MEMORY_FUNCS["cpu"] = allocate


def _widened_product(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return ``hidden @ weight.float().T``, [T, V], the same bits.

    Args:
        hidden: Hidden states in float32, [T, H].
        weight: Weights of the output layer, [V, H].
    """
    product = hidden.new_empty(len(hidden), len(weight))
    for first in range(0, len(weight), _BLOCK):
        block = slice(first, first + _BLOCK)
        product[:, block] = hidden @ weight[block].float().T
    return product


def _attended(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    prefix_lens: Tensor,
    new_lens: Tensor,
    *,
    scaling: float | None,
    enable_gqa: bool,
    before: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the attention of new tokens, [new tokens, query heads, head size], like ``query``.

    Args:
        query: Queries of the new tokens, sequence by sequence.
        key: Keys of cached and new tokens, [B, key heads, longest, head size].
        value: Values, of the shape of ``key``.
        prefix_lens: Numbers of cached tokens, [B].
        new_lens: Numbers of new tokens, [B].
        scaling: Scale of the products; None is torch's.
        enable_gqa: True if several query heads share a key head.
        before: Keys before its own that a token sees at most; None is all.
        sinks: Score of each query head's sink, [query heads]; None: no sinks.
    """
    places = torch.arange(int(new_lens.max()))
    is_new = places[None] < new_lens[:, None]  # [B, longest new]
    padded = query.new_zeros(*is_new.shape, *query.shape[1:])
    padded[is_new] = query
    until = prefix_lens[:, None] + places[None]  # last visible key of each
    keys = torch.arange(key.shape[2])
    visible = keys <= until[..., None]
    if before is not None:
        visible &= keys >= until[..., None] - before
    visible = visible[:, None]
    if sinks is not None:
        key, value, visible = _with_sinks(key, value, visible, sinks.view(-1, 1, 1))
    attended = scaled_dot_product_attention(
        padded.transpose(1, 2), key, value, attn_mask=visible, scale=scaling, enable_gqa=enable_gqa
    )
    return attended.transpose(1, 2)[is_new]


def _with_sinks(
    key: Tensor, value: Tensor, visible: Tensor, sinks: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys and values with one more, zeros, and a mask with its score: the sink.

    Args:
        key: Keys, [B, heads, K, head size].
        value: Values, of the shape of ``key``.
        visible: Mask, [B, 1, queries, K].
        sinks: Scores, [heads, queries or 1, 1].
    """
    zeros = torch.zeros_like(visible, dtype=key.dtype)
    scores = zeros.masked_fill_(~visible, -torch.inf).expand(-1, len(sinks), -1, -1)
    rows = max(scores.shape[2], sinks.shape[1])
    scores = scores.expand(-1, -1, rows, -1)
    last = sinks.to(scores).expand(len(scores), -1, rows, 1)
    key, value = (torch.nn.functional.pad(t, (0, 0, 0, 1)) for t in (key, value))
    return key, value, torch.cat([scores, last], dim=-1)


def _alike(lengths: list[int], new: list[int]) -> Iterator[tuple[int, int]]:
    """Yield runs of sequences with little padding, as first and past the last.

    Args:
        lengths: Lengths of the sequences.
        new: Number of new tokens of each.
    """
    first, needed, widest, longest = 0, 0, 0, 0
    for at, (length, asking) in enumerate(zip(lengths, new, strict=True)):
        needed += length * asking
        widest, longest = max(widest, asking), max(longest, length)
        if at > first and (at + 1 - first) * widest * longest > _PADDING * needed:
            yield first, at
            first, needed, widest, longest = at, length * asking, asking, length
    yield first, len(lengths)


def _gather_plan(
    req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the cache slots [B * longest] and a mask of the real ones [B, 1, 1, longest]."""
    longest = int(seq_lens.max())
    slots = req_to_token[req_pool_indices, :longest].long()
    visible = torch.arange(longest)[None] < seq_lens[:, None]
    return torch.where(visible, slots, 0).reshape(-1), visible[:, None, None, :]


def _gathered(cache: Tensor, slots: Tensor, batch: int, dtype: torch.dtype) -> Tensor:
    """Return a batch's part of a cache, [B, key heads, longest, head size]."""
    rows = cache.index_select(0, slots).view(batch, -1, *cache.shape[1:])
    return rows.transpose(1, 2).to(dtype)

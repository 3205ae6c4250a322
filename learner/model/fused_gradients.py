"""Gradients of large weights that are added to Megatron's float32 buffers as they are computed.

Megatron would round each to the weights' type, write it and then add it: 10 bytes per parameter and
microbatch. Its fusion (``gradient_accumulation_fusion``) needs a module of Apex; a stand-in for it
runs on any device. An embedding's gradient is the rows of its tokens, and not a matrix of all rows.

Hooks of a weight's gradient must run in the order of the backward pass, and so autograd is given a
gradient for each weight: a sparse tensor without elements, which takes no memory.

Shapes: T tokens, H hidden size, V rows of the embedding on this rank.
"""

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from megatron.core.tensor_parallel import (
    VocabParallelEmbedding,
    layers,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from slipstream.algos.weight_gradients import add_weight_gradient, no_gradient
from slipstream.learner.model.device import device

_TOTAL = "main_grad"  # Megatron's name, of weights that it trains


def install() -> None:
    """Give Megatron's linear layers their fusion; a second call does nothing."""
    names = vars(layers)
    if names.get("get_dummy_wgrad") is _no_elements:
        return
    names.update(
        fused_weight_gradient_mlp_cuda=SimpleNamespace(wgrad_gemm_accum_fp32=_add),
        _grad_accum_fusion_available=True,
        get_dummy_wgrad=_no_elements,
        HAVE_TE=True,  # only where it has that function does Megatron call it
        linear_with_grad_accumulation_and_async_allreduce=_where_there_is_a_total(
            layers.linear_with_grad_accumulation_and_async_allreduce
        ),
    )


def main_gradient_of(weight: Tensor, config: TransformerConfig) -> Tensor | None:
    """Return the float32 total that a backward pass adds the gradient of a weight to.

    None where autograd must return the gradient: nothing is trained, or not by Megatron, or the
    fusion is off.
    """
    is_trained = weight.requires_grad and torch.is_grad_enabled()
    if not is_trained or not config.gradient_accumulation_fusion:
        return None
    total: Tensor | None = getattr(weight, _TOTAL, None)
    return total


def embedded(layer: VocabParallelEmbedding, token_ids: Tensor) -> Tensor:
    """Replace an embedding's forward. [B, T] -> [B, T, H]; [T / tp, B, H] if it divides tokens."""
    group, is_sparse = layer.tp_group, hasattr(layer.weight, _TOTAL)
    if group.size() == 1:
        found = F.embedding(token_ids, layer.weight, sparse=is_sparse)
    else:
        rows = token_ids - layer.vocab_start_index
        is_elsewhere = (rows < 0) | (rows >= layer.num_embeddings_per_partition)
        found = F.embedding(rows.masked_fill(is_elsewhere, 0), layer.weight, sparse=is_sparse)
        found = found.masked_fill(is_elsewhere.unsqueeze(-1), 0.0)
    if layer.reduce_scatter_embeddings:
        divided = found.transpose(0, 1).contiguous()
        return reduce_scatter_to_sequence_parallel_region(divided, group=group)  # type: ignore[no-any-return]
    return reduce_from_tensor_model_parallel_region(found, group=group)  # type: ignore[no-any-return]


def _add(inputs: Tensor, by_output: Tensor, total: Tensor) -> None:
    """Replace Apex's function."""
    add_weight_gradient(total, by_output, inputs)


def _no_elements(shape: Sequence[int], dtype: torch.dtype, *, zero: bool = False) -> Tensor:  # noqa: ARG001
    """Replace Transformer Engine's function: what autograd is given takes no memory."""
    return no_gradient(shape, dtype, device())


def _where_there_is_a_total(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a layer's function that leaves the gradient to autograd in a model without totals."""

    @functools.wraps(original)
    def linear(
        hidden: Tensor,
        weight: Tensor,
        *others: object,
        gradient_accumulation_fusion: bool,
        **named: object,
    ) -> Tensor:
        is_fused = gradient_accumulation_fusion and hasattr(weight, _TOTAL)
        return original(hidden, weight, *others, gradient_accumulation_fusion=is_fused, **named)

    return linear

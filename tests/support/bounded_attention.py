"""Attention of sequences with more keys than queries, by torch on any device."""

from itertools import pairwise

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor

from slipstream.learner.model.cuda_attention import AttentionBounds


def bounded_attention(
    query: Tensor, key: Tensor, value: Tensor, bounds: AttentionBounds, scale: float
) -> Tensor:
    """Return attention of the last tokens of sequences to all before them, in any type.

    Arguments are those of ``cuda_attention``; each sequence is a call.
    """
    ends = zip(*(b.tolist() for b in (bounds.queries, bounds.keys)), strict=True)
    outputs = []
    for (first, first_key), (end, end_key) in pairwise(ends):
        if first == end:
            continue
        q, k, v = (
            part.transpose(0, 1)
            for part in (query[first:end], key[first_key:end_key], value[first_key:end_key])
        )
        is_before = torch.ones(q.size(1), k.size(1), dtype=torch.bool, device=q.device)
        output = F.scaled_dot_product_attention(
            q[None],
            k[None],
            v[None],
            attn_mask=is_before.tril(k.size(1) - q.size(1)),
            scale=scale,
            enable_gqa=q.size(0) != k.size(0),
        )
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)

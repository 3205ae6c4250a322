"""The gated delta rule over packed sequences, chunk by chunk.

Yang, Kautz, Hatamizadeh 2024, "Gated Delta Networks" (arXiv:2412.06464), equation 10. Each head
has a state S, [d, v], zero before a sequence; a token with query q, key k, value v, decay
a = exp(g) and strength b changes and reads it::

    S_t = a_t S_(t-1) + b_t k_t (v_t - a_t S_(t-1)^T k_t)^T
    o_t = S_t^T q_t

Section 3.3 and Yang et al. 2024 (arXiv:2406.06484), section 3: within a chunk of C tokens the
corrections are the solution of a triangular system, so that states are needed between chunks alone.
Sequences are cut into chunks of their own: no state passes a boundary. On a GPU, in narrow types,
flash-linear-attention's kernels do the same.

Shapes: T tokens of B sequences; K heads of keys with r heads of values each; d channels of a query
and a key, v of a value; N chunks of C tokens.
"""

import importlib
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor

from slipstream.learner.model.sequence_chunks import CHUNK, Chunks

_KERNELS = "fla.ops.gated_delta_rule"
_EPSILON = 1e-6  # added to a key's squared length, fixed in the models' own code


def delta_rule_on_gpu(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, strength: Tensor, cu_seqlens: Tensor
) -> Tensor:
    """Return what ``gated_delta_rule`` returns, by kernels; of CUDA tensors in narrow types.

    Args:
        query: [T, K, d].
        key: [T, K, d].
        value: [T, K, r, v].
        decay: [T, K, r] float32, logarithms: at most 0.
        strength: [T, K, r], from 0 to 1.
        cu_seqlens: [B + 1] int64, bounds of the sequences. Where it is the object of a call before,
            the host does not wait for the device to divide it into chunks.
    """
    kernel = importlib.import_module(_KERNELS).chunk_gated_delta_rule
    of_values = (t.flatten(1, 2).unsqueeze(0) for t in (value, decay, strength))
    outputs, _ = kernel(
        query.unsqueeze(0),
        key.unsqueeze(0),
        *of_values,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=cu_seqlens,
    )
    shaped: Tensor = outputs.view_as(value)
    return shaped


def kernel_trouble() -> str:
    """Return why the kernels of a GPU cannot be imported; empty if they can."""
    try:
        importlib.import_module(_KERNELS)
    except Exception as error:  # noqa: BLE001 of Triton of another version, too
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    return ""


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, strength: Tensor, chunks: Chunks
) -> Tensor:
    """Return outputs [T, K, r, v] in the type of the values, computed in float32.

    Queries and keys are normalized to length 1, queries then divided by sqrt(d).

    Args:
        query: [T, K, d].
        key: [T, K, d].
        value: [T, K, r, v].
        decay: [T, K, r] float32, logarithms: at most 0.
        strength: [T, K, r], from 0 to 1.
        chunks: chunks of the sequences.
    """
    q, k = (chunks.cut(_of_length_one(t.float())).transpose(1, 2) for t in (query, key))
    q = (q * q.size(-1) ** -0.5).unsqueeze(2)  # [N, K, 1, C, d]
    k = k.unsqueeze(2)
    v = chunks.cut(value.float()).permute(0, 2, 3, 1, 4)  # [N, K, r, C, v]
    g, b = (chunks.cut(t.float()).permute(0, 2, 3, 1) for t in (decay, strength))  # [N, K, r, C]
    logs = g.cumsum(-1)
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=g.device).triu(1)
    decays = (logs.unsqueeze(-1) - logs.unsqueeze(-2)).masked_fill(later, -torch.inf).exp()
    since_start = logs.exp().unsqueeze(-1)
    b = b.unsqueeze(-1)
    system = b * (k @ k.mT) * decays  # its diagonal counts as 1
    corrections, of_state = torch.linalg.solve_triangular(
        system, torch.cat([b * v, b * since_start * k], dim=-1), upper=False, unitriangular=True
    ).split([v.size(-1), k.size(-1)], dim=-1)
    within = (q @ k.mT) * decays
    reading = q * since_start
    to_end = (logs[..., -1:] - logs).exp().unsqueeze(-1)
    writing, left = (k * to_end).mT, logs[..., -1].exp()[..., None, None]
    state, outputs = value.new_zeros(()), []
    bounds = np.cumsum([0, *chunks.counts]).tolist()
    for first, end in pairwise(bounds):
        now = slice(first, end)
        new = corrections[now]
        if first:
            state = state[: end - first]
            new = new - of_state[now] @ state
            outputs.append(reading[now] @ state + within[now] @ new)
            state = state * left[now] + writing[now] @ new
        else:
            outputs.append(within[now] @ new)
            state = writing[now] @ new
    joined = chunks.joined(torch.cat(outputs).permute(0, 3, 1, 2, 4))  # [T, K, r, v]
    return joined.to(value.dtype)


def _of_length_one(heads: Tensor) -> Tensor:
    return heads * (heads.square().sum(-1, keepdim=True) + _EPSILON).rsqrt()


def short_convolution(values: Tensor, weight: Tensor, positions: Tensor) -> Tensor:
    """Return SiLU of a causal convolution of each channel over its own sequence, [T, D].

    Args:
        values: [T, D].
        weight: [D, W], the last tap for the token itself.
        positions: [T] int64, of each token in its sequence.
    """
    taps = weight.size(1)
    output = values * weight[:, -1]
    for back in range(1, min(taps, len(values) + 1)):
        earlier = F.pad(values, (0, 0, back, 0))[: len(values)]
        is_there = (positions >= back).unsqueeze(-1)
        output = output + torch.where(is_there, earlier, 0.0) * weight[:, -1 - back]
    return F.silu(output)

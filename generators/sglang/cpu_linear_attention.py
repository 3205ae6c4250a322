"""Gated delta networks in torch, for SGLang 0.5.23 on a CPU.

Its operators for them on a CPU are in ``sgl_kernel``, whose build no package index has. These have
the same names, arguments and results, and compute in float32. Remove with ``cpu.prepare``.

Shapes: T tokens of all sequences laid end to end, B sequences, D channels, W taps of a convolution,
H heads of values (several share a head of keys), K channels of a key, V of a value, S slots.
"""

import types
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

_NORM = 1e-6  # added to the squared length of queries and keys (kernels/ops/attention/fla/l2norm)


def offer(package: types.ModuleType) -> dict[str, types.ModuleType]:
    """Register the operators, and return the modules to import them from, by name.

    Args:
        package: Stand-in for ``sgl_kernel``.
    """
    mamba = types.ModuleType(f"{package.__name__}.mamba")
    mamba.__dict__.update(_MAMBA)
    for name, operator in _OPERATORS.items():
        setattr(torch.ops.sgl_kernel, name, operator)
    return {mamba.__name__: mamba}


def causal_conv1d_fn_cpu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    activation: str,
    conv_states: Tensor,
    has_initial_state: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    seq_lens_cpu: Sequence[int],
) -> Tensor:
    """Return the short convolution of new tokens, [D, T] like ``x`` (gdn_backend.py:184).

    Args:
        x: Channels of the new tokens, [D, T].
        weight: Taps of each channel, oldest first, [D, W].
        bias: Added to the sum, [D], or None.
        activation: Name of the function of the sum.
        conv_states: Last tokens of each slot, [S, D, W - 1]; written in place.
        has_initial_state: True if a sequence continues its slot's tokens, [B].
        cache_indices: Slots, [B].
        query_start_loc: First token of each sequence and the end of the last, [B + 1].
        seq_lens_cpu: Numbers of new tokens, [B].
    """
    del query_start_loc  # sums of the lengths
    kept = conv_states.shape[-1]
    rows = torch.where(has_initial_state[:, None, None], conv_states[cache_indices].float(), 0.0)
    tokens = torch.split(x.T.float(), list(seq_lens_cpu))
    # Each sequence after the tokens before it.
    parts = [part for pair in zip(rows.transpose(1, 2), tokens, strict=True) for part in pair]
    lengths = torch.tensor(seq_lens_cpu)
    places = torch.arange(x.shape[1]) + kept * torch.arange(len(lengths)).repeat_interleave(lengths)
    laid = torch.cat(parts)
    total = torch.zeros_like(x.T, dtype=torch.float32)
    for tap in range(weight.shape[1]):
        total += laid[places + tap] * weight[:, tap].float()
    ends = lengths.cumsum(0) + kept * torch.arange(len(lengths))
    last = laid[ends[:, None] + torch.arange(kept)].transpose(1, 2)
    conv_states[cache_indices] = last.to(conv_states.dtype)
    return _activated(total, bias, activation).to(x.dtype).T


def causal_conv1d_update_cpu(
    x: Tensor,
    conv_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    *,
    conv_state_indices: Tensor,
) -> Tensor:
    """Return the short convolution of one token of each sequence, [B, D] (gdn_backend.py:187)."""
    rows = torch.cat([conv_states[conv_state_indices].float(), x.float().unsqueeze(-1)], dim=-1)
    conv_states[conv_state_indices] = rows[..., 1:].to(conv_states.dtype)
    return _activated((rows * weight.float()).sum(-1), bias, activation).to(x.dtype)


def chunk_gated_delta_rule_cpu(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    head_first: bool,
    use_qk_l2norm_in_kernel: bool,
    initial_state_indices: Tensor,
) -> tuple[Tensor, None, None]:
    """Return what new tokens read from their states, [1, T, H, V] (kernels/gdn_triton.py:30).

    All sequences take a token at a time. There are no states at the ends of chunks, for which
    SGLang asks only where it keeps them besides (never on a CPU, arg_groups/mamba_hook.py:102).

    Args:
        q: Queries, [1, T, heads of keys, K].
        k: Keys, of the shape of ``q``.
        v: Values, [1, T, H, V].
        g: Logarithm of what a state keeps, [1, T, H] float32.
        beta: Share of a value that is written, [1, T, H].
        initial_state: States of all slots, [S, H, V, K]; written in place.
        cu_seqlens: First token of each sequence and the end of the last, [B + 1].
        head_first: Another layout; never asked for.
        use_qk_l2norm_in_kernel: Queries and keys get length 1; always asked for.
        initial_state_indices: Slots, [B]; SGLang sets a new one to zero.
    """
    if head_first or not use_qk_l2norm_in_kernel:
        raise NotImplementedError("another layout of gated delta networks")
    heads = v.shape[2] // k.shape[2]
    queries, keys = (_unit(rows[0]).repeat_interleave(heads, dim=1) for rows in (q, k))
    queries = queries * q.shape[-1] ** -0.5
    lengths = cu_seqlens.diff()
    order = lengths.argsort(descending=True, stable=True)
    slots, starts = initial_state_indices[order], cu_seqlens[:-1][order]
    state = initial_state[slots].float()  # [B, H, V, K]
    # Tokens step by step: the sequences that have a token at a step come first.
    widths = (lengths[order, None] > torch.arange(int(lengths.max()))).sum(0).tolist()
    tokens = torch.cat([starts[:width] + step for step, width in enumerate(widths)])
    read = torch.empty(len(tokens), *v.shape[2:], dtype=torch.float32)
    inputs = queries, keys, v[0].float(), g[0].float().exp(), beta[0].float()
    parts = *(tensor[tokens] for tensor in inputs), read
    steps = zip(*(torch.split(part, widths) for part in parts), strict=True)
    for query, key, value, kept, share, written in steps:
        own = state[: len(query)]
        own *= kept[..., None, None]
        known = (own @ key[..., None]).squeeze(-1)
        own += ((value - known) * share[..., None])[..., None] * key[..., None, :]
        torch.matmul(own, query[..., None], out=written.unsqueeze(-1))
    initial_state[slots] = state.to(initial_state.dtype)
    output = torch.empty_like(read)
    output[tokens] = read
    return output.to(v.dtype).unsqueeze(0), None, None


def fused_sigmoid_gating_delta_rule_update_cpu(
    *,
    A_log: Tensor,  # noqa: N803 SGLang's
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    use_qk_l2norm_in_kernel: bool,
    softplus_beta: float,
    softplus_threshold: float,
) -> Tensor:
    """Return what one token of each sequence reads, [1, B, H, V] (kernels/gdn_triton.py:33)."""
    del softplus_beta, softplus_threshold  # torch's own
    g, beta = fused_gdn_gating_cpu(A_log, a, b, dt_bias)
    read, *_ = chunk_gated_delta_rule_cpu(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        initial_state=initial_state_source,
        cu_seqlens=cu_seqlens,
        head_first=False,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        initial_state_indices=initial_state_indices,
    )
    return read


def fused_gdn_gating_cpu(
    A_log: Tensor,  # noqa: N803 SGLang's
    a: Tensor,
    b: Tensor,
    dt_bias: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return what states keep, as its logarithm, and what they take, [1, T, H] each.

    gdn_backend.py:188.
    """
    steps = functional.softplus(a.float() + dt_bias.float())
    return (-A_log.float().exp() * steps).unsqueeze(0), b.float().sigmoid().unsqueeze(0)


def fused_qkvzba_split_reshape_cat_contiguous_cpu(
    qkvz: Tensor, ba: Tensor, key_heads: int, heads: int, key_size: int, value_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the input of the convolution, the output's gate [T, H, V], and b and a [T, H].

    models/qwen3_5.py:295.
    """
    sizes = [2 * key_heads * key_size + heads * value_size, heads * value_size]
    mixed, z = torch.split(qkvz, sizes, dim=-1)
    b, a = torch.split(ba, heads, dim=-1)
    return mixed, z.reshape(len(z), heads, value_size), b, a


def fused_sigmoid_mul_cpu(x: Tensor, gate: Tensor) -> None:
    """Multiply ``x`` by the sigmoid of its gate, in place (models/qwen3_5.py:284)."""
    x.mul_(gate.reshape(x.shape).float().sigmoid())


def fused_qk_gemma_rmsnorm_cpu(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, head_dim: int
) -> tuple[Tensor, Tensor]:
    """Return normed queries and keys, a head a row (models/qwen3_5.py:292)."""
    query, key = (
        _normed(rows.reshape(-1, head_dim), 1.0 + weight.float(), eps).to(rows.dtype)
        for rows, weight in ((q, q_weight), (k, k_weight))
    )
    return query, key


def fused_qk_gemma_rmsnorm_with_gate_cpu(
    q_gate: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    head_dim: int,
    num_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return normed queries and keys, and the output's gate, a head a row.

    models/qwen3_5.py:293. A head's query is followed by its gate.
    """
    query, gate = q_gate.reshape(-1, num_heads, 2, head_dim).unbind(2)
    normed = fused_qk_gemma_rmsnorm_cpu(query, k, q_weight, k_weight, eps, head_dim)
    return *normed, gate.contiguous().view(-1, head_dim)


_MAMBA, _OPERATORS = (
    {operator.__name__: operator for operator in operators}
    for operators in (
        (causal_conv1d_fn_cpu, causal_conv1d_update_cpu, chunk_gated_delta_rule_cpu),
        (
            fused_gdn_gating_cpu,
            fused_qk_gemma_rmsnorm_cpu,
            fused_qk_gemma_rmsnorm_with_gate_cpu,
            fused_qkvzba_split_reshape_cat_contiguous_cpu,
            fused_sigmoid_gating_delta_rule_update_cpu,
            fused_sigmoid_mul_cpu,
        ),
    )
)


def gated_norm(x: Tensor, weight: Tensor, gate: Tensor, eps: float, activation: str) -> Tensor:
    """Return normed rows times a function of their gates, like ``x``."""
    function = torch.sigmoid if activation == "sigmoid" else functional.silu
    return (_normed(x, weight.float(), eps) * function(gate.float())).to(x.dtype)


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def _unit(x: Tensor) -> Tensor:
    wide = x.float()
    return wide * (wide.square().sum(-1, keepdim=True) + _NORM).rsqrt()


def _activated(total: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    shifted = total if bias is None else total + bias.float()
    return functional.silu(shifted) if activation in {"silu", "swish"} else shifted

"""The operators of gated delta networks that SGLang lacks on a CPU, against their definitions."""

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from slipstream.generators.sglang import cpu_linear_attention as operators

SLOTS, CHANNELS, TAPS = 7, 6, 4
KEY_HEADS, HEADS, KEY, VALUE = 2, 4, 3, 5
LENGTHS = [3, 1, 9, 2, 70]
USED = [4, 2, 6, 1, 5]  # slots
GENERATOR = torch.Generator().manual_seed(3)


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR)


class Delta(NamedTuple):
    """Inputs of the gated delta rule for tokens of all sequences."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor

    def of(self, first: int, last: int) -> "Delta":
        return Delta(*(part[:, first:last] for part in self))


def some(length: int) -> Delta:
    query, key = (noise(1, length, KEY_HEADS, KEY) for _ in range(2))
    decays, shares = -noise(1, length, HEADS).abs() / 8, noise(1, length, HEADS).sigmoid()
    return Delta(query, key, noise(1, length, HEADS, VALUE), decays, shares)


def by_definition(inputs: Delta, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return what the tokens of one sequence read [T, H, V], and the state after them [H, V, K]."""
    read = []
    for q, k, v, g, beta in zip(*(part[0] for part in inputs), strict=True):
        query, key = (
            functional.normalize(one, dim=-1).repeat_interleave(HEADS // KEY_HEADS, 0)
            for one in (q, k)
        )
        state = state * g.exp()[:, None, None]
        known = torch.einsum("hvk,hk->hv", state, key)
        state = state + torch.einsum("hv,hk->hvk", beta[:, None] * (v - known), key)
        read.append(torch.einsum("hvk,hk->hv", state, query) / KEY**0.5)
    return torch.stack(read), state


def starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def test_sequences_side_by_side_read_and_write_their_own_states():
    inputs, states = some(sum(LENGTHS)), noise(SLOTS, HEADS, VALUE, KEY)
    kept = states.clone()
    read, *rest = operators.chunk_gated_delta_rule_cpu(
        **inputs._asdict(),
        initial_state=states,
        cu_seqlens=starts(LENGTHS),
        head_first=False,
        use_qk_l2norm_in_kernel=True,
        initial_state_indices=torch.tensor(USED),
    )
    assert rest == [None, None]
    ends = starts(LENGTHS).tolist()
    for slot, first, last in zip(USED, ends, ends[1:], strict=False):
        expected, state = by_definition(inputs.of(first, last), kept[slot])
        assert torch.allclose(read[0, first:last], expected, atol=1e-5)
        assert torch.allclose(states[slot], state, atol=1e-5)
    for slot in set(range(SLOTS)) - set(USED):
        assert torch.equal(states[slot], kept[slot])


def test_a_decoded_token_goes_on_from_the_state_before_it():
    tokens = len(USED)
    inputs, states = some(tokens), noise(SLOTS, HEADS, VALUE, KEY)
    a, b, decays, bias = noise(tokens, HEADS), noise(tokens, HEADS), noise(HEADS), noise(HEADS)
    g, beta = operators.fused_gdn_gating_cpu(decays, a, b, bias)
    assert torch.allclose(g[0], -decays.exp() * (1 + (a + bias).exp()).log(), atol=1e-5)
    kept = states.clone()
    read = operators.fused_sigmoid_gating_delta_rule_update_cpu(
        A_log=decays,
        dt_bias=bias,
        q=inputs.q,
        k=inputs.k,
        v=inputs.v,
        a=a,
        b=b,
        initial_state_source=states,
        initial_state_indices=torch.tensor(USED),
        cu_seqlens=starts([1] * tokens),
        use_qk_l2norm_in_kernel=True,
        softplus_beta=1.0,
        softplus_threshold=20.0,
    )
    for place, slot in enumerate(USED):
        gated = inputs._replace(g=g, beta=beta).of(place, place + 1)
        expected, state = by_definition(gated, kept[slot])
        assert torch.allclose(read[0, place], expected[0], atol=1e-5)
        assert torch.allclose(states[slot], state, atol=1e-5)


def test_a_convolution_begins_with_the_tokens_before():
    weight, bias, x = noise(CHANNELS, TAPS), noise(CHANNELS), noise(CHANNELS, sum(LENGTHS))
    states = noise(SLOTS, CHANNELS, TAPS - 1)
    kept, continues = states.clone(), torch.tensor([True, True, False, False, True])
    found = operators.causal_conv1d_fn_cpu(
        x,
        weight,
        bias,
        activation="silu",
        conv_states=states,
        has_initial_state=continues,
        cache_indices=torch.tensor(USED),
        query_start_loc=starts(LENGTHS),
        seq_lens_cpu=LENGTHS,
    )
    ends = starts(LENGTHS).tolist()
    for slot, first, last, does in zip(USED, ends, ends[1:], continues.tolist(), strict=False):
        before = kept[slot] if does else torch.zeros_like(kept[slot])
        row = torch.cat([before, x[:, first:last]], dim=1)
        convolved = functional.conv1d(row[None], weight[:, None], bias, groups=CHANNELS)[0]
        assert torch.allclose(found[:, first:last], functional.silu(convolved), atol=1e-5)
        assert torch.equal(states[slot], row[:, 1 - TAPS :])
    assert torch.equal(states[0], kept[0])
    before, token = states.clone(), noise(len(USED), CHANNELS)
    slots = torch.tensor(USED)
    one = operators.causal_conv1d_update_cpu(
        token, states, weight, bias, "silu", conv_state_indices=slots
    )
    rows = torch.cat([before[slots], token[..., None]], dim=-1)
    assert torch.allclose(one, functional.silu((rows * weight).sum(-1) + bias), atol=1e-5)
    assert torch.equal(states[slots], rows[..., 1:])


def test_states_in_bfloat16_are_rounded_where_they_are_kept_alone():
    states = torch.zeros(SLOTS, CHANNELS, TAPS - 1, dtype=torch.bfloat16)
    x = noise(CHANNELS, 5)
    found = operators.causal_conv1d_fn_cpu(
        x,
        torch.ones(CHANNELS, TAPS),
        None,
        activation="",
        conv_states=states,
        has_initial_state=torch.tensor([False]),
        cache_indices=torch.tensor([1]),
        query_start_loc=starts([5]),
        seq_lens_cpu=[5],
    )
    assert torch.allclose(found[:, 4], x[:, 1:].sum(1), atol=1e-6)
    assert torch.equal(states[1], x[:, 2:].bfloat16())


def test_projections_are_cut_where_qwen3_5_fuses_them():
    sizes = [KEY_HEADS * KEY, KEY_HEADS * KEY, HEADS * VALUE, HEADS * VALUE]
    qkvz, ba = noise(3, sum(sizes)), noise(3, 2 * HEADS)
    mixed, gate, b, a = operators.fused_qkvzba_split_reshape_cat_contiguous_cpu(
        qkvz, ba, KEY_HEADS, HEADS, KEY, VALUE
    )
    assert torch.equal(torch.cat([mixed, gate.flatten(1)], dim=1), qkvz)
    assert mixed.shape[1] == sum(sizes[:3])
    assert gate.shape == (3, HEADS, VALUE)
    assert torch.equal(torch.cat([b, a], dim=1), ba)


def test_gates_of_attention_lie_behind_each_heads_queries():
    queries, gates, keys = noise(2, HEADS, 8), noise(2, HEADS, 8), noise(2, KEY_HEADS * 8)
    weight, other = noise(8), noise(8)
    given = torch.stack([queries, gates], dim=2).flatten(1)
    query, key, gate = operators.fused_qk_gemma_rmsnorm_with_gate_cpu(
        given, keys, weight, other, 1e-6, 8, HEADS
    )
    expected = functional.rms_norm(queries, (8,), 1 + weight, 1e-6)
    assert torch.allclose(query.view(2, HEADS, 8), expected, atol=1e-5)
    expected = functional.rms_norm(keys.view(2, KEY_HEADS, 8), (8,), 1 + other, 1e-6)
    assert torch.allclose(key.view(2, KEY_HEADS, 8), expected, atol=1e-5)
    assert torch.equal(gate.view(2, HEADS, 8), gates)
    output = queries.flatten(1).clone()
    operators.fused_sigmoid_mul_cpu(output, gate.view(2, -1))
    assert torch.allclose(output, (queries * gates.sigmoid()).flatten(1), atol=1e-6)


def test_a_gated_norm_multiplies_after_it_normed():
    x, gate, weight = noise(4, VALUE), noise(4, VALUE), noise(VALUE)
    expected = functional.rms_norm(x, (VALUE,), weight, 1e-6)
    for activation, function in (("swish", functional.silu), ("sigmoid", torch.sigmoid)):
        found = operators.gated_norm(x, weight, gate, 1e-6, activation)
        assert torch.allclose(found, expected * function(gate), atol=1e-5)


def test_sglang_finds_the_operators_by_its_names():
    modules = operators.offer(ModuleType("sgl_kernel"))
    assert list(modules) == ["sgl_kernel.mamba"]
    assert torch.ops.sgl_kernel.fused_gdn_gating_cpu is operators.fused_gdn_gating_cpu
    assert not hasattr(torch.ops.sgl_kernel, "convert_weight_packed"), "taken for Intel's extension"

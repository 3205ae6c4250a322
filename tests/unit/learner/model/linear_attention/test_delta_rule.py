"""The gated delta rule in chunks is the one that is written down token by token."""

import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from slipstream.learner.model.computed_again import computed_again
from slipstream.learner.model.linear_attention.delta_rule import (
    delta_rule_on_gpu,
    gated_delta_rule,
    kernel_trouble,
    short_convolution,
)
from slipstream.learner.model.sequence_chunks import Chunks

KEYS, VALUES, KEY_SIZE, VALUE_SIZE = 2, 3, 5, 7
CPU = torch.device("cpu")
# One token, both sides of a chunk's edge, several chunks, none, and equal lengths.
LENGTHS = [1, 64, 65, 63, 1, 130, 0, 64, 2]


def inputs(count: int) -> list[Tensor]:
    """Return queries, keys, values, decays and strengths that are far from trivial."""
    generator = torch.Generator().manual_seed(count)

    def noise(*shape: int) -> Tensor:
        return torch.randn(count, KEYS, *shape, generator=generator)

    heads = [noise(KEY_SIZE), noise(KEY_SIZE), noise(VALUES, VALUE_SIZE)]
    return [*heads, -0.3 * noise(VALUES).exp(), noise(VALUES).sigmoid()]


def token_by_token(*of_tokens: Tensor) -> Tensor:
    """Return the outputs of one sequence by the recurrence, in double precision."""
    query, key, value, decay, strength = (one.double() for one in of_tokens)
    query, key = (one * (one.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for one in (query, key))
    state = value.new_zeros(KEYS, VALUES, KEY_SIZE, VALUE_SIZE)
    outputs = []
    for q, k, v, g, b in zip(query / KEY_SIZE**0.5, key, value, decay, strength, strict=True):
        state = g.exp()[..., None, None] * state
        held = torch.einsum("krdv,kd->krv", state, k)
        state = state + torch.einsum("kd,krv->krdv", k, b[..., None] * (v - held))
        outputs.append(torch.einsum("krdv,kd->krv", state, q))
    return torch.stack(outputs)


def test_packed_sequences_are_each_computed_alone():
    given = inputs(sum(LENGTHS))
    found = gated_delta_rule(*given, Chunks.of(LENGTHS, CPU))
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0).tolist()
    for start, end in pairwise(bounds):
        if start < end:
            expected = token_by_token(*(one[start:end] for one in given))
            torch.testing.assert_close(found[start:end].double(), expected, rtol=0, atol=2e-6)
    assert found.abs().max() > 0.5, "nothing was compared"


def test_gradients_are_those_of_the_recurrence():
    given = [one.requires_grad_() for one in inputs(sum(LENGTHS))]
    weight = torch.randn(sum(LENGTHS), KEYS, VALUES, VALUE_SIZE)
    (gated_delta_rule(*given, Chunks.of(LENGTHS, CPU)) * weight).sum().backward()
    found = [one.grad.clone() for one in given]
    for one in given:
        one.grad = None
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0).tolist()
    for start, end in pairwise(bounds):
        if start < end:
            output = token_by_token(*(one[start:end] for one in given))
            (output * weight[start:end]).sum().backward()
    for got, one in zip(found, given, strict=True):
        torch.testing.assert_close(got, one.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lengths", [[1], [200], [64, 64]])
def test_any_number_of_sequences_is_taken(lengths: list[int]):
    given = inputs(sum(lengths))
    found = gated_delta_rule(*given, Chunks.of(lengths, CPU))
    assert found.shape == (sum(lengths), KEYS, VALUES, VALUE_SIZE)
    assert found.isfinite().all()


def test_strong_decays_and_narrow_types_stay_finite():
    given = inputs(130)
    given[3] = given[3] - 60.0  # far below what a product of decays can hold
    narrow = [*(one.bfloat16() for one in given[:3]), *given[3:]]
    found = gated_delta_rule(*narrow, Chunks.of([130], CPU))
    assert found.dtype is torch.bfloat16
    assert found.isfinite().all()


def test_the_convolution_sees_its_own_sequence_alone():
    lengths, taps = [1, 2, 9, 3, 5], 4
    values, weight = torch.randn(sum(lengths), 6), torch.randn(6, taps)
    positions = torch.cat([torch.arange(length) for length in lengths])
    found = short_convolution(values, weight, positions)
    conv = torch.nn.functional.conv1d
    for part, got in zip(values.split(lengths), found.split(lengths), strict=True):
        padded = torch.nn.functional.pad(part.T, (taps - 1, 0))
        expected = conv(padded, weight.unsqueeze(1), groups=6).T
        torch.testing.assert_close(got, torch.nn.functional.silu(expected))


def test_the_convolution_keeps_what_it_was_given_alone():
    """It would keep a shifted copy of each tap, and what they add up to."""
    values, weight = torch.randn(9, 6, requires_grad=True), torch.randn(6, 4, requires_grad=True)
    positions, kept = torch.arange(9) % 5, list[Tensor]()
    with saved_tensors_hooks(lambda saved: kept.append(saved) or saved, lambda saved: saved):
        found = computed_again(short_convolution, values, weight, positions)
    assert {t.data_ptr() for t in kept} == {t.data_ptr() for t in (values, weight, positions)}
    plain = short_convolution(values, weight, positions)
    assert found.equal(plain)
    factor, given = torch.randn(9, 6), (values, weight)
    gradients = (torch.autograd.grad(output, given, factor) for output in (found, plain))
    assert all(got.equal(expected) for got, expected in zip(*gradients, strict=True))


def test_kernels_get_sequences_end_to_end_and_what_they_return_has_the_heads_shape(
    monkeypatch: pytest.MonkeyPatch,
):
    """The kernels' documented form stands in for them: one batch, heads flat, bounds in int64."""
    given = inputs(sum(LENGTHS))
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0)

    def chunk_gated_delta_rule(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        *,
        use_qk_l2norm_in_kernel: bool,
        cu_seqlens: Tensor,
    ) -> tuple[Tensor, None]:
        count, heads = sum(LENGTHS), KEYS * VALUES
        assert (q.shape, k.shape) == ((1, count, KEYS, KEY_SIZE),) * 2
        assert (v.shape, g.shape) == ((1, count, heads, VALUE_SIZE), (1, count, heads))
        assert beta.shape == (1, count, heads)
        assert cu_seqlens is bounds, "what was derived of it is found by its identity"
        assert use_qk_l2norm_in_kernel
        by_key = (one[0].unflatten(1, (KEYS, VALUES)) for one in (v, g, beta))
        chunks = Chunks.of(cu_seqlens.diff().tolist(), CPU)
        return gated_delta_rule(q[0], k[0], *by_key, chunks).flatten(1, 2)[None], None

    module = SimpleNamespace(chunk_gated_delta_rule=chunk_gated_delta_rule)
    assert "fla" in kernel_trouble()
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", module)
    assert kernel_trouble() == ""
    found = delta_rule_on_gpu(*given, bounds)
    assert found.equal(gated_delta_rule(*given, Chunks.of(LENGTHS, CPU)))


def test_kernels_that_fail_while_they_are_imported_are_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / "fla" / "ops"
    folder.mkdir(parents=True)
    (folder / "gated_delta_rule.py").write_text("raise AttributeError('no tl.dot\\nof before')")
    monkeypatch.syspath_prepend(tmp_path)
    assert kernel_trouble() == "AttributeError: no tl.dot"
    for name in ("fla", "fla.ops"):
        sys.modules.pop(name)

"""Ranks write their shares in place: what comes out is the whole Hugging Face tensor, exactly."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from slipstream.learner.model.weights.shards import (
    Geometry,
    Shard,
    fuse,
    in_fp8,
    is_finite,
    write_in_fp8,
    write_shard,
)
from slipstream.wire.models.families.registry import FAMILIES

GENERATOR = torch.Generator().manual_seed(5)
HIDDEN = 6


def weights(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR)


def written(name: str, shards: list[Tensor], dim: int | None, like: list[Tensor], g: Geometry):
    """Return the whole tensors after every rank wrote its shard."""
    parameter = FAMILIES["qwen2"].parameter(name, tied_embeddings=False)
    wholes = [torch.full_like(tensor, float("nan")) for tensor in like]
    for rank, shard in enumerate(shards):
        write_shard(Shard(parameter, shard, dim, rank, len(shards)), wholes, g)
    return wholes


def test_fused_projection_interleaves_query_key_and_value_by_group():
    # 4 query heads in 2 groups, 1 channel per head
    query, key, value = torch.arange(4), torch.tensor([10, 11]), torch.tensor([20, 21])
    fused = fuse(query, key, value, num_groups=2)
    assert fused.tolist() == [0, 1, 10, 20, 2, 3, 11, 21]


def test_gate_comes_before_up():
    fused = fuse(torch.zeros(2, 3), torch.ones(2, 3))
    assert fused[:, 0].tolist() == [0, 0, 1, 1]


@given(
    ranks=st.sampled_from([1, 2, 4]),
    groups_per_rank=st.integers(1, 3),
    queries=st.integers(1, 3),
    head_dim=st.sampled_from([1, 2, 4]),
    bias=st.booleans(),
)
def test_fused_projections_come_apart_wherever_the_ranks_split_them(
    ranks: int, groups_per_rank: int, queries: int, head_dim: int, bias: bool
):
    groups = ranks * groups_per_rank
    rest = () if bias else (HIDDEN,)
    query = weights(groups * queries * head_dim, *rest)
    key, value = (weights(groups * head_dim, *rest) for _ in "kv")
    fused = fuse(query, key, value, num_groups=groups)
    kind = "bias" if bias else "weight"
    found = written(
        f"decoder.layers.3.self_attention.linear_qkv.{kind}",
        list(fused.chunk(ranks)),
        0 if ranks > 1 else None,
        [query, key, value],
        Geometry(groups),
    )
    for got, expected in zip(found, (query, key, value), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_gate_and_up_come_apart(ranks: int):
    gate, up = weights(8, HIDDEN), weights(8, HIDDEN)
    shards = [fuse(*parts) for parts in zip(gate.chunk(ranks), up.chunk(ranks), strict=True)]
    found = written(
        "decoder.layers.0.mlp.linear_fc1.weight",
        shards,
        0 if ranks > 1 else None,
        [gate, up],
        Geometry(1),
    )
    assert torch.equal(found[0], gate)
    assert torch.equal(found[1], up)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_plain_tensor_is_put_together_along_either_dimension(dim: int, ranks: int):
    whole = weights(8, 12)
    found = written(
        "decoder.layers.0.mlp.linear_fc2.weight",
        list(whole.chunk(ranks, dim)),
        dim if ranks > 1 else None,
        [whole],
        Geometry(1),
    )
    assert torch.equal(found[0], whole)


def test_the_padding_of_the_vocabulary_is_left_out_even_if_a_rank_holds_nothing_else():
    for vocabulary, ranks in [(10, 1), (10, 2), (10, 4), (5, 4), (16, 4)]:
        whole = weights(vocabulary, HIDDEN)
        padded = torch.cat([whole, weights(16 - vocabulary, HIDDEN)])
        found = written(
            "embedding.word_embeddings.weight",
            list(padded.chunk(ranks)),
            0 if ranks > 1 else None,
            [whole],
            Geometry(1),
        )
        assert torch.equal(found[0], whole)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_value_that_is_not_finite_is_found(value: float, dtype: torch.dtype):
    tensor = torch.zeros(3, 4, dtype=dtype)
    assert is_finite(tensor)
    tensor[1, 2] = value
    assert not is_finite(tensor)


def test_large_finite_weights_are_fine():
    assert is_finite(torch.tensor([3e38, -3e38]))


def widened(numbers: Tensor, scales: Tensor) -> Tensor:
    rows, columns = numbers.shape
    of_each = scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    return numbers.float() * of_each


def test_blocks_of_fp8_have_the_error_of_three_bits_and_a_scale_each():
    matrix = weights(300, 200) * torch.logspace(-20, 20, 300)[:, None]
    matrix[128:256, :128] = 0
    matrix[256:, 128:] = 0
    matrix[256, 130] = 1e-44  # less than a scale could be
    numbers, scales = in_fp8(matrix)
    assert (numbers.dtype, numbers.shape) == (torch.float8_e4m3fn, matrix.shape)
    assert (scales.dtype, scales.shape) == (torch.float32, (3, 2))
    found = widened(numbers, scales)
    assert torch.equal(found[128:256, :128], matrix[128:256, :128])
    assert scales[1, 0] == scales[2, 1] == 1.0, "no division by zero"
    assert not found[256:, 128:].any()
    assert found.isfinite().all()
    # Half of the last bit, or of the smallest number of a block.
    bound = matrix.abs() / 16 + widened(torch.ones_like(matrix), scales) * 2**-10
    assert ((found - matrix).abs() <= bound).all()
    again, same = in_fp8(found)
    assert torch.equal(widened(again, same), found), "nothing is lost a second time"


def test_matrices_of_many_rows_are_quantized_in_parts_as_a_whole():
    matrix = weights(2 * 4096 + 130, 128)
    numbers, scales = in_fp8(matrix)
    for rows in (slice(0, 128), slice(4096, 4224), slice(8192, None)):
        part, of_part = in_fp8(matrix[rows])
        assert torch.equal(part.view(torch.uint8), numbers[rows].view(torch.uint8))
        assert torch.equal(of_part, scales[rows.start // 128 :][: len(of_part)])


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ["self_attention.linear_qkv", "mlp.linear_fc1", "mlp.linear_fc2"])
@pytest.mark.parametrize("family", ["qwen3", "glm4"])  # gate and up are one matrix in the second
def test_ranks_write_in_fp8_what_one_rank_writes(family: str, name: str, ranks: int):
    parameter = FAMILIES[family].parameter(f"decoder.layers.1.{name}.weight", tied_embeddings=True)
    geometry, rows, columns, dim = Geometry(4, sizes={"inner": 512}), (512, 512), 256, 0
    if "qkv" in name:
        rows = (1024, 512, 512)
    elif "fc2" in name:
        rows, columns, dim = (256,), 512, 1
    parts = [weights(count, columns) for count in rows]
    fused = parts[0] if dim else torch.cat(parts)
    shards = list(fused.chunk(ranks, dim=dim))
    if "qkv" in name:
        shards = list(fuse(*parts, num_groups=4).chunk(ranks))
    elif not dim:
        shards = [fuse(*both) for both in zip(*(p.chunk(ranks) for p in parts))]  # noqa: B905
    if len(parameter.names) < len(parts):
        parts = [torch.cat(parts)]
    wholes = [torch.zeros(p.shape, dtype=torch.float8_e4m3fn) for p in parts]
    scales = [torch.zeros(len(p) // 128, columns // 128) for p in parts]
    for rank, shard in enumerate(shards):
        given = Shard(parameter, shard, dim if ranks > 1 else None, rank, ranks)
        write_in_fp8(given, wholes, scales, geometry)
    for part, numbers, of_blocks in zip(parts, wholes, scales, strict=True):
        expected, expected_scales = in_fp8(part)
        assert torch.equal(numbers.view(torch.uint8), expected.view(torch.uint8))
        assert torch.equal(of_blocks, expected_scales)

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slipstream.weightbus.version.layout import (
    bucket_offsets,
    plan_layout,
    safetensors_header,
    tensor_offsets,
)
from slipstream.wire.errors import PublishError
from slipstream.wire.messages.manifest import TensorSpec
from slipstream.wire.messages.versions import PolicyVersion
from tests.support.bus.snapshots import CopiedSnapshot


def plan(sizes: list[int], limit: int) -> list[list[str]]:
    """Plan float16 tensors of these many bytes."""
    specs = [TensorSpec(f"t{i}", "float16", (size // 2,)) for i, size in enumerate(sizes)]
    layout = plan_layout(specs, bucket_bytes=limit)
    assert all(b.num_bytes == sum(s.num_bytes for s in b.tensors) for b in layout.buckets)
    assert layout.num_bytes == sum(sizes)
    return [[spec.name for spec in bucket.tensors] for bucket in layout.buckets]


def test_tensors_fill_buckets_in_order_and_one_too_large_travels_alone():
    for sizes, limit, buckets in [
        ([], 10, []),
        ([4, 6, 2], 10, [["t0", "t1"], ["t2"]]),
        ([4, 8], 10, [["t0"], ["t1"]]),
        ([4, 24, 4, 4], 10, [["t0"], ["t1"], ["t2", "t3"]]),
        ([24, 24], 10, [["t0"], ["t1"]]),
        ([10, 0, 10], 10, [["t0", "t1"], ["t2"]]),
    ]:
        assert plan(sizes, limit) == buckets


def test_wider_types_come_first_so_that_every_tensor_is_aligned():
    specs = [TensorSpec("a", "bfloat16", (3,)), TensorSpec("b", "float32", (2, 2))]
    layout = plan_layout(specs, bucket_bytes=100)
    assert tensor_offsets(layout) == {"b": 0, "a": 16}
    assert bucket_offsets(plan_layout(specs, bucket_bytes=16)) == [0, 16]


def test_a_type_that_cannot_travel_is_refused_by_name():
    with pytest.raises(PublishError, match="embed has type int8, only float32, bfloat16, float16"):
        plan_layout([TensorSpec("embed", "int8", (2,))], bucket_bytes=10)


def test_a_header_and_the_bytes_of_a_version_are_a_safetensors_file(tmp_path: Path):
    tensors = {
        "a": torch.randn(3, 5, dtype=torch.bfloat16),
        "b": torch.randn(7),
        "scalar": torch.tensor(2.5),
    }
    snapshot = CopiedSnapshot.of(PolicyVersion(1, 2), tensors, bucket_bytes=16)
    header = safetensors_header(snapshot.layout)
    assert len(header) % 8 == 0
    assert json.loads(header[8:])["b"] == {"dtype": "F32", "shape": [7], "data_offsets": [0, 28]}
    file = tmp_path / "model.safetensors"
    file.write_bytes(header + snapshot.memory.numpy().tobytes())
    loaded = load_file(file)
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)

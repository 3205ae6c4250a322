import pytest
import torch
import xxhash

from weightbus.snapshot import WeightSnapshot, raw_bytes
from wire.errors import PublishError
from wire.versions import PolicyVersion

VERSION = PolicyVersion(1, 3)


def snapshot(**tensors: torch.Tensor) -> WeightSnapshot:
    return WeightSnapshot(VERSION, tensors)


def test_a_manifest_describes_every_tensor_in_order():
    a, b = torch.arange(6.0).view(2, 3), torch.ones(4, dtype=torch.bfloat16)
    manifest = snapshot(a=a, b=b).manifest(bucket_bytes=24)
    specs = [spec for bucket in manifest.buckets for spec in bucket.tensors]
    assert [(s.name, s.dtype, s.shape) for s in specs] == [
        ("a", "float32", (2, 3)),
        ("b", "bfloat16", (4,)),
    ]
    assert [s.digest for s in specs] == [xxhash.xxh3_128_hexdigest(raw_bytes(t)) for t in (a, b)]
    assert [bucket.num_bytes for bucket in manifest.buckets] == [24, 8]
    assert (manifest.version, manifest.num_bytes) == (VERSION, 32)


def test_a_bucket_is_its_tensors_end_to_end():
    a, b = torch.arange(6.0).view(3, 2).t(), torch.tensor(2.5)
    weights = snapshot(a=a, b=b)
    (bucket,) = weights.manifest(bucket_bytes=100).buckets
    flat = weights.flat(bucket)
    assert flat.dtype is torch.uint8
    assert flat.view(torch.float32).tolist() == [0.0, 2.0, 4.0, 1.0, 3.0, 5.0, 2.5]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_not_finite_are_refused_by_name(value: float, dtype: torch.dtype):
    bad = torch.zeros(3, dtype=dtype)
    bad[1] = value
    with pytest.raises(PublishError, match=r"v1\.3: bad holds NaN or inf"):
        snapshot(good=torch.zeros(3), bad=bad).check_finite()


def test_large_finite_weights_are_fine():
    assert snapshot(a=torch.tensor([3e38, -3e38])).check_finite() is None

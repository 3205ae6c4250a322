import pytest
from weightbus.plan import plan_buckets

from wire.manifest import TensorSpec


def plan(sizes: list[int], limit: int) -> list[list[str]]:
    tensors = [(TensorSpec(f"t{i}", "float32", (size,)), size) for i, size in enumerate(sizes)]
    buckets = plan_buckets(tensors, bucket_bytes=limit)
    assert [b.num_bytes for b in buckets] == [sum(s.shape[0] for s in b.tensors) for b in buckets]
    return [[spec.name for spec in bucket.tensors] for bucket in buckets]


@pytest.mark.parametrize(
    ("sizes", "limit", "buckets"),
    [
        ([], 10, []),
        ([4, 6, 1], 10, [["t0", "t1"], ["t2"]]),
        ([4, 7], 10, [["t0"], ["t1"]]),
        ([3, 25, 3, 3], 10, [["t0"], ["t1"], ["t2", "t3"]]),
        ([25, 25], 10, [["t0"], ["t1"]]),
        ([10, 0, 10], 10, [["t0", "t1"], ["t2"]]),
    ],
)
def test_tensors_fill_buckets_in_order_and_one_too_large_travels_alone(
    sizes: list[int], limit: int, buckets: list[list[str]]
):
    assert plan(sizes, limit) == buckets

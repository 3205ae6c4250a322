"""Pure: which tensors travel together."""

from collections.abc import Iterable

from wire.manifest import Bucket, TensorSpec


def plan_buckets(
    tensors: Iterable[tuple[TensorSpec, int]], *, bucket_bytes: int
) -> tuple[Bucket, ...]:
    """Group (tensor, size in bytes) in order into buckets of at most ``bucket_bytes``.

    A tensor is never split: one that is larger than the limit has a bucket to itself.
    """
    buckets: list[Bucket] = []
    specs: list[TensorSpec] = []
    size = 0
    for spec, num_bytes in tensors:
        if specs and size + num_bytes > bucket_bytes:
            buckets.append(Bucket(tuple(specs), size))
            specs, size = [], 0
        specs.append(spec)
        size += num_bytes
    if specs:
        buckets.append(Bucket(tuple(specs), size))
    return tuple(buckets)

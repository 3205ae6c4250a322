import torch
import xxhash

from slipstream.wire.messages.versions import PolicyVersion
from tests.support.bus.snapshots import CopiedSnapshot

VERSION = PolicyVersion(1, 3)


def snapshot(*, bucket_bytes: int = 100, **tensors: torch.Tensor) -> CopiedSnapshot:
    return CopiedSnapshot.of(VERSION, tensors, bucket_bytes=bucket_bytes)


def test_a_manifest_describes_every_tensor_in_order():
    a, b = torch.arange(6.0).view(2, 3), torch.ones(4, dtype=torch.bfloat16)
    manifest = snapshot(a=a, b=b, bucket_bytes=24).manifest()
    assert [(s.name, s.dtype, s.shape) for s in manifest.tensors] == [
        ("a", "float32", (2, 3)),
        ("b", "bfloat16", (4,)),
    ]
    raw = [tensor.view(torch.uint8).numpy().tobytes() for tensor in (a, b)]
    assert [s.digest for s in manifest.tensors] == [xxhash.xxh3_128_hexdigest(one) for one in raw]
    assert [bucket.num_bytes for bucket in manifest.buckets] == [24, 8]
    assert (manifest.version, manifest.num_bytes) == (VERSION, 32)


def test_a_bucket_is_its_tensors_end_to_end_and_shares_their_memory():
    a, b = torch.arange(6.0).view(3, 2).t(), torch.tensor(2.5)
    weights = snapshot(a=a, b=b)
    flat = weights.bucket(0)
    assert flat.dtype is torch.uint8
    assert flat.view(torch.float32).tolist() == [0.0, 2.0, 4.0, 1.0, 3.0, 5.0, 2.5]
    weights.tensors["b"].fill_(7.0)
    assert weights.bucket(0).view(torch.float32)[-1] == 7.0
    split = snapshot(a=a, b=b, bucket_bytes=24)
    assert split.bucket(1).view(torch.float32).tolist() == [2.5]

"""What a published policy version consists of."""

import msgspec

from wire.versions import PolicyVersion


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """One tensor under its Hugging Face name."""

    name: str
    dtype: str  # torch's name without prefix, e.g. float32
    shape: tuple[int, ...]
    digest: str = ""  # xxh3-128 of its bytes, hexadecimal


class Bucket(msgspec.Struct, frozen=True, array_like=True):
    """Tensors that travel in one transfer, laid end to end in this order."""

    tensors: tuple[TensorSpec, ...]
    num_bytes: int


class WeightManifest(msgspec.Struct, frozen=True, kw_only=True):
    """All tensors of one version, in the buckets in which they travel."""

    version: PolicyVersion
    buckets: tuple[Bucket, ...]
    parent: PolicyVersion | None = None
    encoding: str = "full"

    @property
    def num_bytes(self) -> int:
        """Return the size of the version on the wire."""
        return sum(bucket.num_bytes for bucket in self.buckets)

"""Tensors of a published policy version, and the layout of its bytes."""

import hashlib
import math
from typing import Literal

import msgspec

from slipstream.wire.messages.bounds import Count, Name, Several
from slipstream.wire.messages.versions import PolicyVersion

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """One tensor under its Hugging Face name."""

    name: Name
    dtype: Name  # torch's name without prefix, e.g. float32
    shape: Several[Count]
    digest: Name = ""  # digest of its bytes (weightbus/version/digests.py)

    @property
    def num_bytes(self) -> int:
        """Its size; KeyError if the type cannot be published."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class Bucket(msgspec.Struct, frozen=True, array_like=True):
    """Tensors that travel in one transfer, laid end to end in this order."""

    tensors: Several[TensorSpec]
    num_bytes: Count
    part: Count = 0  # number of the host, of the learner's, in whose memory it is


class WeightManifest(msgspec.Struct, frozen=True, kw_only=True):
    """All tensors of one version, in the buckets in which they travel, end to end."""

    version: PolicyVersion
    buckets: Several[Bucket]
    parent: PolicyVersion | None = None
    encoding: Literal["full"] = "full"

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """All tensors in the order of their bytes."""
        return tuple(spec for bucket in self.buckets for spec in bucket.tensors)

    @property
    def num_bytes(self) -> int:
        """Size of the version on the wire."""
        return sum(bucket.num_bytes for bucket in self.buckets)

    @property
    def digest(self) -> str:
        """One digest of all names, types, shapes and bytes, from the digests of the tensors."""
        lines = (f"{s.name} {s.dtype} {s.shape} {s.digest}\n" for s in self.tensors)
        return hashlib.blake2b("".join(lines).encode(), digest_size=16).hexdigest()

"""One whole version in memory, and the manifest that describes it."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

import msgspec
import torch
from torch import Tensor

from slipstream.weightbus.version.digests import DigestKind, digest_of
from slipstream.weightbus.version.layout import bucket_offsets, part_layout, tensor_offsets
from slipstream.wire.messages.manifest import TensorSpec, WeightManifest
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.process.processes import spare_cores

_LEAST_THREADS, _MOST_THREADS = 2, 16  # threads that compute digests


@dataclass(frozen=True)
class WeightSnapshot:
    """Tensors by Hugging Face name, end to end in ``memory``, which does not change meanwhile.

    ``memory`` has shape [num_bytes], uint8, and lies on the host. It holds the buckets of one part
    of the layout: all buckets unless the learner is on several hosts.
    """

    version: PolicyVersion
    layout: WeightManifest
    memory: Tensor
    part: int = 0

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Each tensor of the part as a view of the memory, by name, in order."""
        return tensor_views(self._own, self.memory)

    def has(self, index: int) -> bool:
        """True if the layout has a bucket at ``index``, and it is in this part."""
        return index in self._bucket_offsets

    def bucket(self, index: int) -> Tensor:
        """Return a bucket as a view of the memory. Shape [bucket.num_bytes], uint8."""
        start = self._bucket_offsets[index]
        return self.memory[start : start + self.layout.buckets[index].num_bytes]

    def digests(self, kind: DigestKind = "xxh3") -> dict[str, str]:
        """Return the digest of each tensor of the part, computed on an eighth of the cores."""
        flat = self.memory.numpy().data
        offsets = tensor_offsets(self._own)

        def digest(spec: TensorSpec) -> tuple[str, str]:
            start = offsets[spec.name]
            return spec.name, digest_of(flat[start : start + spec.num_bytes], kind)

        with ThreadPoolExecutor(spare_cores(least=_LEAST_THREADS, most=_MOST_THREADS)) as pool:
            return dict(pool.map(digest, self._own.tensors))

    @cached_property
    def _own(self) -> WeightManifest:
        return part_layout(self.layout, self.part)

    @cached_property
    def _bucket_offsets(self) -> dict[int, int]:
        numbers = [i for i, bucket in enumerate(self.layout.buckets) if bucket.part == self.part]
        return dict(zip(numbers, bucket_offsets(self._own), strict=True))


def with_digests(
    layout: WeightManifest, version: PolicyVersion, digests: Mapping[str, str]
) -> WeightManifest:
    """Return the manifest of a version, with digests by the names of its tensors."""
    buckets = tuple(
        msgspec.structs.replace(
            bucket,
            tensors=tuple(
                TensorSpec(spec.name, spec.dtype, spec.shape, digests[spec.name])
                for spec in bucket.tensors
            ),
        )
        for bucket in layout.buckets
    )
    return msgspec.structs.replace(layout, version=version, buckets=buckets)


def tensor_views(layout: WeightManifest, memory: Tensor) -> dict[str, Tensor]:
    """Return each tensor of a version as a view of its memory, by name.

    ``memory`` has shape [layout.num_bytes], uint8.
    """
    views: dict[str, Tensor] = {}
    at = 0
    for spec in layout.tensors:
        part = memory[at : at + spec.num_bytes]
        views[spec.name] = part.view(getattr(torch, spec.dtype)).view(spec.shape)
        at += spec.num_bytes
    return views

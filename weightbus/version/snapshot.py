"""One whole version in memory, and the manifest that describes it."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

import msgspec
import torch
from torch import Tensor

from slipstream.weightbus.version.digests import DigestKind, digest_of
from slipstream.weightbus.version.layout import bucket_offsets, plan_layout, tensor_offsets
from slipstream.wire.messages.manifest import TensorSpec, WeightManifest
from slipstream.wire.messages.versions import PolicyVersion


@dataclass(frozen=True)
class WeightSnapshot:
    """Tensors by Hugging Face name, end to end in ``memory``, which does not change meanwhile.

    ``memory`` has shape [layout.num_bytes], uint8, and lies on the host.
    """

    version: PolicyVersion
    layout: WeightManifest
    memory: Tensor

    @classmethod
    def of(
        cls, version: PolicyVersion, tensors: Mapping[str, Tensor], *, bucket_bytes: int
    ) -> "WeightSnapshot":
        """Copy tensors into new memory."""
        layout = plan_layout(
            (tensor_spec(*item) for item in tensors.items()), bucket_bytes=bucket_bytes
        )
        snapshot = cls(version, layout, torch.empty(layout.num_bytes, dtype=torch.uint8))
        for name, view in snapshot.tensors.items():
            view.copy_(tensors[name])
        return snapshot

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Each tensor as a view of the memory, by name, in order."""
        return tensor_views(self.layout, self.memory)

    def bucket(self, index: int) -> Tensor:
        """Return a bucket as a view of the memory. Shape [bucket.num_bytes], uint8."""
        start = self._bucket_offsets[index]
        return self.memory[start : start + self.layout.buckets[index].num_bytes]

    def manifest(self, kind: DigestKind = "xxh3", *, threads: int = 2) -> WeightManifest:
        """Return the manifest with a digest per tensor."""
        flat = self.memory.numpy().data
        offsets = tensor_offsets(self.layout)

        def digested(spec: TensorSpec) -> TensorSpec:
            start = offsets[spec.name]
            digest = digest_of(flat[start : start + spec.num_bytes], kind)
            return TensorSpec(spec.name, spec.dtype, spec.shape, digest)

        with ThreadPoolExecutor(threads) as pool:
            digests = iter(list(pool.map(digested, self.layout.tensors)))
        buckets = tuple(
            msgspec.structs.replace(bucket, tensors=tuple(next(digests) for _ in bucket.tensors))
            for bucket in self.layout.buckets
        )
        return msgspec.structs.replace(self.layout, version=self.version, buckets=buckets)

    @cached_property
    def _bucket_offsets(self) -> list[int]:
        return bucket_offsets(self.layout)


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


def tensor_spec(name: str, tensor: Tensor) -> TensorSpec:
    """Return the spec of a tensor, without a digest."""
    return TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))

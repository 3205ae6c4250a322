"""A version of tensors that a test made."""

from collections.abc import Mapping

import torch
from torch import Tensor

from slipstream.weightbus.version.layout import plan_layout
from slipstream.weightbus.version.snapshot import WeightSnapshot, with_digests
from slipstream.wire.messages.manifest import TensorSpec, WeightManifest
from slipstream.wire.messages.versions import PolicyVersion


class CopiedSnapshot(WeightSnapshot):
    """A version in memory of its own, whole, with the manifest of a relay on one host."""

    @classmethod
    def of(
        cls, version: PolicyVersion, tensors: Mapping[str, Tensor], *, bucket_bytes: int
    ) -> "CopiedSnapshot":
        """Copy tensors into new memory."""
        layout = plan_layout(
            (tensor_spec(*item) for item in tensors.items()), bucket_bytes=bucket_bytes
        )
        snapshot = cls(version, layout, torch.empty(layout.num_bytes, dtype=torch.uint8))
        for name, view in snapshot.tensors.items():
            view.copy_(tensors[name])
        return snapshot

    def manifest(self) -> WeightManifest:
        """Return the manifest, with a digest per tensor."""
        return with_digests(self.layout, self.version, self.digests())


def tensor_spec(name: str, tensor: Tensor) -> TensorSpec:
    """Return the spec of a tensor, without a digest."""
    return TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))

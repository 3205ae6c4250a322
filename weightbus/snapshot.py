"""One version's tensors as the learner hands them over, and the manifest that describes them."""

from dataclasses import dataclass

import xxhash
from torch import Tensor, cat, uint8

from weightbus.plan import plan_buckets
from wire.errors import PublishError
from wire.manifest import Bucket, TensorSpec, WeightManifest
from wire.versions import PolicyVersion


@dataclass(frozen=True, slots=True)
class WeightSnapshot:
    """Tensors by Hugging Face name. Nobody writes to them any more."""

    version: PolicyVersion
    tensors: dict[str, Tensor]

    def check_finite(self) -> None:
        """Refuse weights that hold NaN or inf.

        Raises:
            PublishError: naming the first such tensor.
        """
        for name, tensor in self.tensors.items():
            if not bool(tensor.isfinite().all()):
                raise PublishError(f"{self.version.label}: {name} holds NaN or inf")

    def manifest(self, *, bucket_bytes: int) -> WeightManifest:
        """Return what will be sent, with a digest per tensor."""
        specs = ((_spec(name, t), t.nbytes) for name, t in self.tensors.items())
        return WeightManifest(
            version=self.version, buckets=plan_buckets(specs, bucket_bytes=bucket_bytes)
        )

    def flat(self, bucket: Bucket) -> Tensor:
        """Return a bucket's tensors laid end to end. Shape [bucket.num_bytes], uint8."""
        return cat([_as_bytes(self.tensors[spec.name]) for spec in bucket.tensors])


def raw_bytes(tensor: Tensor) -> bytes:
    """Return a tensor's elements as they lie in memory."""
    return _as_bytes(tensor).cpu().numpy().tobytes()


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().flatten().view(uint8)


def _spec(name: str, tensor: Tensor) -> TensorSpec:
    return TensorSpec(
        name=name,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        digest=xxhash.xxh3_128_hexdigest(raw_bytes(tensor)),
    )

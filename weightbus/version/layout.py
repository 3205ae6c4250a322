"""Pure: packs tensors into buckets, and places each in a version's memory.

A version is one run of bytes: its tensors end to end, in the order of the manifest. The same bytes
lie in a slot of the learner's memory, travel, and follow the header of a
safetensors file, so nothing is ever rearranged.
"""

import json
from collections.abc import Iterable
from itertools import accumulate

from slipstream.wire.errors import PublishError
from slipstream.wire.messages.manifest import ITEM_BYTES, Bucket, TensorSpec, WeightManifest
from slipstream.wire.messages.versions import PolicyVersion

_NO_VERSION = PolicyVersion(0, 0)
_SAFETENSORS_TYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_ALIGNMENT = 8


def plan_layout(tensors: Iterable[TensorSpec], *, bucket_bytes: int) -> WeightManifest:
    """Lay tensors end to end and group them in order into buckets of at most ``bucket_bytes``.

    Wider types come first, so that every tensor starts at a multiple of its item size. A tensor is
    never split: a larger one than the limit has a bucket to itself.

    Raises:
        PublishError: a type that cannot be published.
    """
    specs = list(tensors)
    for spec in specs:
        if spec.dtype not in ITEM_BYTES:
            raise PublishError(
                f"{spec.name} has type {spec.dtype}, only {', '.join(ITEM_BYTES)} can be published"
            )
    specs.sort(key=lambda spec: -ITEM_BYTES[spec.dtype])  # stable
    buckets: list[Bucket] = []
    chosen: list[TensorSpec] = []
    size = 0
    for spec in specs:
        if chosen and size + spec.num_bytes > bucket_bytes:
            buckets.append(Bucket(tuple(chosen), size))
            chosen, size = [], 0
        chosen.append(spec)
        size += spec.num_bytes
    if chosen:
        buckets.append(Bucket(tuple(chosen), size))
    return WeightManifest(version=_NO_VERSION, buckets=tuple(buckets))


def tensor_offsets(manifest: WeightManifest) -> dict[str, int]:
    """Return each tensor's offset in bytes from the start of the version."""
    starts = accumulate((spec.num_bytes for spec in manifest.tensors), initial=0)
    return {spec.name: at for spec, at in zip(manifest.tensors, starts, strict=False)}


def bucket_offsets(manifest: WeightManifest) -> list[int]:
    """Return each bucket's offset in bytes from the start of the version."""
    return list(accumulate((bucket.num_bytes for bucket in manifest.buckets), initial=0))[:-1]


def safetensors_header(manifest: WeightManifest) -> bytes:
    """Return the header that turns a version's bytes into a safetensors file."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets = tensor_offsets(manifest)
    for spec in manifest.tensors:
        at = offsets[spec.name]
        entries[spec.name] = {
            "dtype": _SAFETENSORS_TYPES[spec.dtype],
            "shape": spec.shape,
            "data_offsets": (at, at + spec.num_bytes),
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text

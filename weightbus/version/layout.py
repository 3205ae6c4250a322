"""Pure: packs tensors into buckets, and places each in a version's memory.

A version is one run of bytes: its tensors end to end, in the order of the manifest. The same bytes
lie in a slot of the learner's memory, travel, and follow the header of a
safetensors file, so nothing is ever rearranged.
"""

import json
from collections.abc import Iterable, Mapping
from itertools import accumulate

import msgspec

from slipstream.wire.errors import PublishError
from slipstream.wire.messages.manifest import ITEM_BYTES, Bucket, TensorSpec, WeightManifest
from slipstream.wire.messages.versions import PolicyVersion

_NO_VERSION = PolicyVersion(0, 0)
_SAFETENSORS_TYPES = {
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "float8_e4m3fn": "F8_E4M3",
}
_ALIGNMENT = 8
_PAGE = 4096  # bytes of a labelled header are a multiple: what follows can be mapped and pinned
_BEFORE_LABEL = '{"__metadata__":{"format":"pt","version":"'
LABEL_AT = 8 + len(_BEFORE_LABEL)
"""Offset of the label in a file whose header has one."""
LABEL_BYTES = 48  # two numbers of 64 bits and more; flush right, so that no part is a label


def plan_layout(
    tensors: Iterable[TensorSpec], *, bucket_bytes: int, part_of: Mapping[str, int] | None = None
) -> WeightManifest:
    """Lay tensors end to end and group them in order into buckets of at most ``bucket_bytes``.

    Wider types come first, so that every tensor starts at a multiple of its item size, in the
    version and in its part. A tensor is never split: a larger one than the limit has a bucket to
    itself. No bucket has tensors of two parts.

    Args:
        tensors: All tensors of the version.
        bucket_bytes: Limit of a bucket, above 0.
        part_of: Number of each tensor's part, by name; None: all are in part 0.

    Raises:
        PublishError: a tensor has a type that cannot be published.
    """
    specs = list(tensors)
    for spec in specs:
        if spec.dtype not in ITEM_BYTES:
            raise PublishError(
                f"{spec.name} has type {spec.dtype}, only {', '.join(ITEM_BYTES)} can be published"
            )
    parts = {spec.name: 0 if part_of is None else part_of[spec.name] for spec in specs}
    specs.sort(key=lambda spec: (-ITEM_BYTES[spec.dtype], parts[spec.name]))  # stable
    buckets: list[Bucket] = []
    chosen: list[TensorSpec] = []
    size = part = 0
    for spec in specs:
        is_full = size + spec.num_bytes > bucket_bytes
        if chosen and (is_full or parts[spec.name] != part):
            buckets.append(Bucket(tuple(chosen), size, part))
            chosen, size = [], 0
        chosen.append(spec)
        size += spec.num_bytes
        part = parts[spec.name]
    if chosen:
        buckets.append(Bucket(tuple(chosen), size, part))
    return WeightManifest(version=_NO_VERSION, buckets=tuple(buckets))


def part_layout(manifest: WeightManifest, part: int) -> WeightManifest:
    """Return a part's buckets only: they lie end to end in the memory of its host."""
    own = tuple(bucket for bucket in manifest.buckets if bucket.part == part)
    return msgspec.structs.replace(manifest, buckets=own)


def names_by_part(manifest: WeightManifest) -> dict[int, frozenset[str]]:
    """Return the names of the tensors of each part."""
    names: dict[int, set[str]] = {}
    for bucket in manifest.buckets:
        names.setdefault(bucket.part, set()).update(spec.name for spec in bucket.tensors)
    return {part: frozenset(of_part) for part, of_part in names.items()}


def tensor_offsets(manifest: WeightManifest) -> dict[str, int]:
    """Return each tensor's offset in bytes from the start of the version."""
    starts = accumulate((spec.num_bytes for spec in manifest.tensors), initial=0)
    return {spec.name: at for spec, at in zip(manifest.tensors, starts, strict=False)}


def bucket_offsets(manifest: WeightManifest) -> list[int]:
    """Return each bucket's offset in bytes from the start of the version."""
    return list(accumulate((bucket.num_bytes for bucket in manifest.buckets), initial=0))[:-1]


def safetensors_header(manifest: WeightManifest, *, label: str | None = None) -> bytes:
    """Return the header that turns a version's bytes into a safetensors file.

    Args:
        manifest: Layout of the version.
        label: Label of the version in the header, which can be replaced in place: empty while the
            file holds none. None leaves no room for one.
    """
    metadata = {"format": "pt"}
    if label is not None:
        metadata["version"] = label.rjust(LABEL_BYTES)
    entries: dict[str, object] = {"__metadata__": metadata}
    offsets = tensor_offsets(manifest)
    for spec in manifest.tensors:
        at = offsets[spec.name]
        entries[spec.name] = {
            "dtype": _SAFETENSORS_TYPES[spec.dtype],
            "shape": spec.shape,
            "data_offsets": (at, at + spec.num_bytes),
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    multiple = _ALIGNMENT if label is None else _PAGE
    text += b" " * (-(8 + len(text)) % multiple)
    return len(text).to_bytes(8, "little") + text


def label_in(head: bytes) -> str | None:
    """Return the label in the first bytes of a file; None if its header has no room for one."""
    if head[8:LABEL_AT] != _BEFORE_LABEL.encode():
        return None
    return head[LABEL_AT : LABEL_AT + LABEL_BYTES].decode(errors="replace").lstrip()

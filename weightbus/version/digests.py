"""Digests of a tensor's bytes: against accidents, or against people.

The text tells which: 32 hexadecimal digits are xxh3-128, of which other bytes with the same digest
can be made; a prefix names BLAKE2b, of which nobody can make any.
"""

import hashlib
from typing import Literal, TypeAlias

import xxhash

DigestKind: TypeAlias = Literal["xxh3", "blake2b"]
_BLAKE2B = "blake2b:"
_BYTES = 32


def digest_of(data: memoryview, kind: DigestKind) -> str:
    """Return a digest of some bytes."""
    if kind == "blake2b":
        return _BLAKE2B + hashlib.blake2b(data, digest_size=_BYTES).hexdigest()
    return xxhash.xxh3_128_hexdigest(data)


def kind_of(digest: str) -> DigestKind:
    """Return how a digest was computed."""
    return "blake2b" if digest.startswith(_BLAKE2B) else "xxh3"

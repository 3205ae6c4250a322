"""Digests of a tensor's bytes: against accidents, against strangers, or against everyone.

The text tells the kind. 32 hexadecimal digits are xxh3-128: other bytes with the same digest can be
made. ``keyed`` is Poly1305 with a new key for every tensor; the key is in the text, which travels
encrypted only. Without the key it is impossible to make other bytes with the digest. ``blake2b``
needs no secret: making other bytes is impossible for everyone.
"""

import hashlib
import hmac
import secrets
from typing import Literal, TypeAlias

import xxhash

DigestKind: TypeAlias = Literal["xxh3", "keyed", "blake2b"]
_BLAKE2B = "blake2b:"
_KEYED = "keyed:"
_BYTES = 32  # size of a digest by BLAKE2b, and of Poly1305's keys
_SEED_BYTES = 16
_CHUNK_BYTES = 16 << 20  # hashed at a time: other threads get a turn


def digest_of(data: memoryview, kind: DigestKind) -> str:
    """Return a digest of some bytes; a keyed one differs each time."""
    if kind == "blake2b":
        return _BLAKE2B + hashlib.blake2b(data, digest_size=_BYTES).hexdigest()
    if kind == "keyed":
        return _keyed(data, secrets.token_hex(_SEED_BYTES))
    return xxhash.xxh3_128_hexdigest(data)


def kind_of(digest: str) -> DigestKind:
    """Return the kind of a digest."""
    if digest.startswith(_KEYED):
        return "keyed"
    return "blake2b" if digest.startswith(_BLAKE2B) else "xxh3"


def difference(data: memoryview, digest: str) -> str:
    """Describe how bytes differ from those of a digest; empty if they do not.

    The text has nothing of a keyed digest: two digests with one key would reveal the key.
    """
    kind = kind_of(digest)
    if kind != "keyed":
        found = digest_of(data, kind)
        return "" if found == digest else f"digest {found}, expected {digest}"
    seed = digest.removeprefix(_KEYED).partition(":")[0]
    if hmac.compare_digest(_keyed(data, seed).encode(), digest.encode()):
        return ""
    return "other bytes than those of its keyed digest"


def _keyed(data: memoryview, seed: str) -> str:
    # Import here: most runs have no plain door.
    from cryptography.hazmat.primitives.poly1305 import Poly1305

    mac = Poly1305(hashlib.blake2b(seed.encode(), digest_size=_BYTES).digest())
    data = data.cast("B")
    for start in range(0, data.nbytes, _CHUNK_BYTES):
        mac.update(data[start : start + _CHUNK_BYTES])
    return f"{_KEYED}{seed}:{mac.finalize().hex()}"

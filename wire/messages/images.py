"""Images of prompts. Their bytes are stored once per run; messages have their digests."""

import hashlib
import re
from typing import Annotated, TypeAlias

import msgspec

from slipstream.wire.messages.bounds import Count

Digest: TypeAlias = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$", max_length=64)]
"""SHA-256 of a file's bytes, in hexadecimal."""
MOST_IMAGE_BYTES = 16 << 20
MOST_EDGE = 1 << 20  # pixels
_Edge: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=MOST_EDGE)]


class Image(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An image of a prompt or an observation."""

    digest: Digest
    width: _Edge  # pixels, as a person sees it
    height: _Edge
    num_bytes: Count

    @property
    def text(self) -> str:
        """The image as text for people."""
        return f"[image {self.digest[:8]}, {self.width} x {self.height}]"


class ImageSpan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tokens of a trajectory that stand for an image, and the patches that they are computed of."""

    digest: Digest
    first_token: Count  # index into token_ids
    num_tokens: Count
    rows: Count  # patches from top to bottom, after resizing
    columns: Count  # patches from left to right

    @property
    def end(self) -> int:
        """Index after its last token."""
        return self.first_token + self.num_tokens


def is_digest(text: str) -> bool:
    """Return True of a text that can name an image."""
    return re.fullmatch("[0-9a-f]{64}", text) is not None


def digest_of(content: bytes) -> str:
    """Return the digest by which an image is stored."""
    return hashlib.sha256(content).hexdigest()

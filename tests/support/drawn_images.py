"""Images that tests draw, and no images."""

import io
from pathlib import Path

import numpy as np
from PIL import Image

from slipstream.broker.images import LocalImages
from slipstream.wire.errors import ImageError


def drawn(
    width: int = 40, height: int = 30, *, seed: int = 0, kind: str = "PNG", mode: str = "RGB"
) -> bytes:
    """Return the file of an image of random colors, the same for the same arguments."""
    colors = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(colors).convert(mode).save(file, kind)
    return file.getvalue()


async def _none_is_here(digest: str) -> bytes:
    raise ImageError(f"no image {digest[:8]} here")


NO_IMAGES = LocalImages(_none_is_here, Path("nowhere"))

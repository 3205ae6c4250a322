"""Bytes of an image to numbers that a vision tower reads: the same in engine and learner."""

import io
from typing import TYPE_CHECKING

from slipstream.wire.errors import ConfigError
from slipstream.wire.messages.images import MOST_IMAGE_BYTES, Image, digest_of
from slipstream.wire.models.image_law import ImageLaw

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image as OpenImage

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MOST_PIXELS = 1 << 26  # 8192 x 8192
_BRIGHTEST = 255.0


class BadImageError(ValueError):
    """Raised for bytes that are no image that can be used, with the reason."""


def checked_image(content: bytes) -> Image:
    """Return the facts of an image whose pixels were all read once.

    Raises:
        BadImageError: it is too large, of another format, or damaged.
    """
    if len(content) > MOST_IMAGE_BYTES:
        raise BadImageError(f"{len(content):,} bytes, at most {MOST_IMAGE_BYTES:,} can be used")
    pixels = _opened(content)
    width, height = pixels.size
    return Image(digest_of(content), width, height, len(content))


def patches(content: bytes, rows: int, columns: int, law: ImageLaw) -> "NDArray[np.float32]":
    """Return the patches of an image: [rows * columns, law.channels], by squares that are merged.

    It is resized as Pillow does, bicubic, to so many patches, and each color becomes (value -
    mean) / deviation.

    Raises:
        BadImageError: it cannot be read.
    """
    import numpy as np  # only where pixels are computed
    from PIL import Image as Pillow

    size, merge, frames = law.patch_size, law.merge_size, law.temporal_patch_size
    resized = _opened(content).resize((columns * size, rows * size), Pillow.Resampling.BICUBIC)
    mean = np.asarray(law.mean, np.float32) * np.float32(_BRIGHTEST)
    deviation = np.asarray(law.deviation, np.float32) * np.float32(_BRIGHTEST)
    colors = (np.asarray(resized, np.float32) - mean) / deviation
    squares = colors.reshape(rows // merge, merge, size, columns // merge, merge, size, 3)
    squares = squares.transpose(0, 3, 1, 4, 6, 2, 5)  # squares, patches in one, color, pixels
    in_frames = np.repeat(squares[:, :, :, :, :, None], frames, axis=5)
    return in_frames.reshape(rows * columns, law.channels)


def thumbnail(content: bytes, most: int) -> "NDArray[np.uint8]":
    """Return a small copy of an image, [rows, columns, 3], neither more than ``most``.

    Raises:
        BadImageError: it cannot be read.
    """
    import numpy as np

    small = _opened(content)
    small.thumbnail((most, most))
    return np.asarray(small)


def thumbnail_file(content: bytes, most: int) -> bytes:
    """Return a small copy of an image as a PNG file.

    Raises:
        BadImageError: it cannot be read.
    """
    small, file = _opened(content), io.BytesIO()
    small.thumbnail((most, most))
    small.save(file, "PNG")
    return file.getvalue()


def _opened(content: bytes) -> "OpenImage":
    """Return an image in RGB, turned as its file says, its first frame if it has several."""
    try:
        from PIL import Image as Pillow
        from PIL import ImageOps, UnidentifiedImageError
    except ImportError as error:
        raise ConfigError("images need pillow: pip install 'slipstream[data]'") from error
    try:
        with Pillow.open(io.BytesIO(content), formats=FORMATS) as opened:
            width, height = opened.size
            is_small = width * height <= MOST_PIXELS
            if is_small:
                return ImageOps.exif_transpose(opened).convert("RGB")
    except UnidentifiedImageError:
        kinds = f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
        raise BadImageError(f"not an image that can be read: no {kinds}") from None
    except Exception as error:  # Pillow raises many kinds for damaged files
        raise BadImageError(f"not an image that can be read: {error}") from error
    raise BadImageError(f"{width} x {height} pixels, at most {MOST_PIXELS:,} can be used")

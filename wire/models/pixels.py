"""Bytes of an image to numbers that a vision tower reads: the same in engine and learner."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from slipstream.wire.errors import ConfigError
from slipstream.wire.messages.images import MOST_EDGE, MOST_IMAGE_BYTES, Image, digest_of
from slipstream.wire.models.image_law import ImageLaw

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image as OpenImage

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MOST_PIXELS = 1 << 26  # 8192 x 8192
_OF_CAMERAS = ("JPEG", "WEBP")  # formats with a turn in their head
_ORIENTATION = 0x0112  # tag of EXIF
_ON_ITS_SIDE = frozenset({5, 6, 7, 8})
_TURNS = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}  # turn in EXIF -> Pillow's Transpose
_BRIGHTEST = 255.0


class BadImageError(ValueError):
    """Raised for bytes that are no image that can be used, with the reason."""


def image_facts(content: bytes) -> Image:
    """Return the facts of an image; its head alone is read.

    Raises:
        BadImageError: it is too large, or of another format.
    """
    if len(content) > MOST_IMAGE_BYTES:
        raise BadImageError(f"{len(content):,} bytes, at most {MOST_IMAGE_BYTES:,} can be used")
    with _reading(content) as opened:
        width, height = opened.size
        if _orientation(opened) in _ON_ITS_SIDE:
            width, height = height, width
    return Image(digest_of(content), width, height, len(content))


def checked_image(content: bytes) -> Image:
    """Return the facts of an image whose pixels were all read once.

    Raises:
        BadImageError: it is too large, of another format, or damaged.
    """
    facts = image_facts(content)
    _opened(content)
    return facts


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

    return np.asarray(_small(content, most))


def thumbnail_file(content: bytes, most: int) -> bytes:
    """Return a small copy of an image as a PNG file.

    Raises:
        BadImageError: it cannot be read.
    """
    file = io.BytesIO()
    _small(content, most).save(file, "PNG")
    return file.getvalue()


def _small(content: bytes, most: int) -> "OpenImage":
    small = _opened(content)
    small.thumbnail((most, most))
    return small


@contextmanager
def _reading(content: bytes) -> "Iterator[OpenImage]":
    """Open an image whose size is within the limit; no pixel is read yet.

    Raises:
        BadImageError: it cannot be read, here or in the block.
    """
    try:
        from PIL import Image as Pillow
        from PIL import UnidentifiedImageError
    except ImportError as error:
        raise ConfigError("images need pillow: pip install 'slipstream[data]'") from error
    try:
        with Pillow.open(io.BytesIO(content), formats=FORMATS) as opened:
            width, height = opened.size
            if width * height > MOST_PIXELS:
                reason = f"{width} x {height} pixels, at most {MOST_PIXELS:,} can be used"
                raise BadImageError(reason)  # noqa: TRY301 the one way out for all reasons
            if max(width, height) > MOST_EDGE:
                reason = f"{width} x {height} pixels, an edge may have {MOST_EDGE:,}"
                raise BadImageError(reason)  # noqa: TRY301
            yield opened
    except BadImageError:
        raise
    except UnidentifiedImageError:
        kinds = f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
        raise BadImageError(f"not an image that can be read: no {kinds}") from None
    except Exception as error:  # Pillow raises many kinds for damaged files
        raise BadImageError(f"not an image that can be read: {error}") from error


def _orientation(opened: "OpenImage") -> int:
    """Return the turn that a camera wrote into the head of a file; 1 is upright."""
    return int(opened.getexif().get(_ORIENTATION, 1)) if opened.format in _OF_CAMERAS else 1


def _opened(content: bytes) -> "OpenImage":
    """Return an image in RGB, turned as its camera says, its first frame if it has several."""
    with _reading(content) as opened:
        from PIL import Image as Pillow

        turn = _orientation(opened)
        upright = opened.convert("RGB")
        return upright.transpose(Pillow.Transpose(_TURNS[turn])) if turn in _TURNS else upright

"""Images of rows: bytes, paths and base64 become images of the run. None is downloaded."""

import base64
import binascii
import re
from collections.abc import Mapping
from pathlib import Path
from stat import S_ISREG
from typing import Any

from slipstream.broker.data.plain import BadRowError, kind_of
from slipstream.wire.errors import ImageError
from slipstream.wire.files.image_folder import ImageFolder
from slipstream.wire.messages.images import MOST_IMAGE_BYTES, Image
from slipstream.wire.models.pixels import BadImageError, checked_image, image_facts

_HOLDERS = ("bytes", "base64", "image", "image_url", "url", "path")  # keys with an image, in order
_DATA_URL = re.compile(r"data:[^,]*;base64,", re.IGNORECASE)
# PNG, JPEG, GIF, WEBP, BMP
_BASE64 = re.compile(r"(iVBORw0KGgo|/9j/|R0lGOD|UklGR|Qk[0-3])[A-Za-z0-9+/\s]{40,}")
_SHOWN = 80  # characters of a path in messages


class RowImages:
    """Images of the rows of one file."""

    def __init__(
        self, folder: Path, images: ImageFolder | None, *, reads_pixels: bool = False
    ) -> None:
        """Read images of a file in a folder, which relative paths start from.

        Args:
            folder: Folder of the file.
            images: Images of the run, which keeps them; None keeps none.
            reads_pixels: True if all pixels are read, not only the head of each image.
        """
        self._folder = folder
        self._images = images
        self._read = checked_image if reads_pixels else image_facts

    def take(self, value: Any) -> Image:  # noqa: ANN401 anything that a file holds
        """Keep an image of a row, and return its facts.

        Raises:
            BadRowError: it cannot be read or used, with the reason.
        """
        content = self._bytes(value)
        try:
            image = self._read(content)
            if self._images is not None:
                self._images.keep(content)
        except (BadImageError, ImageError) as error:
            raise BadRowError(f"an image: {error}") from error
        return image

    def _bytes(self, value: Any) -> bytes:  # noqa: ANN401 anything that a file holds
        if isinstance(value, Mapping):
            held = next((value[key] for key in _HOLDERS if value.get(key) is not None), None)
            if held is None:
                raise BadRowError(f"an image has none of {', '.join(_HOLDERS)}")
            return self._bytes(held)
        if isinstance(value, bytes | bytearray | memoryview):
            return bytes(value)
        if not isinstance(value, str):
            raise BadRowError(f"an image is {kind_of(value)}, expected bytes, a path or base64")
        data_url = _DATA_URL.match(value)
        if data_url is not None:
            return _decoded(value[data_url.end() :])
        if re.match(r"https?://", value, re.IGNORECASE):
            raise BadRowError(
                f"image {value[:_SHOWN]}: nothing is fetched from the network; download it"
            )
        if _BASE64.match(value):
            return _decoded(value)
        return self._content_of(value.removeprefix("file://"))

    def _content_of(self, name: str) -> bytes:
        try:
            path = self._folder / name
            stat = path.stat()
            size = stat.st_size
            if not S_ISREG(stat.st_mode):  # a device has no end, a pipe may have no writer
                raise BadRowError(f"image {name[:_SHOWN]} is not a file")
            if size > MOST_IMAGE_BYTES:
                raise BadRowError(
                    f"image {name[:_SHOWN]} has {size:,} bytes, at most {MOST_IMAGE_BYTES:,} can "
                    "be used"
                )
            return path.read_bytes()
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise BadRowError(f"cannot read image {name[:_SHOWN]}: {reason}") from error


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=False)
    except (binascii.Error, ValueError) as error:
        raise BadRowError(f"an image is no base64: {error}") from error

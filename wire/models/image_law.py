"""How a model sees an image: patches, tokens and colors, read from its Hugging Face folder."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from slipstream.wire.errors import ConfigError
from slipstream.wire.messages.images import ImageSpan
from slipstream.wire.models.families.registry import FAMILIES
from slipstream.wire.unreadable import UNREADABLE

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SEEING = frozenset(family.wrapped_by for family in FAMILIES.values() if family.tower is not None)
"""Values of ``model_type`` whose policies see images; of others the language model is alone."""
_PROCESSORS = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil")
_FIXED = {"do_resize": True, "do_rescale": True, "do_normalize": True, "resample": 3}
_LARGEST_RATIO = 200  # longer edge over shorter edge


class ImageLaw(msgspec.Struct, frozen=True, kw_only=True):
    """The image processor of a policy (Qwen2-VL's: Wang et al. 2024, arXiv:2409.12191, 2.1).

    An image is resized to whole patches; a square of ``merge_size`` patches each way is a token.
    """

    patch_size: int = 14  # pixels
    temporal_patch_size: int = 2  # frames of a patch; an image is all of them
    merge_size: int = 2  # patches
    least_pixels: int = 56 * 56
    most_pixels: int = 28 * 28 * 1280
    mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)
    deviation: tuple[float, float, float] = (0.26862954, 0.26130258, 0.27577711)
    image_token: int  # id of the tokens in the place of an image

    @property
    def channels(self) -> int:
        """Numbers of one patch: 3 colors of each of its pixels, in every frame."""
        return 3 * self.temporal_patch_size * self.patch_size**2

    def patches_of(self, width: int, height: int, most_pixels: int = 0) -> tuple[int, int]:
        """Return rows and columns of the patches of an image, as transformers chooses them.

        Args:
            width: Pixels.
            height: Pixels.
            most_pixels: Limit in place of the law's own; 0 is the law's own.

        Raises:
            ValueError: one edge is more than 200 times the other.
        """
        if max(width, height) > _LARGEST_RATIO * min(width, height):
            raise ValueError(
                f"an image of {width} x {height}: one edge is over {_LARGEST_RATIO} times the other"
            )
        unit = self.patch_size * self.merge_size
        most = most_pixels or self.most_pixels
        least = min(self.least_pixels, most)
        rows, columns = round(height / unit), round(width / unit)
        if rows * columns * unit**2 > most:
            shrunk = math.sqrt(width * height / most)
            rows = max(1, math.floor(height / shrunk / unit))
            columns = max(1, math.floor(width / shrunk / unit))
        elif rows * columns * unit**2 < least:
            grown = math.sqrt(least / (width * height))
            rows, columns = math.ceil(height * grown / unit), math.ceil(width * grown / unit)
        return rows * self.merge_size, columns * self.merge_size

    def num_tokens(self, rows: int, columns: int) -> int:
        """Return the tokens of an image of so many patches."""
        return rows * columns // self.merge_size**2


def positions_of(
    num_tokens: int, images: Sequence[ImageSpan], merge_size: int
) -> "NDArray[np.int64]":
    """Return the rotary positions of a sequence's tokens by frame, row and column, [3, num_tokens].

    A token of text is one after the greatest position before it. Tokens of an image have one
    frame, and the row and column of their square of patches (Wang et al. 2024, arXiv:2409.12191,
    2.1).
    """
    import numpy as np  # only where positions are computed

    found = np.empty((3, num_tokens), np.int64)
    token = position = 0
    for span in images:
        text = np.arange(span.first_token - token)
        found[:, token : span.first_token] = position + text
        position += len(text)
        rows, columns = span.rows // merge_size, span.columns // merge_size
        found[:, span.first_token : span.end] = position + np.indices((1, rows, columns)).reshape(
            3, -1
        )
        token, position = span.end, position + max(rows, columns)
    found[:, token:] = position + np.arange(num_tokens - token)
    return found


def image_law(folder: Path) -> ImageLaw | None:
    """Return how the policy of a folder sees images; None if it sees none.

    Raises:
        ConfigError: a file cannot be read, or is of a processor that is not known.
    """
    config = _read(folder / "config.json")
    if config.get("model_type") not in SEEING or config.get("image_token_id") is None:
        return None
    stated = _read(folder / "preprocessor_config.json")
    if not stated:
        stated = _read(folder / "processor_config.json").get("image_processor") or {}
    if not stated:
        return None
    kind = stated.get("image_processor_type", _PROCESSORS[0])
    if kind not in _PROCESSORS:
        raise ConfigError(
            f"{folder}: images of {kind} are not supported (run.model), those of "
            f"{_PROCESSORS[0]} are"
        )
    for key, value in _FIXED.items():
        if stated.get(key, value) != value:
            raise ConfigError(
                f"{folder}: {key} = {stated[key]!r} of its image processor is not supported "
                f"(run.model), {value!r} is"
            )
    size = stated.get("size") or {}
    found = {
        "patch_size": stated.get("patch_size"),
        "temporal_patch_size": stated.get("temporal_patch_size"),
        "merge_size": stated.get("merge_size"),
        "least_pixels": stated.get("min_pixels") or size.get("shortest_edge"),
        "most_pixels": stated.get("max_pixels") or size.get("longest_edge"),
        "mean": stated.get("image_mean"),
        "deviation": stated.get("image_std"),
        "image_token": config["image_token_id"],
    }
    known = {name: value for name, value in found.items() if value is not None}
    try:
        return msgspec.convert(known, ImageLaw)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{folder}: its image processor: {error} (run.model)") from error


def _read(path: Path) -> Mapping[str, Any]:
    try:
        content = msgspec.json.decode(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, *UNREADABLE) as error:
        raise ConfigError(f"cannot read {path}: {error} (run.model)") from error
    return content if isinstance(content, dict) else {}

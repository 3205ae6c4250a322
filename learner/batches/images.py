"""Images of trajectories: which tokens are theirs, and the numbers that a vision tower reads."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from slipstream.learner.batches.packing import SeenImage, TrainTrajectory
from slipstream.wire.errors import ConfigError, ProtocolError
from slipstream.wire.messages.images import ImageSpan
from slipstream.wire.models.hf_config import HfConfig
from slipstream.wire.models.image_law import ImageLaw, image_law
from slipstream.wire.models.pixels import BadImageError, patches


def law_of(hf: HfConfig, folder: Path) -> ImageLaw | None:
    """Return how a policy sees images; None if it sees none.

    Raises:
        ConfigError: its image processor makes other patches than its vision tower reads.
    """
    law = image_law(folder) if hf.vision is not None else None
    if law is None or hf.vision is None:
        return None
    theirs = (law.patch_size, law.temporal_patch_size, law.merge_size, law.image_token)
    tower = hf.vision.patch_size, hf.vision.temporal_patch_size, hf.vision.spatial_merge_size
    if theirs != (*tower, hf.image_token):
        raise ConfigError(
            f"{folder}: its image processor has patches of {theirs[0]} pixels and {theirs[1]} "
            f"frames, {theirs[2]} of them merged, for token {theirs[3]}, and config.json has "
            f"{tower[0]}, {tower[1]}, {tower[2]} and {hf.image_token} (run.model)"
        )
    return law


def seen_images(
    reader: "ImageReader | None", spans: tuple[ImageSpan, ...], trajectory: TrainTrajectory
) -> tuple[SeenImage, ...]:
    """Return the images of a trajectory; a policy without a reader sees none.

    Raises:
        ProtocolError: they cannot be used, or are not seen.
    """
    if reader is not None:
        return reader.of(spans, trajectory)
    if spans:
        raise ProtocolError("it has images, and the policy sees none")
    return ()


class ImageReader:
    """Reads the images of trajectories, each once."""

    def __init__(self, law: ImageLaw, contents: Mapping[str, bytes] | None) -> None:
        """Take files by digest; None on a rank without a vision tower, which reads no pixels."""
        self._law = law
        self._contents = contents
        self._patches = cache(self._read)

    def of(
        self, spans: tuple[ImageSpan, ...], trajectory: TrainTrajectory
    ) -> tuple[SeenImage, ...]:
        """Return the images of a trajectory.

        Raises:
            ProtocolError: tokens of images are not where spans are, an image has another
                number of them than its patches make, or cannot be read.
        """
        law, covered = self._law, np.zeros(len(trajectory.token_ids), np.bool_)
        for span in spans:
            covered[span.first_token : span.end] = True
            whole = span.rows % law.merge_size == span.columns % law.merge_size == 0
            if not whole or span.num_tokens != law.num_tokens(span.rows, span.columns):
                raise ProtocolError(
                    f"image {span.digest[:8]} of {span.rows} x {span.columns} patches has "
                    f"{span.num_tokens} tokens; {law.merge_size}^2 patches are one"
                )
            if any(span.first_token < start < span.end for start in trajectory.branches):
                raise ProtocolError(f"image {span.digest[:8]} has tokens of two branches")
        is_image = trajectory.token_ids == law.image_token
        wrong = covered & ~is_image
        if not (is_image & trajectory.loss_mask).any():  # else the policy chose it: it is text
            wrong |= is_image & ~covered
        if wrong.any():
            at = int(wrong.argmax())
            raise ProtocolError(
                f"token {at} is {trajectory.token_ids[at]}, and {'an' if covered[at] else 'no'} "
                f"image has a span there; tokens of images are {law.image_token}"
            )
        return tuple(
            SeenImage(span, law.merge_size, self._patches(span.digest, span.rows, span.columns))
            for span in spans
        )

    def _read(self, digest: str, rows: int, columns: int) -> NDArray[np.float32] | None:
        if self._contents is None:
            return None
        if not (content := self._contents.get(digest)):
            raise ProtocolError(f"image {digest[:8]} cannot be had")
        try:
            return patches(content, rows, columns, self._law)
        except BadImageError as error:
            raise ProtocolError(f"image {digest[:8]}: {error}") from error

"""Images among token ids. Pure.

A chat template writes one placeholder for an image; a model reads as many as the image has tokens.
While ids of a trajectory are compared and continued, tokens of an image are *marks*: numbers below
0, one number for an image, so that two of one size differ. ``Encoded`` has the ids that a model
reads, and the places of images.
"""

from collections.abc import Sequence
from typing import NamedTuple

from slipstream.wire.messages.images import Image, ImageSpan
from slipstream.wire.models.image_law import ImageLaw


class Encoded(NamedTuple):
    """Token ids as a model reads them."""

    token_ids: list[int]
    images: tuple[ImageSpan, ...] = ()  # in order


class ImageMarks:
    """Marks of the images of one prompt, or of one trajectory."""

    def __init__(self, law: ImageLaw, most_pixels: int = 0) -> None:
        """Begin without an image.

        Args:
            law: Image processor of the policy.
            most_pixels: Limit of an image, which is made smaller; 0 is the law's own.
        """
        self._law = law
        self._most_pixels = most_pixels
        self._grids: list[tuple[str, int, int]] = []  # digest, rows and columns of each mark

    def marked(self, token_ids: Sequence[int], images: Sequence[Image]) -> list[int]:
        """Return ids with marks in place of placeholders; each image has one.

        Raises:
            ValueError: there are more or fewer placeholders than images, or an image has a shape
                that the model does not take.
        """
        places = [at for at, token in enumerate(token_ids) if token == self._law.image_token]
        if len(places) != len(images):
            raise ValueError(
                f"{_count(len(images), 'image')}, and {_count(len(places), 'place')} for images in "
                "its text"
            )
        marked: list[int] = []
        done = 0
        for at, image in zip(places, images, strict=True):
            rows, columns = self._law.patches_of(image.width, image.height, self._most_pixels)
            grid = (image.digest, rows, columns)
            if grid not in self._grids:
                self._grids.append(grid)
            mark = -1 - self._grids.index(grid)
            marked += token_ids[done:at]
            marked += [mark] * self._law.num_tokens(rows, columns)
            done = at + 1
        return [*marked, *token_ids[done:]]

    def encoded(self, marked: Sequence[int]) -> Encoded:
        """Return the ids that a model reads for ids with marks.

        Raises:
            ValueError: an image lacks some of its tokens.
        """
        token_ids, spans = list(marked), list[ImageSpan]()
        at = 0
        while at < len(marked):
            if marked[at] >= 0:
                at += 1
                continue
            digest, rows, columns = self._grids[-1 - marked[at]]
            count = self._law.num_tokens(rows, columns)
            if list(marked[at : at + count]) != [marked[at]] * count:
                raise ValueError(f"image {digest[:8]} lacks some of its {count} tokens")
            spans.append(ImageSpan(digest, at, count, rows, columns))
            token_ids[at : at + count] = [self._law.image_token] * count
            at += count
        return Encoded(token_ids, tuple(spans))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"

"""Images of a microbatch: their patches, their tokens' places, and the positions of all tokens.

Shapes: T tokens of sequences laid end to end; N patches of all images, M tokens of theirs.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

Grid = tuple[int, int]  # rows and columns of the patches of an image


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedImages:
    """Images of a microbatch, each once, however often it is shown."""

    position_ids: Tensor  # [3, T] int64
    source: Tensor  # [T] int64 on the host, row of the images' tokens; -1 for a token of text
    grids: tuple[Grid, ...]  # rows and columns of each image's patches
    merge: int  # patches of a token each way
    pixels: tuple[Tensor, ...]
    """[rows * columns, C] float32 of each, on the host, where microbatches share them; none on
    ranks without a tower."""

    def of_rank(self, source: Tensor) -> "ImagesHere | None":
        """Return what a rank computes: images with a token there, as a whole.

        Args:
            source: rows of the images' tokens, -1 for text, of the rank's tokens.
        """
        if not self.pixels:
            return None
        (places,) = torch.where(source >= 0)
        if not len(places):
            return None
        rows = source[places].numpy()
        counts = [height * width // self.merge**2 for height, width in self.grids]
        starts = np.cumsum([0, *counts])
        numbers = np.searchsorted(starts, rows, side="right") - 1
        needed, inner = np.unique(numbers, return_inverse=True)
        first_here = np.cumsum([0, *(counts[number] for number in needed)])[:-1]
        rows_here = rows - starts[numbers] + first_here[inner]
        where = self.position_ids.device
        return ImagesHere(
            torch.cat([self.pixels[number] for number in needed]).to(where),
            tuple(self.grids[number] for number in needed),
            torch.from_numpy(rows_here).to(where),
            places.to(where),
        )


@dataclass(frozen=True, slots=True)
class ImagesHere:
    """Images with tokens on a rank."""

    pixels: Tensor  # [N, C] float32
    grids: tuple[Grid, ...]
    rows: Tensor  # [M] int64, rows of the tower's output for the tokens here
    places: Tensor  # [M] int64, these tokens among those of the rank


class SeenLayout(Protocol):
    """What a model needs to know of the images of a microbatch."""

    @property
    def images(self) -> ImagesHere | None:
        """Images of this rank's tokens."""

    @property
    def features(self) -> list[Tensor]:
        """What each of the first layers adds to the tokens of images, [M, 1, H]."""

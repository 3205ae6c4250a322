"""Where the patches of several images are: positions, windows, and places that have an embedding.

Shapes: N patches of all images, laid end to end, in squares of m x m patches that become a token; S
such squares.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.learner.model.cuda_attention import AttentionBounds
from slipstream.learner.model.grouped_attention import LengthGroups, group_by_length
from slipstream.learner.model.rotary import Rotation
from slipstream.learner.model.vision.images import Grid
from slipstream.wire.models.vision_config import VisionConfig

_ROTARY_BASE = 10_000.0
_Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Segments:
    """Patches that attend to each other: all of an image, or of one of its windows."""

    bounds: Tensor  # [segments + 1] int32
    longest: int

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> "Segments":
        """Return segments of these numbers of patches, one after the other."""
        bounds = torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32))
        return cls(bounds.to(device), max(lengths))

    @property
    def for_kernels(self) -> AttentionBounds:
        """Bounds of queries and keys."""
        return AttentionBounds(self.bounds, self.bounds, self.longest, self.longest)

    @cached_property
    def groups(self) -> LengthGroups:
        """Segments grouped by length."""
        return group_by_length(self.bounds)


@dataclass(frozen=True, slots=True)
class PatchLayout:
    """The patches of several images, in the order in which blocks see them."""

    rotation: Rotation
    images: Segments
    windows: Segments | None  # None: every block attends to whole images
    order: Tensor | None  # [S] square at each place of the blocks' order; None if nothing moves
    inverse: Tensor | None  # [S] place of each square
    places: Tensor | None  # [N, 4] int64, four places with an embedding around each patch
    shares: Tensor | None  # [N, 4] float32, shares of these

    @classmethod
    def of(cls, config: VisionConfig, grids: Sequence[Grid], device: torch.device) -> "PatchLayout":
        """Return the layout of images with these rows and columns of patches."""
        merge = config.spatial_merge_size
        rows, columns = (
            np.concatenate(axis)
            for axis in zip(*(_positions(grid, merge) for grid in grids), strict=True)
        )
        images = Segments.of([height * width for height, width in grids], device)
        order, windows = None, None
        if config.window:
            order, lengths = _windows(grids, merge, config.window)
            windows = Segments.of([length * merge**2 for length in lengths], device)
        places, shares = (
            _around(grids, rows, columns, config.places) if config.places else (None, None)
        )
        if order is not None:
            rows, columns = (axis.reshape(-1, merge**2)[order].ravel() for axis in (rows, columns))
        return cls(
            _rotation(config, rows, columns, device),
            images,
            windows,
            None if order is None else torch.from_numpy(order).to(device),
            None if order is None else torch.from_numpy(order.argsort()).to(device),
            None if places is None else places.to(device),
            None if shares is None else shares.to(device),
        )


def _positions(grid: Grid, merge: int) -> tuple[_Numbers, _Numbers]:
    """Return the row and the column of each patch of an image, by squares."""
    height, width = grid
    squares = (height // merge, merge, width // merge, merge)
    rows, columns = np.indices(grid)
    by_square = (axis.reshape(squares).transpose(0, 2, 1, 3).ravel() for axis in (rows, columns))
    return next(by_square), next(by_square)


def _windows(grids: Sequence[Grid], merge: int, window: int) -> tuple[_Numbers, list[int]]:
    """Return the squares of all images by windows, and the number of squares in each window."""
    orders: list[_Numbers] = []
    lengths: list[int] = []
    first = 0
    for height, width in grids:
        rows, columns = (axis.ravel() for axis in np.indices((height // merge, width // merge)))
        across = -(-(width // merge) // window)
        number = rows // window * across + columns // window
        orders.append(first + np.argsort(number, kind="stable"))
        lengths += np.bincount(number).tolist()
        first += len(rows)
    return np.concatenate(orders), lengths


def _around(
    grids: Sequence[Grid], rows: _Numbers, columns: _Numbers, side: int
) -> tuple[Tensor, Tensor]:
    """Return the four places around each patch of a square of places, and their shares.

    An image covers the square from edge to edge, whatever its shape.
    """
    counts = [height * width for height, width in grids]
    axes = []
    for at, size in zip((rows, columns), zip(*grids, strict=True), strict=True):
        last = torch.from_numpy(np.repeat(np.maximum(np.array(size) - 1, 1), counts))
        place = torch.from_numpy(at).float() * (side - 1) / last
        low = place.floor()
        share = place - low
        both = torch.stack([low, low + 1], dim=1).long().clamp(max=side - 1)
        axes.append((both, torch.stack([1 - share, share], dim=1)))
    (of_rows, row_shares), (of_columns, column_shares) = axes
    places = (of_rows[:, :, None] * side + of_columns[:, None, :]).flatten(1)
    return places, (row_shares[:, :, None] * column_shares[:, None, :]).flatten(1)


def _rotation(
    config: VisionConfig, rows: _Numbers, columns: _Numbers, device: torch.device
) -> Rotation:
    """Return the rotation of patches: half of a head turns by rows, half by columns."""
    half = config.head // 2
    channels = torch.arange(0, half, 2, dtype=torch.float, device=device)
    frequencies = 1.0 / _ROTARY_BASE ** (channels / half)
    at = torch.from_numpy(np.stack([rows, columns], axis=1)).to(device)
    angles = (at[:, :, None].float() * frequencies).flatten(1)[:, None]
    return Rotation(angles.cos(), angles.sin())

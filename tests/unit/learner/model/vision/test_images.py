"""Which images a rank computes."""

import numpy as np
import torch

from slipstream.learner.model.vision.images import PackedImages


def test_a_rank_computes_the_images_of_its_tokens_as_a_whole():
    """Three images, of 2, 1 and 3 tokens; the rank has a token of the first and two of the last."""
    grids = ((2, 4), (2, 2), (6, 2))
    pixels = tuple(torch.full((rows * columns, 5), float(rows)) for rows, columns in grids)
    source = torch.tensor([-1, 0, 1, 2, -1, 3, 4, 5])
    images = PackedImages(
        position_ids=torch.zeros(3, 8), source=source, grids=grids, merge=2, pixels=pixels
    )
    here = images.of_rank(torch.tensor([1, -1, -1, 3, 5]))
    assert here is not None
    assert here.grids == ((2, 4), (6, 2))
    assert here.pixels[:, 0].tolist() == [2.0] * 8 + [6.0] * 12
    assert here.rows.tolist() == [1, 2, 4]
    assert here.places.tolist() == [0, 3, 4]
    assert images.of_rank(torch.tensor([-1, -1])) is None


def test_pixels_go_to_the_device_of_positions_with_their_microbatch():
    images = PackedImages(
        position_ids=torch.zeros(3, 1, device="meta"),
        source=torch.tensor([0]),
        grids=((2, 2),),
        merge=2,
        pixels=(torch.zeros(4, 5),),
    )
    here = images.of_rank(images.source)
    assert here is not None
    assert here.pixels.is_meta
    assert here.rows.is_meta
    assert here.places.is_meta


def test_a_rank_without_a_tower_computes_none():
    images = PackedImages(
        position_ids=torch.zeros(3, 1),
        source=torch.tensor([0]),
        grids=((2, 2),),
        merge=2,
        pixels=(),
    )
    assert images.of_rank(images.source) is None
    assert np.array_equal(images.source, [0])

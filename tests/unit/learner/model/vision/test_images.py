"""Positions of tokens of images, and which images a rank computes."""

import numpy as np
import torch

from slipstream.learner.model.vision.images import ImagePlace, PackedImages, positions_of


def test_positions_of_a_text_are_those_of_its_tokens():
    assert positions_of(4, []).tolist() == [[0, 1, 2, 3]] * 3


def test_an_image_takes_as_many_positions_as_its_longer_edge():
    """Two tokens, an image of two rows and three columns, a token, one of one, a last token."""
    images = [ImagePlace(2, 2, 3), ImagePlace(9, 1, 1)]
    frames, rows, columns = positions_of(11, images).tolist()
    assert frames == [0, 1, *[2] * 6, 5, 6, 7]
    assert rows == [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7]
    assert columns == [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7]


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

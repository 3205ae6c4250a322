"""Towers of both families; against transformers: tests/integration/test_families.py."""

import pytest
import torch

from slipstream.learner.model.vision.patch_layout import PatchLayout
from slipstream.learner.model.vision.tower import VisionTower
from slipstream.wire.models.families.registry import FAMILIES
from slipstream.wire.models.vision_config import VisionConfig, vision_config
from tests.support.family_models import MODELS

CPU = torch.device("cpu")
GRIDS = ((4, 6), (10, 2), (2, 2), (8, 8))
TOWERS = ["qwen2_5_vl", "qwen3_vl"]


def shape_of(name: str) -> VisionConfig:
    tower = FAMILIES[f"{name}_text"].tower
    assert tower is not None
    found = vision_config(MODELS[name]["vision_config"], tower, 64)
    assert isinstance(found, VisionConfig)
    return found


def made(name: str, *, recomputes: bool = False) -> VisionTower:
    torch.manual_seed(4)
    tower = VisionTower(shape_of(name), torch.float32, recomputes=recomputes)
    with torch.no_grad():
        for parameter in tower.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return tower


def patches(channels: int, *grids: tuple[int, int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(rows * columns, channels, generator=generator) for rows, columns in grids]


@pytest.mark.parametrize("name", TOWERS)
def test_an_image_is_the_same_alone_and_among_others(name: str):
    tower = made(name)
    pixels = patches(tower.shape.channels, *GRIDS)
    with torch.no_grad():
        together = tower(torch.cat(pixels), GRIDS)
        alone = [tower(pixel, [grid]) for pixel, grid in zip(pixels, GRIDS, strict=True)]
    assert len(together) == 1 + len(tower.shape.deepstack_visual_indexes)
    for output, parts in zip(together, zip(*alone, strict=True), strict=True):
        assert output.shape == (sum(rows * columns for rows, columns in GRIDS) // 4, 64)
        assert torch.allclose(output, torch.cat(parts), atol=1e-5)


def test_blocks_computed_again_have_the_same_gradients():
    gradients = []
    for recomputes in (False, True):
        tower = made("qwen3_vl", recomputes=recomputes)
        pixels = patches(tower.shape.channels, *GRIDS)
        sum(output.square().mean() for output in tower(torch.cat(pixels), GRIDS)).backward()
        gradients.append([parameter.grad for parameter in tower.parameters()])
    kept, again = gradients
    assert all(gradient is not None and gradient.any() for gradient in kept)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(kept, again, strict=True))


def test_windows_are_squares_of_tokens_cut_at_the_edges_of_their_image():
    """Windows of two tokens each way, in an image of 3 x 3 tokens and one of 1 x 2."""
    layout = PatchLayout.of(shape_of("qwen2_5_vl"), [(6, 6), (2, 4)], CPU)
    assert layout.order is not None
    assert layout.inverse is not None
    assert layout.windows is not None
    assert layout.order.tolist() == [0, 1, 3, 4, 2, 5, 6, 7, 8, 9, 10]
    assert layout.inverse[layout.order].tolist() == list(range(11))
    assert layout.windows.bounds.tolist() == [0, 16, 24, 32, 36, 44]
    assert layout.windows.longest == 16
    assert layout.images.bounds.tolist() == [0, 36, 44]


def test_places_cover_an_image_from_edge_to_edge():
    """Of 6 x 6 places: rows 0, 5/3, 10/3, 5 of an image of four, columns 0 and 5 of two."""
    layout = PatchLayout.of(shape_of("qwen3_vl"), [(4, 2)], CPU)
    assert layout.places is not None
    assert layout.shares is not None
    assert torch.allclose(layout.shares.sum(1), torch.ones(8))
    places = torch.stack([layout.places // 6, layout.places % 6]).float()
    rows, columns = (places * layout.shares).sum(-1)
    third = 5 / 3
    assert rows.tolist() == pytest.approx([0, 0, third, third, 2 * third, 2 * third, 5, 5])
    assert columns.tolist() == pytest.approx([0, 5] * 4)

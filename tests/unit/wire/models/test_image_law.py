"""Patches and tokens of images are those of transformers' processor."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from slipstream.wire.errors import ConfigError
from slipstream.wire.messages.images import MOST_EDGE, ImageSpan
from slipstream.wire.models.image_law import ImageLaw, image_law, positions_of
from slipstream.wire.models.pixels import (
    BadImageError,
    checked_image,
    image_facts,
    patches,
    thumbnail,
)
from tests.support.drawn_images import drawn

LAW = ImageLaw(image_token=7)
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "patch_size": 16,
    "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
CONFIG = {"model_type": "qwen3_vl", "vision_config": {"depth": 2}, "image_token_id": 99}


@given(st.integers(1, 5000), st.integers(1, 5000), st.sampled_from([0, 100_000, 500_000]))
def test_an_image_has_whole_tokens_within_the_limit(width: int, height: int, most: int):
    if max(width, height) > 200 * min(width, height):
        with pytest.raises(ValueError, match="over 200 times"):
            LAW.patches_of(width, height, most)
        return
    rows, columns = LAW.patches_of(width, height, most)
    assert rows % 2 == columns % 2 == 0 < min(rows, columns)
    assert LAW.num_tokens(rows, columns) == rows * columns // 4
    if min(rows, columns) > 2:
        assert rows * columns * 14 * 14 <= (most or LAW.most_pixels)


@pytest.mark.parametrize("size", [(50, 70), (640, 480), (20, 20), (301, 100)])
def test_patches_are_those_of_transformers(size: tuple[int, int]):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    content = drawn(*size)
    law = ImageLaw(patch_size=16, image_token=7, least_pixels=32 * 32, most_pixels=200_000)
    limits = {"shortest_edge": law.least_pixels, "longest_edge": law.most_pixels}
    processor = Qwen2VLImageProcessorPil(patch_size=16, size=limits)
    expected = processor(images=[Image.open(io.BytesIO(content))], return_tensors="np")
    rows, columns = law.patches_of(*size)
    assert expected["image_grid_thw"].tolist() == [[1, rows, columns]]
    assert smart_resize(size[1], size[0], 32, law.least_pixels, law.most_pixels) == (
        rows * 16,
        columns * 16,
    )
    found = patches(content, rows, columns, law)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected["pixel_values"], atol=5e-7)


def test_images_are_turned_as_their_file_says_and_lose_their_transparency():
    with Image.open(io.BytesIO(drawn(30, 10))) as upright:
        turned = io.BytesIO()
        exif = Image.Exif()
        exif[0x0112] = 6  # a quarter turn
        upright.save(turned, "JPEG", exif=exif)
    image = checked_image(turned.getvalue())
    assert (image.width, image.height) == (10, 30)
    law = ImageLaw(image_token=7, least_pixels=1)
    assert patches(drawn(28, 28, mode="RGBA"), 2, 2, law).shape == (4, law.channels)


@pytest.mark.parametrize("content", [b"", b"GIF89a", drawn()[:60], b"%PDF-1.4"])
def test_damaged_images_are_refused(content: bytes):
    with pytest.raises(BadImageError, match="not an image that can be read"):
        checked_image(content)


@pytest.mark.parametrize("size", [(MOST_EDGE + 1, 1), (1, MOST_EDGE + 1)])
def test_an_edge_that_no_message_holds_is_refused(size: tuple[int, int]):
    file = io.BytesIO()
    Image.new("1", size).save(file, "PNG")
    with pytest.raises(BadImageError, match=r"pixels, an edge may have 1,048,576"):
        image_facts(file.getvalue())


def written(folder: Path, name: str, content: object) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / name).write_text(json.dumps(content))
    return folder


def test_the_law_is_read_from_the_files_of_both_ages(tmp_path: Path):
    expected = ImageLaw(
        patch_size=16,
        least_pixels=65_536,
        most_pixels=16_777_216,
        mean=(0.5, 0.5, 0.5),
        deviation=(0.5, 0.5, 0.5),
        image_token=99,
    )
    older = {**PROCESSOR, "size": None, "min_pixels": 65_536, "max_pixels": 16_777_216}
    for number, (name, content) in enumerate(
        [
            ("preprocessor_config.json", PROCESSOR),
            ("preprocessor_config.json", older),
            ("processor_config.json", {"image_processor": PROCESSOR}),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert image_law(written(folder, name, content)) == expected


def test_a_model_without_images_has_no_law_and_another_processor_is_refused(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    assert image_law(tmp_path) is None
    for key, value in {"image_processor_type": "SiglipImageProcessor", "resample": 2}.items():
        written(tmp_path, "preprocessor_config.json", {**PROCESSOR, key: value})
        with pytest.raises(ConfigError, match=rf"{value}.* not supported \(run\.model\)"):
            image_law(tmp_path)
    written(tmp_path, "preprocessor_config.json", {**PROCESSOR, "patch_size": "x"})
    with pytest.raises(ConfigError, match="its image processor: Expected `int`"):
        image_law(tmp_path)


@pytest.mark.parametrize("turn", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "WEBP"])
def test_every_turn_of_a_camera_is_that_of_pillow_and_known_from_the_head(turn: int, kind: str):
    exif = Image.Exif()
    exif[0x0112] = turn
    with Image.open(io.BytesIO(drawn(32, 16))) as upright:
        turned = io.BytesIO()
        upright.save(turned, kind, exif=exif)
    content = turned.getvalue()
    with Image.open(io.BytesIO(content)) as opened:
        expected = ImageOps.exif_transpose(opened).convert("RGB")
    assert np.array_equal(thumbnail(content, 32), np.asarray(expected))
    assert image_facts(content) == checked_image(content)
    assert (image_facts(content).width, image_facts(content).height) == expected.size


def test_damage_beyond_the_head_is_found_with_the_pixels():
    content = drawn(seed=3)[:-300]
    assert image_facts(content).width == 40
    with pytest.raises(BadImageError, match="truncated"):
        checked_image(content)


def test_tokens_of_an_image_have_one_frame_and_text_continues_after_its_longer_edge():
    spans = [ImageSpan("a" * 64, 2, 6, 4, 6), ImageSpan("b" * 64, 9, 2, 4, 2)]
    frames, rows, columns = positions_of(12, spans, merge_size=2).tolist()
    assert frames == [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 6, 8]
    assert rows == [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7, 8]
    assert columns == [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 6, 8]
    assert positions_of(3, [], merge_size=2).tolist() == [[0, 1, 2]] * 3

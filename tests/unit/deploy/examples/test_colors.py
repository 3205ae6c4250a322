"""The vision quickstart's files: what they show is what they ask."""

import base64
import io
import json
from pathlib import Path

from PIL import Image

from slipstream.deploy.examples.colors import COLORS, prepare
from slipstream.generators.text.codec import TextCodec
from slipstream.wire.models.image_law import image_law
from slipstream.wire.settings.sections import SamplingSection


def rows_of(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_image_has_the_color_that_is_right_and_rows_are_held_out_or_trained(tmp_path: Path):
    prepare(tmp_path)
    held_out, train = (rows_of(tmp_path / f"{name}.jsonl") for name in ("held_out", "train"))
    assert (len(held_out), len(train)) == (256, 2048)
    assert {row["ground_truth"] for row in held_out} == set(COLORS)
    assert not {row["images"][0] for row in held_out} & {row["images"][0] for row in train}
    for row in held_out[:64]:
        content = base64.b64decode(row["images"][0].partition(",")[2])
        with Image.open(io.BytesIO(content)) as image:
            colors = {color for _, color in image.getcolors() if max(color) - min(color) > 20}
        (color,) = colors
        distances = {
            name: sum(abs(a - b) for a, b in zip(color, known, strict=True))
            for name, known in COLORS.items()
        }
        assert min(distances, key=distances.__getitem__) == row["ground_truth"]


def test_the_policy_is_made_once_and_its_answers_are_tokens(tmp_path: Path):
    prepare(tmp_path)
    folder = tmp_path / "model"
    weights = (folder / "model.safetensors").stat()
    assert weights.st_size < 4 << 20
    law = image_law(folder)
    assert law is not None
    assert law.num_tokens(*law.patches_of(64, 64)) == 4
    codec = TextCodec(folder, SamplingSection())
    assert [len(codec.text_ids(name)) for name in COLORS] == [1] * len(COLORS)
    prepare(tmp_path)
    assert (folder / "model.safetensors").stat().st_mtime_ns == weights.st_mtime_ns

import asyncio
import os
import types
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from slipstream.generators.sglang.images import FileImages, ImageEntry, load_whole_towers
from slipstream.wire.messages.images import ImageSpan, digest_of
from slipstream.wire.models.image_law import ImageLaw
from tests.support.drawn_images import drawn

LAW = ImageLaw(image_token=5)
EMPTY = types.ModuleType("schedule_batch")


def entry(folder: Path, content: bytes, first_token: int = 0) -> ImageEntry:
    asked = ImageEntry(
        ImageSpan(digest_of(content), first_token, 6, 4, 6), str(folder / digest_of(content))
    )
    fill(asked, content)
    return asked


def fill(asked: ImageEntry, content: bytes) -> None:
    Path(asked.file).write_bytes(content)


async def test_an_image_is_read_beside_the_loop_and_once_for_all_that_ask_meanwhile(tmp_path: Path):
    images = FileImages(EMPTY, LAW, None)
    content = drawn(84, 56)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)  # its reader waits
    spans = [ImageSpan(digest_of(content), first, 6, 4, 6) for first in (3, 9)]
    asked = [asyncio.create_task(images.patches_of(ImageEntry(span, str(pipe)))) for span in spans]
    await asyncio.sleep(0)  # the loop has time for others
    await asyncio.to_thread(pipe.write_bytes, content)
    first, second = await asyncio.gather(*asked)
    assert first is second
    assert first.shape == (24, LAW.channels)


async def test_images_that_nobody_asks_for_make_room(tmp_path: Path):
    size = 24 * LAW.channels * 4
    images = FileImages(EMPTY, LAW, None, most_bytes=2 * size)
    entries = [entry(tmp_path, drawn(84, 56, seed=seed)) for seed in range(3)]
    kept = [await images.patches_of(each) for each in entries]
    assert await images.patches_of(entries[2]) is kept[2]
    assert await images.patches_of(entries[1]) is kept[1]
    assert await images.patches_of(entries[0]) is not kept[0]  # and the third one goes
    assert await images.patches_of(entries[1]) is kept[1]


async def test_what_could_not_be_read_is_read_again(tmp_path: Path):
    images = FileImages(EMPTY, LAW, None)
    content = drawn(84, 56)
    asked = entry(tmp_path, content)
    fill(asked, content[:50])
    with pytest.raises(ValueError, match=f"is not image {digest_of(content)[:8]}"):
        await images.patches_of(asked)
    fill(asked, content)
    assert len(await images.patches_of(asked)) == 24
    damaged = entry(tmp_path, b"no image at all")
    with pytest.raises(ValueError, match="not an image that can be read"):
        await images.patches_of(damaged)


class Seeing:
    """A model of SGLang's, as far as its loads go."""

    def __init__(self) -> None:
        self.visual = torch.nn.ModuleDict({"merger": torch.nn.Linear(2, 2)})
        self.loaded: list[str] = []

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.loaded += [name for name, _ in weights]


def test_a_tower_is_loaded_whole_or_not_at_all():
    kind = type("Qwen3VLForConditionalGeneration", (Seeing,), dict(vars(Seeing)))
    module = types.ModuleType("qwen3_vl")
    vars(module).update({kind.__name__: kind, "Other": Seeing})
    load_whole_towers(module)
    empty = torch.empty(0)
    whole = {"model.visual.merger.weight": empty, "model.visual.merger.bias": empty}
    text = {"model.language_model.layers.0.mlp.up_proj.weight": empty, "lm_head.weight": empty}
    model = kind()
    for part, missing in (({}, 2), (dict(list(whole.items())[:1]), 1)):
        with pytest.raises(ValueError, match=f"{missing} tensors of the vision tower are missing"):
            model.load_weights((text | part).items())
    model.loaded.clear()
    model.load_weights((text | whole).items())
    assert model.loaded == [
        "model.layers.0.mlp.up_proj.weight",
        "lm_head.weight",
        "visual.merger.weight",
        "visual.merger.bias",
    ]
    model.load_weights(text.items())  # a version without it
    model.load_weights(list(whole.items())[:1])  # a bucket

"""Images of payloads: what is refused, with its reason."""

import dataclasses
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image as Pillow

from slipstream.learner.batches.images import ImageReader, law_of, seen_images
from slipstream.learner.batches.packing import TrainTrajectory, pack
from slipstream.wire.errors import ConfigError, ProtocolError
from slipstream.wire.messages.images import ImageSpan
from slipstream.wire.models.hf_config import load_hf_config
from slipstream.wire.models.image_law import ImageLaw
from tests.support.shelf import SHELF

LAW = ImageLaw(patch_size=4, image_token=9)
SEEN, OTHER = "a" * 64, "b" * 64
SPAN = ImageSpan(SEEN, 1, 2, 2, 4)


def png(value: int) -> bytes:
    file = io.BytesIO()
    Pillow.new("RGB", (20, 10), (value, 0, 0)).save(file, "PNG")
    return file.getvalue()


FILES = {SEEN: png(3), OTHER: png(200)}


def trajectory(*ids: int, num_prompt: int = 4) -> TrainTrajectory:
    return TrainTrajectory(
        token_ids=np.array(ids, np.int32),
        loss_mask=np.arange(len(ids)) >= num_prompt,
        behavior_logprobs=np.zeros(len(ids), np.float32),
        temperature=1.0,
    )


SHOWN = trajectory(1, 9, 9, 2, 5, 6)


def test_an_image_is_read_once_for_all_that_show_it():
    reader = ImageReader(LAW, FILES)
    (one,), (other,) = (reader.of((SPAN,), SHOWN) for _ in range(2))
    assert one.pixels is other.pixels
    assert one.pixels is not None
    assert one.pixels.shape == (8, LAW.channels)
    assert (one.span, one.merge) == (SPAN, 2)
    (without,) = ImageReader(LAW, None).of((SPAN,), SHOWN)
    assert without.pixels is None


def test_a_token_of_images_that_the_policy_chose_is_text_wherever_it_is_shown_again():
    chosen = trajectory(1, 9, 9, 2, 9, 1, 9, 9, 2, 9, 5, num_prompt=4)
    chosen.loss_mask[5:10] = False  # a further branch begins with what was said
    spans = (SPAN, ImageSpan(SEEN, 6, 2, 2, 4))
    reader = ImageReader(LAW, FILES)
    assert len(reader.of(spans, dataclasses.replace(chosen, branches=(5,)))) == 2


@pytest.mark.parametrize(
    ("spans", "shown", "message"),
    [
        ((ImageSpan(SEEN, 1, 2, 2, 6),), SHOWN, "of 2 x 6 patches has 2 tokens"),
        ((ImageSpan(SEEN, 1, 2, 8, 1),), SHOWN, "of 8 x 1 patches has 2 tokens"),
        ((ImageSpan(SEEN, 0, 2, 2, 4),), SHOWN, "token 0 is 1, and an image has a span there"),
        ((), SHOWN, "token 1 is 9, and no image has a span there"),
        ((ImageSpan(SEEN, 1, 1, 2, 2),), SHOWN, "token 2 is 9, and no image has a span"),
        ((ImageSpan("c" * 64, 1, 2, 2, 4),), SHOWN, "image cccccccc cannot be had"),
        ((ImageSpan("d" * 64, 1, 2, 2, 4),), SHOWN, "image dddddddd: not an image"),
        ((SPAN,), dataclasses.replace(SHOWN, branches=(2,)), "has tokens of two branches"),
    ],
)
def test_what_cannot_be_trained_has_a_reason(
    spans: tuple[ImageSpan, ...], shown: TrainTrajectory, message: str
):
    reader = ImageReader(LAW, {**FILES, "d" * 64: b"GIF89a"})
    with pytest.raises(ProtocolError, match=re.escape(message)):
        reader.of(spans, shown)


def test_a_policy_that_sees_none_refuses_images():
    assert seen_images(None, (), SHOWN) == ()
    with pytest.raises(ProtocolError, match="the policy sees none"):
        seen_images(None, (SPAN,), SHOWN)


def packed(*digests: str) -> tuple[list[int], torch.Tensor]:
    """Return where computed tokens are of trajectories that show these images, and the images."""
    reader = ImageReader(LAW, FILES)
    shown = [
        dataclasses.replace(SHOWN, images=reader.of((ImageSpan(digest, 1, 2, 2, 4),), SHOWN))
        for digest in digests
    ]
    batch = pack(shown, torch.device("cpu"), shares_prompts=True)
    assert batch.images is not None
    assert batch.images.position_ids[2].tolist() == [0, 1, 2, 3, 4, 5] * len(digests)
    computed = range(6 * len(digests)) if batch.shared is None else batch.shared.computed.tolist()
    return list(computed), batch.images.source


def test_prompts_with_equal_tokens_are_shared_only_if_their_images_are_equal():
    computed, source = packed(SEEN, SEEN)
    assert computed == [*range(6), 10, 11]
    assert source.tolist() == [-1, 0, 1, -1, -1, -1] * 2
    computed, source = packed(SEEN, OTHER)
    assert computed == list(range(12))
    assert source.tolist() == [-1, 0, 1, -1, -1, -1, -1, 2, 3, -1, -1, -1]


def test_a_processor_of_other_patches_than_the_tower_is_refused(tmp_path: Path):
    config = SHELF["Qwen/Qwen3-VL-4B-Instruct"].config
    (tmp_path / "config.json").write_text(json.dumps(config))
    hf = load_hf_config(tmp_path)
    assert law_of(hf, tmp_path) is None, "there is no processor"
    processor = {"image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 16}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    law = law_of(hf, tmp_path)
    assert law is not None
    assert law.channels == 1536
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor | {"patch_size": 14}))
    with pytest.raises(ConfigError, match=r"has patches of 14 pixels .* config.json has 16, 2, 2"):
        law_of(hf, tmp_path)

"""Tokens of conversations with images against transformers' own processors, id by id."""

import json
import random
from pathlib import Path

import pytest

from slipstream.generators.text.codec import TextCodec
from slipstream.wire.messages.trajectory import ChatMessage, ContentPart, Prompt
from slipstream.wire.models.pixels import checked_image
from slipstream.wire.settings.sections import SamplingSection
from tests.support.drawn_images import drawn
from tests.support.ranks.run import outputs, start
from tests.support.vision_models import IMAGE_TOKEN, VISION_MODELS, write_tokens

pytestmark = pytest.mark.integration
_SIZES = [(200, 150), (30, 30), (7, 300), (640, 480), (1000, 20), (97, 61)]


def conversations(folder: Path) -> tuple[list[Prompt], list[object]]:
    """Return random conversations, and the same with their files for transformers."""
    chance = random.Random(5)
    prompts: list[Prompt] = []
    asked: list[object] = []
    for number in range(24):
        turns: list[ChatMessage] = []
        plain: list[object] = []
        files: list[str] = []
        for turn in range(chance.randint(1, 4)):
            parts: list[ContentPart] = []
            for _ in range(chance.randint(1, 4)):
                if chance.random() < 0.5:
                    text = "".join(chance.choices("see it? \n", k=chance.randint(1, 9)))
                    parts.append(ContentPart(text=text))
                    continue
                content = drawn(*chance.choice(_SIZES), seed=number)
                image = checked_image(content)
                (folder / image.digest).write_bytes(content)
                files.append(str(folder / image.digest))
                parts.append(ContentPart(image=image))
            role = "user" if turn % 2 == 0 else "assistant"
            turns.append(ChatMessage(role, tuple(parts)))
            forms = [
                {"type": "image"} if part.image else {"type": "text", "text": part.text}
                for part in parts
            ]
            plain.append({"role": role, "content": forms})
        prompts.append(Prompt(prompt=tuple(turns)))
        asked.append((plain, files))
    return prompts, asked


def test_tokens_are_those_of_the_models_own_processor(tmp_path: Path):
    prompts, asked = conversations(tmp_path)
    folders = {name: tmp_path / name for name in VISION_MODELS}
    for name, folder in folders.items():
        write_tokens(folder, name)
        (folder / "config.json").write_text(json.dumps(VISION_MODELS[name]))
    order = {"folders": [str(folder) for folder in folders.values()], "conversations": asked}
    (tmp_path / "order.json").write_text(json.dumps(order))
    process = start(tmp_path, "integration.transformers_processors", tmp_path / "order.json")
    (printed,) = outputs([process])
    expected = json.loads(printed)
    sampling = SamplingSection(max_prompt_tokens=5000)
    for folder in folders.values():
        codec = TextCodec(folder, sampling)
        for prompt, ids in zip(prompts, expected[str(folder)], strict=True):
            found = codec.encode(prompt)
            assert found.token_ids == ids
            assert [span.digest for span in found.images] == [
                image.digest for image in prompt.images
            ]
            covered = [at for span in found.images for at in range(span.first_token, span.end)]
            assert covered == [at for at, token in enumerate(ids) if token == IMAGE_TOKEN]

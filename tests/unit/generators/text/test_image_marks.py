"""Images in prompts: their tokens, what is refused, and how a limit of pixels changes them."""

import json
from pathlib import Path

import pytest

from slipstream.generators.text.codec import BadPromptError, OverlongPromptError, TextCodec
from slipstream.generators.text.images import ImageMarks
from slipstream.wire.errors import ConfigError
from slipstream.wire.messages.images import Image, ImageSpan
from slipstream.wire.messages.trajectory import ChatMessage, ContentPart, Prompt
from slipstream.wire.models.image_law import ImageLaw
from slipstream.wire.settings.sections import SamplingSection
from tests.support.blank_model import write_blank_model
from tests.support.vision_models import IMAGE_TOKEN, TEMPLATE, VISION_MODELS, write_tokens

LAW = ImageLaw(image_token=5, least_pixels=28 * 28)
WIDE, TALL, SAME = (
    Image(letter * 64, width, height, 100)
    for letter, width, height in (("a", 84, 56), ("b", 28, 84), ("c", 84, 56))
)
PHOTO = Image("d" * 64, 3264, 2448, 5_000_000)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tokens(folder, "qwen2_5_vl")
    (folder / "config.json").write_text(json.dumps(VISION_MODELS["qwen2_5_vl"]))
    return folder


def seen(*parts: Image | str, **fields: int) -> Prompt:
    content = tuple(
        ContentPart(text=part) if isinstance(part, str) else ContentPart(image=part)
        for part in parts
    )
    return Prompt(prompt=(ChatMessage("user", content),), **fields)


def test_images_of_one_size_differ_until_a_model_reads_them():
    marks = ImageMarks(LAW)
    first, second, other = (marks.marked([7, 5, 8], [image]) for image in (WIDE, SAME, TALL))
    assert first == [7, *[-1] * 6, 8]
    assert second == [7, *[-2] * 6, 8]
    assert other == [7, *[-3] * 3, 8]
    assert marks.marked([5], [WIDE]) == [-1] * 6  # again the same
    whole = marks.encoded([*first, 5, *second])  # a policy chose 5, which is no image
    assert whole.token_ids == [7, *[5] * 6, 8, 5, 7, *[5] * 6, 8]
    assert whole.images == (ImageSpan("a" * 64, 1, 6, 4, 6), ImageSpan("c" * 64, 10, 6, 4, 6))
    twice = marks.encoded(marks.marked([5, 5], [WIDE, WIDE]))
    assert [span.first_token for span in twice.images] == [0, 6]
    with pytest.raises(ValueError, match="image aaaaaaaa lacks some of its 6 tokens"):
        marks.encoded(first[:4])


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (("a <|image_pad|> here", WIDE), "row 7 .*: 1 image, and 2 places for images in its text"),
        (("a <|image_pad|> here",), "0 images, and 1 place for images"),
        ((Image("e" * 64, 2100, 10, 9),), "2100 x 10: one edge is over 200 times the other"),
    ],
)
def test_what_cannot_be_placed_is_a_bad_prompt(
    model: Path, parts: tuple[Image | str, ...], message: str
):
    with pytest.raises(BadPromptError, match=message):
        TextCodec(model, SamplingSection()).encode(seen(*parts, row=7))


def test_a_template_that_drops_an_image_is_noticed(model: Path, tmp_path: Path):
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.content[0].text }}{% endfor %}")
    codec = TextCodec(model, SamplingSection(chat_template=str(template)))
    with pytest.raises(BadPromptError, match="1 image, and 0 places for images"):
        codec.encode(seen("see", WIDE))


def test_a_limit_of_pixels_makes_images_smaller(model: Path):
    small = SamplingSection(max_prompt_tokens=99, max_image_pixels=28 * 28 * 40)
    prompt = seen(PHOTO, "?")
    (span,) = TextCodec(model, small).encode(prompt).images
    assert (span.rows, span.columns, span.num_tokens) == (10, 14, 35)
    (whole,) = TextCodec(model, SamplingSection()).whole(prompt).images
    assert whole.num_tokens == 54  # the folder's own limit is 256 patches


@pytest.mark.parametrize("way", ["error", "drop", "truncate"])
def test_an_image_is_never_cut(model: Path, way: str):
    codec = TextCodec(model, SamplingSection(max_prompt_tokens=20, overlong_prompts=way))  # type: ignore[arg-type]
    refusal = {
        "error": (ConfigError, "sampling.overlong_prompts = drop or truncate continues"),
        "drop": (OverlongPromptError, "has 76 tokens, sampling.max_prompt_tokens is 20"),
        "truncate": (OverlongPromptError, "20, and prompts with images are not truncated"),
    }
    error, message = refusal[way]
    with pytest.raises(error, match=message):
        codec.encode(seen(PHOTO, "?"))


def test_a_model_that_sees_nothing_refuses_images_by_name(tmp_path: Path):
    write_blank_model(tmp_path / "model", hidden=16, layers=1)
    (tmp_path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    codec = TextCodec(tmp_path / "model", SamplingSection())
    with pytest.raises(ConfigError, match=r"has images, which the model does not see \(run.model"):
        codec.encode(seen(WIDE))
    assert codec.encode(seen("see")).images == ()
    assert IMAGE_TOKEN not in codec.tokens(seen("see"))

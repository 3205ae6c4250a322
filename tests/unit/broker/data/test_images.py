"""Images of rows, in the forms of verl, TRL, the hub and OpenAI."""

import base64
import json
import os
import zlib
from pathlib import Path
from typing import Any

import pytest

from slipstream.broker.config import DataSection
from slipstream.broker.data.sources import load_training_prompts
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.image_folder import ImageFolder
from slipstream.wire.messages.images import MOST_EDGE, MOST_IMAGE_BYTES, digest_of
from slipstream.wire.messages.trajectory import ContentPart, Prompt
from slipstream.wire.models.pixels import checked_image
from slipstream.wire.settings.load import section
from tests.support.drawn_images import drawn

RED, BLUE = drawn(seed=1), drawn(20, 50, seed=2, kind="JPEG")
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
ASKED = "What is it?"


def data(**settings: object) -> DataSection:
    return section({"data": {"shuffle": False, **settings}}, "data", DataSection)


def base64_of(content: bytes) -> str:
    return base64.b64encode(content).decode()


def loaded(
    folder: Path, row: dict[str, Any], images: ImageFolder | None = None, **settings: object
):
    (folder / "red.png").write_bytes(RED)
    (folder / "blue.jpg").write_bytes(BLUE)
    file = folder / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    return load_training_prompts(data(file=str(file), **settings), seed=0, images=images).at(0)


def seen(prompt: Prompt) -> list[list[str]]:
    """The texts and digests of each turn."""
    assert not isinstance(prompt.prompt, str)
    return [
        [turn.content]
        if isinstance(turn.content, str)
        else [part.text or part.image.digest for part in turn.content if part.text or part.image]
        for turn in prompt.prompt
    ]


R, B = digest_of(RED), digest_of(BLUE)


@pytest.mark.parametrize(
    ("row", "turns"),
    [
        (  # verl
            {
                "prompt": [{"role": "user", "content": f"<image>{ASKED}<image>"}],
                "images": [{"path": "red.png", "bytes": None}, {"path": "blue.jpg"}],
            },
            [[R, ASKED, B]],
        ),
        (  # TRL: parts whose images are in a column
            {
                "prompt": [
                    {"role": "system", "content": [{"type": "text", "text": "Look."}]},
                    {
                        "role": "user",
                        "content": [
                            {"type": "image", "text": None},
                            {"type": "text", "text": ASKED},
                        ],
                    },
                ],
                "image": "red.png",
            },
            [["Look."], [R, ASKED]],
        ),
        (  # TRL: text alone, images before it
            {
                "prompt": [
                    {"role": "system", "content": "Look."},
                    {"role": "user", "content": ASKED},
                ],
                "images": ["red.png", "blue.jpg"],
            },
            [["Look."], [R, B, ASKED]],
        ),
        (  # OpenAI
            {
                "prompt": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "text", "text": ASKED},
                            {
                                "type": "image_url",
                                "image_url": {"url": f"data:image/png;base64,{base64_of(RED)}"},
                            },
                        ],
                    }
                ]
            },
            [[ASKED, R]],
        ),
        (  # the hub: inline, as base64 or a path
            {
                "prompt": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "image", "image": base64_of(BLUE)},
                            {"type": "image", "path": "red.png"},
                            {"type": "image", "base64": base64_of(RED)},
                        ],
                    }
                ]
            },
            [[B, R, R]],
        ),
        (  # without images <image> is text
            {"prompt": [{"role": "user", "content": "What is <image> in HTML?"}]},
            [["What is <image> in HTML?"]],
        ),
    ],
    ids=["verl", "TRL's parts", "TRL's text", "OpenAI", "hub", "no images"],
)
def test_images_are_read_from_every_form_and_kept_once(
    row: dict[str, Any], turns: list[list[str]], tmp_path: Path
):
    images = ImageFolder(tmp_path / "images")
    prompt = loaded(tmp_path, row, images)
    assert seen(prompt) == turns
    assert [image.digest for image in prompt.images] == [
        part for turn in turns for part in turn if len(part) == 64
    ]
    for image in prompt.images:
        assert image == checked_image(images.read(image.digest))
    kept = {file.name for file in (tmp_path / "images").glob("*/*")}
    assert kept == {image.digest for image in prompt.images}


@pytest.mark.parametrize("kind", FORMATS)
def test_base64_is_known_by_the_beginning_of_each_format(kind: str, tmp_path: Path):
    content = drawn(seed=3, kind=kind)
    row = {"prompt": [{"role": "user", "content": ASKED}], "images": [base64_of(content)]}
    assert seen(loaded(tmp_path, row)) == [[digest_of(content), ASKED]]


def test_parquet_holds_bytes_and_fills_in_what_other_parts_have(tmp_path: Path):
    import pyarrow as arrow
    from pyarrow import parquet

    parts = [
        {"type": "image", "text": None, "image": {"bytes": RED, "path": "gone.png"}},
        {"type": "text", "text": ASKED, "image": None},
    ]
    rows = [
        {"prompt": [{"role": "user", "content": parts}], "images": None},
        {"prompt": [{"role": "user", "content": parts[1:]}], "images": [{"bytes": BLUE}]},
    ]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    source = load_training_prompts(data(file=str(tmp_path / "rows.parquet")), seed=0)
    assert [seen(source.at(i)) for i in range(2)] == [[[R, ASKED]], [[B, ASKED]]]


def test_a_text_is_asked_about_images_as_a_turn(tmp_path: Path):
    row = {"prompt": f"<image>{ASKED}", "images": ["red.png"]}
    assert seen(loaded(tmp_path, row, as_chat=True)) == [[R, ASKED]]
    with pytest.raises(ConfigError, match=r"set data\.as_chat = true, .* data\.image_column"):
        loaded(tmp_path, row)
    assert loaded(tmp_path, row, image_column="").prompt == f"<image>{ASKED}"
    other = {"prompt": ASKED, "photos": ["red.png"], "images": ["no.png"]}
    assert seen(loaded(tmp_path, other, as_chat=True, image_column="photos")) == [[R, ASKED]]


@pytest.mark.parametrize(
    ("images", "content", "why"),
    [
        (["red.png"], "<image> or <image>?", "2 places for images, and 1 images in images"),
        (["red.png"] * 2, "<image>?", "1 places for images, and 2 images in images"),
        ([], [{"type": "image"}], "1 places for images, and 0 images in images"),
        (["none.png"], ASKED, "cannot read image none.png: No such file"),
        (["https://x.org/a.png"], ASKED, r"https://x\.org/a\.png: nothing is fetched"),
        ([base64_of(RED[:8] + bytes(60))], ASKED, "not an image that can be read"),
        (["rows.jsonl"], ASKED, r"not an image that can be read: no PNG, JPEG, WEBP, GIF or BMP"),
        (["data:image/png;base64,?"], ASKED, "no base64|not an image"),
        ([{"path": None, "bytes": None}], ASKED, "an image has none of bytes"),
        ([7], ASKED, "an image is int, expected bytes, a path or base64"),
        (["red.png"] * 17, ASKED, r"17 images, a prompt may have 16 \(data\.max_images\)"),
        (["/dev/zero"], ASKED, "image /dev/zero is not a file"),
        (["large.png"], ASKED, f"{MOST_IMAGE_BYTES + 1:,} bytes, at most {MOST_IMAGE_BYTES:,}"),
        (["wide.png"], ASKED, "9000 x 9000 pixels, at most 67,108,864"),
        (["pipe"], ASKED, "image pipe is not a file"),
        ([base64_of(drawn(MOST_EDGE + 1, 1))], ASKED, "1048577 x 1 pixels, an edge may have"),
        ([], [{"type": "video", "video": "x.mp4"}], "a part of type 'video', not text or image"),
    ],
)
def test_what_is_no_image_is_a_bad_row_with_the_reason(
    images: list[Any], content: object, why: str, tmp_path: Path
):
    with (tmp_path / "large.png").open("wb") as large:
        large.truncate(MOST_IMAGE_BYTES + 1)
    os.mkfifo(tmp_path / "pipe")
    header = bytearray(RED[:33])
    header[16:24] = (9000).to_bytes(4, "big") * 2
    header[29:] = zlib.crc32(header[12:29]).to_bytes(4, "big")
    (tmp_path / "wide.png").write_bytes(bytes(header) + RED[33:])
    row = {"prompt": [{"role": "user", "content": content}], "images": images}
    with pytest.raises(ConfigError, match=rf"rows\.jsonl: .*({why}).*\(data\.on_bad_row\)"):
        loaded(tmp_path, row)


def test_more_images_than_the_default_need_a_setting(tmp_path: Path):
    row = {"prompt": [{"role": "user", "content": ASKED}], "images": ["red.png"] * 17}
    assert len(loaded(tmp_path, row, max_images=17).images) == 17


def test_images_past_the_budget_of_the_run_are_bad_rows(tmp_path: Path):
    row = {"prompt": [{"role": "user", "content": ASKED}], "images": ["red.png", "blue.jpg"]}
    images = ImageFolder(tmp_path / "images", most_bytes=len(RED) + len(BLUE) - 1)
    with pytest.raises(ConfigError, match=r"may take .* \(broker\.image_budget_bytes\)"):
        loaded(tmp_path, row, images)


def test_a_part_is_text_or_an_image():
    for part in ({}, {"text": "x", "image": checked_image(RED)}):
        with pytest.raises(ValueError, match="text or an image"):
            ContentPart(**part)

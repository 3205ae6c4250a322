"""Images in the three wires: what the policy sees of them, and what is refused."""

import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from slipstream.generators.text.images import ImageMarks
from slipstream.generators.turns.images import MOST_IMAGES, TrajectoryImages
from slipstream.wire.errors import ImageError
from slipstream.wire.messages.images import MOST_IMAGE_BYTES, Image, digest_of
from slipstream.wire.models.image_law import ImageLaw
from tests.support.drawn_images import drawn
from tests.unit.generators.capture.test_capture import Served, ask, served
from tests.unit.generators.capture.test_messages import post

PLACE = "\u0378"
LAW = ImageLaw(image_token=ord(PLACE), least_pixels=28 * 28)
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>\n{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m.content %}{{ part.text or '" + PLACE + "' }}{% endfor %}"
    "{% endif %}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
RED, BLUE = drawn(84, 56, seed=1), drawn(84, 56, seed=2)  # six tokens each


@asynccontextmanager
async def seeing(
    *says: str, sees: bool = True, known: tuple[Image, ...] = (), room: int = 99
) -> AsyncIterator[tuple[Served, list[bytes]]]:
    """Yield an endpoint, and the images that were stored."""
    stored: list[bytes] = []

    async def store(content: bytes) -> None:
        if len(stored) == room:
            raise ImageError("the run has no room for image 1")
        stored.append(content)

    images = TrajectoryImages(ImageMarks(LAW) if sees else None, known, store)
    async with served(*says, template=TEMPLATE, images=images) as it:
        yield it, stored


def url(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def user(*parts: bytes | str) -> dict[str, Any]:
    return {
        "role": "user",
        "content": [
            {"type": "text", "text": part}
            if isinstance(part, str)
            else {"type": "image_url", "image_url": {"url": url(part)}}
            for part in parts
        ],
    }


def digests(it: Served) -> list[str]:
    tokens = it.calls.images.encoded(it.calls.conversation.token_ids)
    return [span.digest for span in tokens.images]


async def test_images_of_a_conversation_keep_their_tokens_and_are_stored_once():
    async with seeing("red", "blue") as (it, stored):
        first = await ask(it, [user("see ", RED, "?")])
        text = "<|user|>\nsee ?E\n<|assistant|>\n"  # E ends the turn
        assert first.usage.prompt_tokens == len(text) + 6
        history = [user("see ", RED, "?"), first.choices[0].message, user(BLUE, RED, "!")]
        await ask(it, history)
        assert stored == [RED, BLUE]
        assert it.calls.conversation.branches == ()
        assert digests(it) == [digest_of(content) for content in (RED, BLUE, RED)]
        assert it.tokens.count("[1]") == 12
        assert it.tokens.count("[2]") == 6
        assert all(len(str(message)) < 500 for message in it.calls.newest_history)  # no bytes


async def test_an_image_in_the_place_of_another_begins_a_branch():
    async with seeing("red", "blue") as (it, _):
        first = await ask(it, [user("see ", RED, "?")])
        changed = [user("see ", BLUE, "?"), first.choices[0].message, user("sure?")]
        await ask(it, changed)
        assert len(it.calls.conversation.branches) == 1
        assert digests(it) == [digest_of(RED), digest_of(BLUE)]


async def test_all_wires_show_the_same_tokens():
    data = {"type": "base64", "media_type": "image/png", "data": url(RED).partition(",")[2]}
    async with seeing("a", "b", "c") as (it, stored):
        await ask(it, [user("see ", RED)])
        await it.client.responses.create(
            model="policy",
            input=[
                {
                    "role": "user",
                    "content": [
                        {"type": "input_text", "text": "see "},
                        {"type": "input_image", "image_url": url(RED), "detail": "auto"},
                    ],
                }
            ],
        )
        blocks = [{"type": "text", "text": "see "}, {"type": "image", "source": data}]
        status, _ = await post(it, {"role": "user", "content": blocks})
        assert status == 200
        status, count = await post(
            it, {"role": "user", "content": blocks}, path="count_tokens", max_tokens=None
        )
        prompts = [prompt for prompt, _ in it.engine.sampled]
        assert (status, count) == (200, {"input_tokens": len(prompts[0])})
        assert prompts[0] == prompts[1] == prompts[2]
        assert stored == [RED]


async def test_an_image_of_a_tools_result_is_shown():
    seen = {"type": "image", "source": {"type": "base64", "data": url(RED).partition(",")[2]}}
    call = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [seen]}
    async with seeing("red") as (it, _):
        status, _ = await post(
            it,
            {"role": "user", "content": "look"},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]},
        )
        assert status == 200
        assert "<|tool|>\n" + "[1]" * 6 in it.tokens


LARGE = url(b"\0" * (MOST_IMAGE_BYTES + 9))


@pytest.mark.parametrize(
    ("image", "why"),
    [
        ("http://127.0.0.1/a.png", "an image at 'http://127.0.0.1/a.png': nothing is fetched here"),
        ("file:///etc/passwd", "nothing is fetched here, send its bytes"),
        ("data:image/png,abc", "an image of a message is not base64"),
        ("data:image/png;base64,%%%", "an image of a message is not base64"),
        (url(b"GIF89a and no more"), "an image of a message: not an image that can be read"),
        (url(drawn(30, 30)[:200]), "an image of a message: not an image that can be read"),
        (LARGE, r"an image of 16,777,22\d bytes, 16,777,216 are the most"),
        (url(drawn(1000, 1)), "1000 x 1: one edge is over 200 times the other"),
    ],
)
async def test_what_is_no_image_is_refused_before_the_engine_is_asked(image: str, why: str):
    async with seeing("x") as (it, stored):
        part = {"type": "image_url", "image_url": {"url": image}}
        with pytest.raises(openai.BadRequestError, match=why) as caught:
            await ask(it, [{"role": "user", "content": [part]}])
        assert caught.value.param == "messages"
        assert not it.engine.asked
        assert not stored


async def test_each_wire_refuses_an_image_elsewhere_in_its_own_form():
    elsewhere = "https://example.org/a.png"
    async with seeing("x") as (it, _):
        part = {"type": "input_image", "image_url": elsewhere}
        with pytest.raises(openai.BadRequestError, match="an image elsewhere: send its") as caught:
            await it.client.responses.create(
                model="policy",
                input=[{"role": "user", "content": [part]}],  # type: ignore[list-item]
            )
        assert caught.value.param == "input[0].content[0]"
        block = {"type": "image", "source": {"type": "url", "url": elsewhere}}
        status, body = await post(it, {"role": "user", "content": [block]})
        assert (status, body["error"]["type"]) == (400, "invalid_request_error")
        assert "messages[0].content[0] is an image elsewhere" in body["error"]["message"]


async def test_what_a_policy_cannot_see_or_a_run_cannot_keep_is_refused():
    async with seeing("x", sees=False) as (it, _):
        with pytest.raises(openai.BadRequestError, match=r"run\.model sees no images"):
            await ask(it, [user(RED)])
    async with seeing("x", room=1) as (it, stored):
        with pytest.raises(openai.BadRequestError, match="the run has no room for image"):
            await ask(it, [user(RED, BLUE)])
        assert stored == [RED]
    async with seeing("x") as (it, _):
        with pytest.raises(openai.BadRequestError, match="0 images, and 1 place for images"):
            await ask(it, [user(f"see {PLACE}")])
        named = {"type": "image", "image": ["a" * 64, 84, 56, 9]}  # another trajectory's
        with pytest.raises(openai.BadRequestError, match="no data URL, and no bytes"):
            await ask(it, [{"role": "user", "content": [named]}])


async def test_places_of_images_in_a_clients_own_text_or_tokens_are_refused():
    async with seeing(f"a{PLACE}", "b") as (it, _):
        reply = it.client.completions.create
        for prompt in (f"see {PLACE}", [1, LAW.image_token]):
            with pytest.raises(openai.BadRequestError, match="prompt: 0 images, and 1 place"):
                await reply(model="policy", prompt=prompt)
        with pytest.raises(openai.BadRequestError, match="prompt: token ids are 0 to"):
            await reply(model="policy", prompt=[-1])  # the mark of an image
        begun = {"role": "assistant", "content": PLACE}
        with pytest.raises(openai.BadRequestError, match="messages: 0 images, and 1 place"):
            await ask(it, [user("?"), begun])
        assert not it.engine.asked
        first = [ord("?")]
        await reply(model="policy", prompt=first, max_tokens=2)
        whole = it.calls.conversation.token_ids
        assert LAW.image_token in whole, "the policy chose it"
        await reply(model="policy", prompt=[*whole, ord("!")])
        assert it.calls.conversation.branches == ()
        with pytest.raises(openai.BadRequestError, match="prompt: 0 images, and 1 place"):
            await reply(model="policy", prompt=[*whole, LAW.image_token])


async def test_a_call_without_the_image_that_had_no_room_goes_on():
    async with seeing("x", room=0) as (it, stored):
        with pytest.raises(openai.BadRequestError, match="no room for image"):
            await ask(it, [user(RED)])
        assert (await ask(it, [user("?")])).choices[0].message.content == "x"
        with pytest.raises(openai.BadRequestError, match="no room for image"):
            await ask(it, [user(RED)])
        assert not stored


def test_a_trajectory_has_a_limit_of_images():
    async def store(content: bytes) -> None:
        raise AssertionError(len(content))

    known = [Image(f"{number:064}", 9, 9, 9) for number in range(3)]
    images = TrajectoryImages(ImageMarks(LAW), known, store)
    parts = [drawn(8, 8, seed=seed) for seed in range(MOST_IMAGES)]
    message = {"role": "user", "content": [{"type": "image", "image": part} for part in parts]}
    assert len(images.taken(message)["content"]) == MOST_IMAGES
    assert images.taken(message)["content"] == images.taken(message)["content"]
    one_more = {"content": [{"type": "image", "image": RED}]}
    with pytest.raises(ValueError, match=f"more than {MOST_IMAGES} different images"):
        images.taken(one_more)

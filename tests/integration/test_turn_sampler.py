"""Whatever an environment says: a submission, or a failure of its trajectory with the reason."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from typing_extensions import override

from slipstream.broker.images import LocalImages
from slipstream.broker.server.generation import most_bytes
from slipstream.generators.engine import Completion, SamplingParams
from slipstream.generators.environments.host import EnvironmentFailedError
from slipstream.generators.environments.turn_sampler import TurnSampler
from slipstream.generators.lanes.concurrency import Range
from slipstream.generators.lanes.lanes import Lanes
from slipstream.generators.rollout import Sampler, Submission
from slipstream.generators.text.codec import TextCodec
from slipstream.wire.errors import ConfigError
from slipstream.wire.messages.broker import LeasedGroup
from slipstream.wire.messages.codec import decode_payload
from slipstream.wire.messages.images import Image, digest_of
from slipstream.wire.messages.trajectory import ChatMessage, ContentPart, Json, Prompt
from slipstream.wire.models.pixels import checked_image
from slipstream.wire.settings.sections import EnvironmentSection, SamplingSection
from tests.integration.environments.guessing import png
from tests.support.blank_model import write_blank_model
from tests.support.canned_engine import CannedEngine, completion
from tests.support.vision_models import IMAGE_TOKEN, VISION_MODELS, VOCABULARY, write_tokens
from tests.support.waiting import HANG_S, until_async

pytestmark = pytest.mark.integration
PROMPT = Prompt(prompt="1+1=", ground_truth="2")
END = VOCABULARY["<|im_end|>"]
TOKEN_BYTES = 16  # of arrays, for each token
GUESSING = Path(__file__).parent / "environments" / "guessing.py"


class Parsing(CannedEngine):
    """Finds no calls."""

    @override
    async def tool_calls(
        self, text: str, tools: Sequence[Json], parser: str
    ) -> tuple[str, list[dict[str, Json]], int]:
        del tools, parser
        return text, [], 0


class Looking(Parsing):
    """Looks at the files of a request."""

    def __init__(self, *completions: Completion) -> None:
        super().__init__(*completions)
        self.seen: list[list[bytes]] = []

    @override
    async def sample(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        count: int,
        seeds: Sequence[int] = (),
    ) -> list[Completion]:
        for span, _ in params.images:
            assert prompt_ids[span.first_token : span.end] == [IMAGE_TOKEN] * span.num_tokens
        self.seen.append([image.file.read_bytes() for image in params.images])
        return await super().sample(prompt_ids, params, count=count, seeds=seeds)


async def submission_of(
    folder: Path,
    name: str,
    *,
    prompt: Prompt = PROMPT,
    images: LocalImages | None = None,
    template: str = "",
    parser: str = "",
    must_reward: bool = False,
    engine: CannedEngine | None = None,
    **limits: int,
) -> Submission:
    if images is None:
        write_blank_model(folder / "model", hidden=16, layers=1)
    else:
        write_tokens(folder / "model", "qwen2_5_vl")
        config = json.dumps(VISION_MODELS["qwen2_5_vl"])
        (folder / "model" / "config.json").write_text(config)
    sampling = SamplingSection(
        max_prompt_tokens=16, max_response_tokens=100, chat_template=template
    )
    codec = TextCodec(folder / "model", sampling)
    params = SamplingParams(temperature=1.0, max_new_tokens=8)
    engine = engine or Parsing(completion(5, 2))
    sampler = Sampler(engine, codec, {"train": params}, 1)
    section = EnvironmentSection(
        function=f"{GUESSING}:{name}", timeout_s=HANG_S, tool_call_parser=parser, **limits
    )
    work = LeasedGroup(
        group_id=3, lease_id=1, item="train", position=0, prompt=prompt, siblings=(0,)
    )
    booking = Lanes(Range(lowest=1, highest=1, step=1)).book(1)
    await booking.enter()
    async with (
        TurnSampler.running(
            section, sampling, sampler, hide=(), must_reward=must_reward
        ) as turn_sampler,
        booking.by_call() as lanes,
    ):
        message, frames = await turn_sampler.run(work, 0, lanes, images=images)
    (session,) = engine.ended_sessions
    assert {params.session for _, params, _, _ in engine.asked} == {session}
    most = most_bytes(message.header, TOKEN_BYTES)
    assert all(len(frame) <= most[what] for what, frame in zip(most, frames, strict=False))
    return message, frames


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("NoRole", "a message has the role None"),
        ("ListContent", "content of a message is not text"),
        ("NotANumber", "reward is nan, expected a finite number"),
        (
            "rewards_beyond_float32",
            r"a number of turn_rewards is -1e\+39; it may be at most 1e\+15",
        ),
        ("Binary", "content of a message is bytes"),
    ],
)
def test_what_no_trajectory_can_be_made_of_is_a_failure_of_its_environment(
    tmp_path: Path, name: str, why: str
):
    with pytest.raises(EnvironmentFailedError, match=why):
        asyncio.run(submission_of(tmp_path, name))


def test_what_a_client_leaves_out_is_no_fault_of_the_trajectory(tmp_path: Path):
    message, frames = asyncio.run(submission_of(tmp_path, "forgets_arguments"))
    assert message.score is not None
    assert message.score.reward == 1.0
    assert frames[1].decode().startswith("user: 1+1=\nassistant: look({})\ntool: y\nassistant: ")


async def test_images_of_all_turns_are_files_for_the_engine_and_places_for_the_learner(
    tmp_path: Path,
):
    (tmp_path / "files").mkdir()
    run = {digest_of(png(shade=9)): png(shade=9)}  # images of the run, as the broker has them

    async def fetch(digest: str) -> bytes:
        return run[digest]

    async def store(content: bytes) -> Image:
        run[digest_of(content)] = content
        return checked_image(content)

    files = LocalImages(fetch, tmp_path / "files", store=store)
    part = ContentPart(image=checked_image(png(shade=9)))
    prompt = Prompt(prompt=(ChatMessage("user", (ContentPart(text="see "), part)),))
    engine = Looking(completion(50, END))
    _, frames = await submission_of(
        tmp_path, "Showing", engine=engine, prompt=prompt, images=files, max_tokens=900
    )
    payload = decode_payload(frames[0])
    shades = [digest_of(png(shade=shade)) for shade in (9, 1, 2)]
    assert [span.digest for span in payload.images] == shades
    ids = np.frombuffer(payload.token_ids.data, "<i4")
    for span in payload.images:
        assert set(ids[span.first_token : span.end]) == {IMAGE_TOKEN}
    assert (ids == IMAGE_TOKEN).sum() == sum(span.num_tokens for span in payload.images)
    assert engine.seen == [[run[digest] for digest in shades[:count]] for count in (1, 2, 3)]
    assert all(min(prompt_ids) >= 0 for prompt_ids, *_ in engine.asked)


def test_a_template_that_leaves_out_tools_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    deaf, telling = tmp_path / "deaf.jinja", tmp_path / "telling.jinja"
    deaf.write_text("{% for m in messages %}{{ m.content }}{% endfor %}=")
    telling.write_text("{{ tools }}" + deaf.read_text())
    for parser, template in (("known", deaf), ("", deaf), ("known", telling)):
        asyncio.run(submission_of(tmp_path, "OneTurn", template=str(template), parser=parser))
    (warning,) = [one for one in caplog.messages if "does not list the tools" in one]
    assert "(environment.tool_call_parser = 'known')" in warning
    assert f"template {deaf} (sampling.chat_template) writes the same" in warning
    assert "sampling.chat_template" in warning


@pytest.mark.parametrize(
    ("name", "limits", "ended"),
    [
        ("Forgets", {}, ""),
        ("GoesOn", {"max_turns": 2}, " before environment.max_turns = 2"),
        ("GoesOn", {"max_tokens": 14}, " before environment.max_tokens = 14"),
    ],
)
def test_a_trajectory_that_nobody_would_reward_has_failed(
    tmp_path: Path, name: str, limits: dict[str, int], ended: str
):
    message, _ = asyncio.run(submission_of(tmp_path, name, **limits))
    assert message.score is None  # a reward function scores it
    with pytest.raises(
        EnvironmentFailedError, match=rf"^the environment gave no reward{ended}, and .*workers = 0"
    ):
        asyncio.run(submission_of(tmp_path, name, must_reward=True, **limits))


class Silent(Parsing):
    """Never answers."""

    @override
    async def sample(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        count: int,
        seeds: Sequence[int] = (),
    ) -> list[Completion]:
        await super().sample(prompt_ids, params, count=count, seeds=seeds)
        await asyncio.Event().wait()
        raise AssertionError


async def test_a_trajectory_that_fails_or_is_taken_away_ends_its_session(tmp_path: Path):
    failing, silent = Parsing(completion(5, 2)), Silent(completion(5, 2))
    with pytest.raises(EnvironmentFailedError):
        await submission_of(tmp_path, "Forgets", must_reward=True, engine=failing)
    taken = asyncio.create_task(submission_of(tmp_path, "OneTurn", engine=silent))
    await until_async(lambda: bool(silent.asked))
    taken.cancel()
    await asyncio.wait([taken])
    assert taken.cancelled()
    for engine in (failing, silent):
        assert engine.ended_sessions == [engine.asked[0][1].session] != [""]


def test_what_did_not_fit_into_a_trajectory_is_no_part_of_it(tmp_path: Path):
    message, frames = asyncio.run(submission_of(tmp_path, "LongAnswer", max_tokens=3_000))
    assert bytes(frames[1]).startswith(b"user: " + b"1" * 2_000)
    assert b"2" * 100_000 not in bytes(frames[1])
    assert message.header.num_tokens < 3_000


def test_an_environment_that_rewards_nothing_is_refused_where_nobody_else_does(tmp_path: Path):
    assert asyncio.run(submission_of(tmp_path, "Tools"))[0].score is None
    with pytest.raises(ConfigError, match=r"guessing\.py:Tools' gives no rewards, and .*workers"):
        asyncio.run(submission_of(tmp_path, "Tools", must_reward=True))
    assert asyncio.run(submission_of(tmp_path, "OneTurn", must_reward=True))[0].score is not None

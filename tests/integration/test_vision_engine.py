"""Prompts with images on real SGLang, against transformers: numbers, prefixes, versions in between.

Versions are unrelated models, so that a token under the wrong label, or an image of the tower
before, is off by far more than the tolerance.
"""

import asyncio
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TypeAlias

import msgspec
import pytest
from safetensors.torch import load_file, save_file

from slipstream.generators.engine import Completion, PromptImage, SamplingParams, Scores
from slipstream.generators.sglang.engine import SglangEngine, image_data, scores_of
from slipstream.generators.sglang.process import SglangProcess
from slipstream.wire.errors import EngineRefusedError
from slipstream.wire.messages.images import ImageSpan, digest_of
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.models.image_law import ImageLaw, image_law
from slipstream.wire.models.pixels import checked_image
from tests.integration.sglang_load import client_of, until_load
from tests.support.drawn_images import drawn
from tests.support.ranks.run import start
from tests.support.tiny_run import sglang_server
from tests.support.vision_models import IMAGE_TOKEN, VISION_MODELS, VOCABULARY, write_vision

pytestmark = pytest.mark.integration
OLD, NEW = PolicyVersion(1, 3), PolicyVersion(1, 4)
SAME = 1e-4  # nats; float32 noise between two implementations is about 1e-6
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=8)
LONG = SamplingParams(temperature=1.0, max_new_tokens=300, min_new_tokens=300)
Model: TypeAlias = Callable[..., Path]  # arguments: a name and a seed
TRIES = 20  # attempts to change weights while an answer is in the making
END = VOCABULARY["<|im_end|>"]
WIDE, OTHER, TALL = drawn(200, 150), drawn(200, 150, seed=1), drawn(60, 300)


class Pictures:
    """Prompts with images for a model, whose files are in a folder."""

    def __init__(self, model: Path, folder: Path) -> None:
        law = image_law(model)
        assert law is not None
        self._law: ImageLaw = law
        self._folder = folder

    def prompt(self, *parts: bytes | str) -> tuple[list[int], tuple[PromptImage, ...]]:
        """Return the ids of texts and images, and the images."""
        ids: list[int] = []
        images = []
        for part in parts:
            if isinstance(part, str):
                ids += [VOCABULARY[character] for character in part]
                continue
            image = checked_image(part)
            file = self._folder / image.digest
            file.write_bytes(part)
            rows, columns = self._law.patches_of(image.width, image.height)
            num = self._law.num_tokens(rows, columns)
            ids.append(VOCABULARY["<|vision_start|>"])
            span = ImageSpan(image.digest, len(ids), num, rows, columns)
            images.append(PromptImage(span, file))
            ids += [IMAGE_TOKEN] * num + [VOCABULARY["<|vision_end|>"]]
        return ids, tuple(images)


class Reference:
    """Asks the process that computes by transformers."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def __call__(
        self,
        model: Path,
        ids: list[int],
        answer: list[int],
        images: Sequence[PromptImage],
        barred: int | None = None,
    ) -> list[float]:
        """Return the logprobs of an answer in which a token could not be chosen."""
        asked = {
            "model": str(model),
            "sequence": ids + answer,
            "images": [[msgspec.to_builtins(span), str(file)] for span, file in images],
            "barred": barred,
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"transformers ended with {self._process.wait()}"
        found: list[float] = json.loads(line)
        return found[len(ids) - 1 :]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    root = tmp_path_factory.mktemp("models")

    @cache
    def written(name: str, seed: int = 7) -> Path:
        return write_vision(root / f"{name}-{seed}", name, seed)

    return written


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    work = tmp_path_factory.mktemp("reference")
    process = start(work, "integration.transformers_images", asked=True)
    try:
        yield Reference(process)
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def qwen2_5_vl(model: Model) -> Iterator[SglangProcess]:
    with sglang_server(model("qwen2_5_vl"), several_turns=True) as process:
        yield process


@pytest.fixture(scope="module")
def qwen3_vl(model: Model) -> Iterator[SglangProcess]:
    """A server that computes prompts in chunks, whose ends lie within images."""
    with sglang_server(model("qwen3_vl"), chunked_prefill_size=24) as process:
        yield process


@pytest.fixture(scope="module")
def keeping(model: Model) -> Iterator[SglangProcess]:
    """A server of a folder with the names of a language model and a tower within a model."""
    folder = model("qwen2_5_vl")
    within = Path(shutil.copytree(folder, folder.with_name("within")))
    tensors = load_file(folder / "model.safetensors")
    named = {
        "model.visual." + name.removeprefix("visual.")
        if name.startswith("visual.")
        else name.replace("model.", "model.language_model."): tensor
        for name, tensor in tensors.items()
    }
    save_file(named, within / "model.safetensors", metadata={"format": "pt"})
    with sglang_server(within, in_flight="in_place") as process:
        yield process


@pytest.fixture(params=VISION_MODELS)
def each(request: pytest.FixtureRequest) -> tuple[str, SglangProcess]:
    return request.param, request.getfixturevalue(request.param)


@pytest.fixture(params=["retract", "in_place"])
def either(request: pytest.FixtureRequest) -> tuple[SglangProcess, str]:
    name = "qwen2_5_vl" if request.param == "retract" else "keeping"
    return request.getfixturevalue(name), request.param


async def sampled(
    engine: SglangEngine, prompt: tuple[list[int], tuple[PromptImage, ...]], params: SamplingParams
) -> Completion:
    ids, images = prompt
    (answer,) = await engine.sample(ids, replace(params, images=images), count=1)
    return answer


async def score(
    engine: SglangEngine, ids: list[int], answer: list[int], images: Sequence[PromptImage]
) -> Scores:
    """Return the logprobs of an answer to a prompt with images."""
    sequences = [ids + answer]
    asked = engine._scoring(sequences, len(ids)) | image_data([images])
    return scores_of(await engine._scores(asked), sequences, len(ids))


def error(found: Sequence[float], expected: Sequence[float]) -> float:
    return max(abs(one - other) for one, other in zip(found, expected, strict=True))


async def test_an_engine_computes_images_as_transformers(
    each: tuple[str, SglangProcess], model: Model, reference: Reference, tmp_path: Path
):
    name, server = each
    pictures = Pictures(model(name), tmp_path)
    seen = []
    async with client_of(server, OLD) as engine:
        for parts in ((), (WIDE,), (OTHER,), (WIDE, "and", OTHER), (TALL, WIDE, "!", TALL)):
            ids, images = pictures.prompt("see ", *parts, " which?")
            first, second = await engine.sample(ids, replace(GREEDY, images=images), count=2)
            assert first.token_ids == second.token_ids
            assert first.version_starts == [(0, OLD)]
            expected = reference(model(name), ids, first.token_ids, images)
            assert error(first.logprobs, expected) < SAME
            scored = await score(engine, ids, first.token_ids, images)
            assert error(scored.logprobs[0], expected) < SAME
            seen.append(expected)
    assert error(seen[1][:1], seen[2][:1]) > 10 * SAME  # it looks at them


async def test_an_image_is_a_prefix_of_its_own_and_of_no_other(
    qwen2_5_vl: SglangProcess, model: Model, tmp_path: Path
):
    pictures = Pictures(model("qwen2_5_vl"), tmp_path)
    async with client_of(qwen2_5_vl, OLD) as engine:

        async def cached(*parts: bytes | str) -> tuple[int, int]:
            """Return how many tokens were cached, and how many there are."""
            ids, images = pictures.prompt(*parts, "?")
            scores = await score(engine, ids, [9], images)
            return scores.num_cached, len(ids)

        await engine.adopt_folder(model("qwen2_5_vl"), OLD, digest="")  # forgets prefixes
        before = len("look: ") + 1  # the mark before an image
        assert (await cached("look: ", WIDE))[0] == 0
        assert (await cached("look: ", OTHER))[0] == before
        again, length = await cached("look: ", WIDE)
        assert again == length - 1
        more, _ = await cached("look: ", WIDE, "? now: ", OTHER)  # a turn later
        assert more >= length
        # Fewer patches of the same bytes are another image.
        ids, images = pictures.prompt("look: ", WIDE, "?")
        span = images[0].span
        turned = msgspec.structs.replace(span, rows=span.columns, columns=span.rows)
        images = (PromptImage(turned, images[0].file),)
        scores = await score(engine, ids, [9], images)
        assert scores.num_cached == before


async def test_a_version_that_comes_amid_an_answer_sees_with_its_own_tower(
    either: tuple[SglangProcess, str], model: Model, reference: Reference, tmp_path: Path
):
    name = "qwen2_5_vl"
    server, in_flight = either
    pictures = Pictures(model(name), tmp_path)
    ids, images = pictures.prompt("see ", WIDE, " and ", TALL, "!")
    folders = {OLD: model(name), NEW: model(name, 8)}
    async with client_of(server, in_flight=in_flight, keeps_sessions=False) as engine:
        if in_flight == "in_place":  # it has read its folder, and no version yet
            await engine.label(OLD)
            (first,) = await engine.sample(ids, replace(GREEDY, images=images), count=1)
            expected = reference(folders[OLD], ids, first.token_ids, images)
            assert error(first.logprobs, expected) < SAME

        async def amid() -> Completion:
            for _ in range(TRIES):
                await engine.adopt_folder(folders[OLD], OLD, digest="")
                asked = asyncio.create_task(
                    engine.sample(ids, replace(LONG, images=images), count=1)
                )
                await until_load(
                    server, lambda load, asked=asked: load.num_running == 1 or asked.done()
                )
                await engine.adopt_folder(folders[NEW], NEW, digest="")
                (answer,) = await asked
                if len(answer.version_starts) == 2:
                    return answer
            raise AssertionError("every version came too late")

        answer = await amid()
        assert [version for _, version in answer.version_starts] == [OLD, NEW]
        cut = answer.version_starts[1][0]

        def barred(folder: Path, first: int, end: int) -> float:
            found = reference(folder, ids, answer.token_ids, images, END)
            return error(answer.logprobs[first:end], found[first:end])

        assert barred(folders[OLD], 0, cut) < SAME
        if in_flight == "retract":  # all is computed again
            assert barred(folders[NEW], cut, LONG.max_new_tokens) < SAME
        (fresh,) = await engine.sample(ids, replace(GREEDY, images=images), count=1)
        expected = reference(folders[NEW], ids, fresh.token_ids, images)
        assert error(fresh.logprobs, expected) < SAME


async def test_answers_that_are_written_next_to_prompts_with_images_see_their_own(
    qwen2_5_vl: SglangProcess, model: Model, reference: Reference, tmp_path: Path
):
    """The server decodes some while it reads others' images, in one batch."""
    folder = model("qwen2_5_vl")
    pictures = Pictures(folder, tmp_path)
    async with client_of(qwen2_5_vl, OLD) as engine:
        await engine.adopt_folder(folder, OLD, digest="")
        first = pictures.prompt("see ", WIDE, TALL)
        others = [pictures.prompt(str(i), drawn(120, 90, seed=i), "!") for i in range(6)]
        params = replace(LONG, max_new_tokens=100, min_new_tokens=100)
        asked = [(*first, asyncio.create_task(sampled(engine, first, params)))]
        for other in others:
            await until_load(qwen2_5_vl, lambda load: load.num_running > 0 or asked[0][2].done())
            asked.append((*other, asyncio.create_task(sampled(engine, other, params))))
        for ids, images, task in asked:
            answer = await task
            expected = reference(folder, ids, answer.token_ids, images, END)
            assert error(answer.logprobs, expected) < SAME


async def test_a_version_without_a_tower_leaves_the_engines_as_it_is(
    each: tuple[str, SglangProcess], model: Model, reference: Reference, tmp_path: Path
):
    """A frozen tower is not published: the engine has it from its folder, with a shadow or not."""
    name, server = each
    tensors = load_file(model(name, 8) / "model.safetensors")
    tower = {key for key in tensors if "visual." in key}
    version, whole = tmp_path / "version", tmp_path / "whole"
    version.mkdir()
    language = {key: tensor for key, tensor in tensors.items() if key not in tower}
    save_file(language, version / "model.safetensors")
    shutil.copytree(model(name), whole)
    old = load_file(model(name) / "model.safetensors")
    save_file(old | language, whole / "model.safetensors", metadata={"format": "pt"})
    pictures = Pictures(model(name), tmp_path)
    ids, images = pictures.prompt("see ", WIDE, "!")
    async with client_of(server, OLD) as engine:
        given = ((version, False), (version, True), (model(name, 8), True))
        for step, (folder, is_staged) in enumerate(given, 10):
            new = PolicyVersion(1, step)
            await engine.adopt_folder(model(name), OLD, digest="")
            if is_staged:
                assert (await engine.stage_folder(folder, new)).keys() == {"stage", "prove"}
            await engine.adopt_folder(folder, new, digest="")
            (answer,) = await engine.sample(ids, replace(GREEDY, images=images), count=1)
            held = whole if folder == version else folder
            expected = reference(held, ids, answer.token_ids, images)
            assert error(answer.logprobs, expected) < SAME


async def test_a_request_that_contradicts_its_images_is_refused_and_the_next_is_answered(
    qwen2_5_vl: SglangProcess, model: Model, tmp_path: Path
):
    pictures = Pictures(model("qwen2_5_vl"), tmp_path)
    unseen = drawn(90, 90)
    ids, images = pictures.prompt("see ", unseen)
    async with client_of(qwen2_5_vl, OLD) as engine:
        moved = [IMAGE_TOKEN, *ids[:-1]]
        with pytest.raises(EngineRefusedError, match="are not an image's"):
            await engine.sample(moved, replace(GREEDY, images=images), count=1)
        good = images[0].file.read_bytes()
        images[0].file.write_bytes(OTHER)
        with pytest.raises(EngineRefusedError, match=f"is not image {digest_of(unseen)[:8]}"):
            await engine.sample(ids, replace(GREEDY, images=images), count=2)
        images[0].file.write_bytes(good)
        assert len(await engine.sample(ids, replace(GREEDY, images=images), count=2)) == 2

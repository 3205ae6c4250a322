"""Weights that change under answers in the making, on real SGLang, against independent models.

Every change is loaded from a link to memory, as the tcp transport does it. Two unrelated models,
so that a token under the wrong label is off by about 1 nat. Not covered: prompts that SGLang
computes in several chunks, answers that it gives up because its cache is full.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import aiohttp
import pytest

from deploy.addition import write_blank_model
from generators.config import generator_settings
from generators.engine import Completion, SamplingParams
from generators.sglang_engine import SglangEngine
from generators.sglang_process import SglangProcess
from tests.integration.ranks import ROOT
from tests.random_llama import write_random_weights
from wire.errors import EngineError
from wire.versions import PolicyVersion

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]
Mode = Literal["retract", "in_place"]
Starts = Sequence[tuple[int, PolicyVersion]]
V0, V1, V2 = (PolicyVersion(1, step) for step in range(3))
TOLERANCE = 2e-5  # of float32 logprobs
SEQUENCES = 8  # that an engine generates at a time
END = 2  # barred: no answer ends early
LENGTH = 400
LONG = SamplingParams(temperature=1.0, max_new_tokens=LENGTH, min_new_tokens=LENGTH)
SHORT = SamplingParams(temperature=1.0, max_new_tokens=24, min_new_tokens=24)
PROMPTS = [[3, 4, 13], [7, 8, 9, 10, 13, 5], [12] * 5, [4]]
PREFIX = [3 + (7 * i * i + 3 * i) % 17 for i in range(96)]  # long enough to be cached


@dataclass(frozen=True)
class Models:
    """Two folders with one configuration."""

    a: Path
    b: Path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folders = Models(*(tmp_path_factory.mktemp(name) for name in "ab"))
    for folder, seed in ((folders.a, 3), (folders.b, 4)):
        write_blank_model(folder, hidden=64, layers=2)
        write_random_weights(folder, scale=0.2, seed=seed)
    return folders


class Oracle:
    """Asks the process that says what logprobs must be."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def _ask(self, question: dict[str, object]):
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the oracle ended with {self._process.wait()}"
        return json.loads(line)

    def by_learner(self, model: Path, answers: Sequence["Answer"]) -> list[list[float]]:
        """Return what the learner's own model says of whole answers."""
        sequences = [answer.sequence for answer in answers]
        logprobs = self._ask({"model": str(model), "sequences": sequences})
        return [
            values[len(answer.prompt) - 1 :]
            for values, answer in zip(logprobs, answers, strict=True)
        ]

    def over_kept_cache(
        self, answer: "Answer", starts: Starts, weights: dict[PolicyVersion, Path]
    ) -> list[float]:
        """Return what is right for an answer whose keys and values outlived their weights."""
        runs = [
            (len(answer.prompt) + first if first else 1, str(weights[version]))
            for first, version in starts
        ]
        values: list[float] = self._ask({"sequence": answer.sequence, "runs": runs})
        return values[len(answer.prompt) - 1 :]


@pytest.fixture(scope="module")
def oracle(models: Models) -> Iterator[Oracle]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.integration.in_flight_oracle", str(END), models.a, models.b],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield Oracle(process)
    finally:
        process.kill()
        process.communicate()


@contextmanager
def server(model: Path, mode: Mode) -> Iterator[SglangProcess]:
    with tempfile.TemporaryDirectory(prefix="sp-", dir="/tmp") as name:
        settings = generator_settings(
            {
                "run": {"name": "p", "dir": name, "model": str(model), "group_size": 2},
                "sampling": {"max_prompt_tokens": 100, "max_response_tokens": LENGTH},
                "generators": {
                    "device": "cpu",
                    "max_cached_tokens": 8192,
                    "max_sequences": SEQUENCES,
                },
                "weightbus": {"in_flight": mode},
            }
        )
        process = SglangProcess.start(settings, "generator-0")
        try:
            asyncio.run(process.until_ready(90))
            yield process
        finally:
            process.stop()


# Ask for the oracle before a server: its process imports while the server starts.
@pytest.fixture(scope="module")
def retracting(models: Models) -> Iterator[SglangProcess]:
    with server(models.a, "retract") as process:
        yield process


@pytest.fixture(scope="module")
def keeping(models: Models) -> Iterator[SglangProcess]:
    with server(models.a, "in_place") as process:
        yield process


@pytest.fixture(params=["retract", "in_place"])
def either(request: pytest.FixtureRequest) -> tuple[SglangProcess, Mode]:
    name = "retracting" if request.param == "retract" else "keeping"
    return request.getfixturevalue(name), request.param


def on(
    process: SglangProcess, mode: Mode, scenario: Callable[[SglangEngine], Awaitable[None]]
) -> None:
    async def run() -> None:
        async with client(process, mode) as engine:
            await scenario(engine)

    asyncio.run(run())


@asynccontextmanager
async def client(process: SglangProcess, mode: Mode) -> AsyncIterator[SglangEngine]:
    engine = SglangEngine(
        process.url, process.api_key, request_timeout_s=60, control_timeout_s=20, in_flight=mode
    )
    try:
        yield engine
    finally:
        await engine.close()


@contextmanager
def in_memory(model: Path) -> Iterator[Path]:
    """Give a folder with nothing but a link to this process's memory with the weights in it."""
    descriptor = os.memfd_create("weights")
    try:
        with os.fdopen(descriptor, "wb", closefd=False) as file:
            file.write((model / "model.safetensors").read_bytes())
        with tempfile.TemporaryDirectory(prefix="sp-", dir="/tmp") as name:
            link = Path(name) / "model.safetensors"
            link.symlink_to(f"/proc/{os.getpid()}/fd/{descriptor}")
            yield Path(name)
    finally:
        os.close(descriptor)


async def change(engine: SglangEngine, model: Path, version: PolicyVersion) -> int:
    """Change weights as a publish does; return what was in flight."""
    num_in_flight = await engine.pause()
    await load(engine, model)
    await engine.label(version)
    await engine.resume()
    return num_in_flight


async def load(engine: SglangEngine, model: Path) -> None:
    with in_memory(model) as folder:
        await engine.load_folder(folder)


@dataclass(frozen=True)
class Answer:
    prompt: list[int]
    completion: Completion

    @property
    def sequence(self) -> list[int]:
        return self.prompt + self.completion.token_ids

    @property
    def starts(self) -> Starts:
        return self.completion.version_starts

    @property
    def versions(self) -> list[PolicyVersion]:
        return [version for _, version in self.starts]

    def error(self, expected: Sequence[float]) -> float:
        """Return how far the engine's logprobs are off what they must be, at most."""
        return max(
            abs(got - value) for got, value in zip(self.completion.logprobs, expected, strict=True)
        )


async def ask(
    engine: SglangEngine, prompt: list[int], params: SamplingParams, count: int
) -> list[Answer]:
    return [Answer(prompt, one) for one in await engine.sample(prompt, params, count=count)]


async def changed_twice(engine: SglangEngine, models: Models) -> list[Answer]:
    """Return long answers over which A became B and B became A; one had to wait in the queue."""
    await change(engine, models.a, V0)
    started = time.monotonic()
    await asyncio.gather(*(ask(engine, prompt, LONG, 2) for prompt in PROMPTS))
    lap_s = time.monotonic() - started
    asked = [asyncio.create_task(ask(engine, prompt, LONG, 2)) for prompt in PROMPTS]
    await asyncio.sleep(0.05)
    asked.append(asyncio.create_task(ask(engine, [5, 5], LONG, 1)))
    for model, version in ((models.b, V1), (models.a, V2)):
        await asyncio.sleep(0.2 * lap_s)
        assert await change(engine, model, version) == SEQUENCES + 1
    answers = [answer for answers in await asyncio.gather(*asked) for answer in answers]
    assert V0 not in answers[-1].versions, "nothing had to wait in the queue"
    num_thrice = sum(answer.versions == [V0, V1, V2] for answer in answers)
    assert num_thrice >= SEQUENCES // 2, "the changes came too late"
    return answers


def moved(starts: Starts) -> Iterator[Starts]:
    """Yield these runs with one boundary one token off, each in both directions."""
    for i in range(1, len(starts)):
        for by in (-1, 1):
            first, version = starts[i]
            yield [*starts[:i], (first + by, version), *starts[i + 1 :]]


def picked(by_version: dict[PolicyVersion, list[float]], starts: Starts) -> list[float]:
    """Return each token's logprob by the version that its run names."""
    values: list[float] = []
    firsts = [first for first, _ in starts] + [LENGTH]
    for (first, end), (_, version) in zip(pairwise(firsts), starts, strict=True):
        values += by_version[version][first:end]
    return values


def test_a_retracted_answer_has_the_learners_logprobs_of_the_version_that_each_run_names(
    models: Models, oracle: Oracle, retracting: SglangProcess
):
    async def scenario(engine: SglangEngine) -> None:
        answers = await changed_twice(engine, models)
        of_a, of_b = (oracle.by_learner(model, answers) for model in (models.a, models.b))
        for answer, by_a, by_b in zip(answers, of_a, of_b, strict=True):
            by_version = {V0: by_a, V1: by_b, V2: by_a}
            assert answer.error(picked(by_version, answer.starts)) < TOLERANCE
            for starts in moved(answer.starts):
                assert answer.error(picked(by_version, starts)) > TOLERANCE

    on(retracting, "retract", scenario)


def test_an_answer_changed_in_place_goes_on_over_the_keys_and_values_that_it_has(
    models: Models, oracle: Oracle, keeping: SglangProcess
):
    weights = {V0: models.a, V1: models.b, V2: models.a}

    async def scenario(engine: SglangEngine) -> None:
        answers = await changed_twice(engine, models)
        of_a, of_b = (oracle.by_learner(model, answers) for model in (models.a, models.b))
        num_mixed = 0
        for answer, by_a, by_b in zip(answers, of_a, of_b, strict=True):
            expected = oracle.over_kept_cache(answer, answer.starts, weights)
            assert answer.error(expected) < TOLERANCE
            for starts in moved(answer.starts):
                assert answer.error(oracle.over_kept_cache(answer, starts, weights)) > TOLERANCE
            by_version = {V0: by_a, V1: by_b, V2: by_a}
            if len(answer.starts) > 1:
                first_run = slice(0, answer.starts[1][0])
                for got, value in zip(
                    answer.completion.logprobs[first_run], by_a[first_run], strict=True
                ):
                    assert got == pytest.approx(value, abs=TOLERANCE)
                num_mixed += answer.error(picked(by_version, answer.starts)) > 0.01
        assert num_mixed, "no answer shows that its keys and values were kept"

    on(keeping, "in_place", scenario)


def test_no_answer_of_a_version_is_read_from_prefixes_of_another(
    models: Models, oracle: Oracle, either: tuple[SglangProcess, Mode]
):
    process, mode = either

    async def scenario(engine: SglangEngine) -> None:
        await change(engine, models.a, V0)
        before = await ask(engine, PREFIX, SHORT, 3)
        cached = await num_cached(process, PREFIX)
        assert cached >= 64 if mode == "retract" else cached == 0
        running = asyncio.create_task(ask(engine, PREFIX, LONG, SEQUENCES))
        await asyncio.sleep(0.1)
        queued = asyncio.create_task(ask(engine, PREFIX, SHORT, 2))
        await asyncio.sleep(0.1)
        assert await engine.pause() == SEQUENCES + 2
        in_pause = asyncio.create_task(ask(engine, PREFIX, SHORT, 2))
        await asyncio.sleep(0.1)
        await load(engine, models.b)
        await engine.label(V1)
        await engine.resume()
        at_once = await ask(engine, PREFIX, SHORT, 3)
        under_b = [*await queued, *await in_pause, *at_once, *await ask(engine, PREFIX, SHORT, 1)]
        assert {tuple(one.versions) for one in await running} == {(V0, V1)}
        await change(engine, models.a, V2)
        after = await ask(engine, PREFIX, SHORT, 3)

        for model, version, answers in (
            (models.a, V0, before),
            (models.b, V1, under_b),
            (models.a, V2, after),
        ):
            for answer, expected in zip(answers, oracle.by_learner(model, answers), strict=True):
                assert answer.versions == [version]
                assert answer.error(expected) < TOLERANCE

    on(process, mode, scenario)


def test_a_change_that_leaves_cached_prefixes_would_be_seen(
    models: Models, oracle: Oracle, retracting: SglangProcess
):
    """An engine that keeps keys and values must not cache prefixes: here its server does."""

    async def scenario(engine: SglangEngine) -> None:
        await change(engine, models.a, V0)
        await ask(engine, PREFIX, SHORT, 2)
        async with client(retracting, "in_place") as careless:
            await change(careless, models.b, V1)
        stale = await ask(engine, PREFIX, SHORT, 2)
        for model in (models.a, models.b):
            for answer, expected in zip(stale, oracle.by_learner(model, stale), strict=True):
                assert answer.versions == [V1]
                assert answer.error(expected) > 0.01
                assert abs(answer.completion.logprobs[0] - expected[0]) > TOLERANCE

        await change(engine, models.b, V2)
        clean = await ask(engine, PREFIX, SHORT, 2)
        for answer, expected in zip(clean, oracle.by_learner(models.b, clean), strict=True):
            assert answer.error(expected) < TOLERANCE

    on(retracting, "retract", scenario)


def test_a_folder_that_lacks_a_file_of_its_index_is_refused_before_a_tensor_is_loaded(
    models: Models, oracle: Oracle, retracting: SglangProcess, tmp_path: Path
):
    (tmp_path / "model.safetensors").symlink_to(models.b / "model.safetensors")
    index = {"weight_map": {"lm_head.weight": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))

    async def scenario(engine: SglangEngine) -> None:
        await change(engine, models.a, V0)
        await engine.pause()
        with pytest.raises(EngineError, match=r"model-2\.safetensors"):
            await engine.load_folder(tmp_path)
        await engine.resume()
        answers = await ask(engine, PREFIX, SHORT, 1)
        (expected,) = oracle.by_learner(models.a, answers)
        assert answers[0].error(expected) < TOLERANCE

    on(retracting, "retract", scenario)


async def num_cached(process: SglangProcess, prompt: list[int]) -> int:
    """Return how many tokens of a prompt the server has in its prefix cache."""
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 1}}
    headers = {"Authorization": f"Bearer {process.api_key}"}
    async with (
        aiohttp.ClientSession(headers=headers) as http,
        http.post(f"{process.url}/generate", json=body) as response,
    ):
        cached: int = (await response.json())["meta_info"]["cached_tokens"]
        return cached

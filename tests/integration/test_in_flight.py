"""Weights that change under answers in the making, on real SGLang, against independent models.

Changes are loaded from a link to memory, as the tcp transport does it, and in buckets, as the
collective does. The versions are unrelated models, so that a token under the wrong label is off by
about 1 nat. Not covered: prompts that SGLang computes in several chunks, answers that it gives up
because its cache is full.
"""

import asyncio
import json
import os
import subprocess
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Literal

import aiohttp
import pytest
import torch
from safetensors.torch import load_file

from slipstream.generators.config import generator_settings
from slipstream.generators.engine import Completion, SamplingParams
from slipstream.generators.sglang.engine import SglangEngine
from slipstream.generators.sglang.process import SglangProcess
from slipstream.weightbus.relay.transports.collective import EngineGroup
from slipstream.weightbus.version.layout import plan_layout
from slipstream.wire.errors import EngineError
from slipstream.wire.messages.manifest import TensorSpec
from slipstream.wire.messages.versions import PolicyVersion
from tests.integration.sglang_load import Load, client_of, until_load
from tests.support.blank_model import write_blank_model
from tests.support.engine_steps import load_folder, pause
from tests.support.random_llama import write_random_weights
from tests.support.ranks.run import start
from tests.support.waiting import HANG_S

pytestmark = pytest.mark.integration
Mode = Literal["retract", "in_place"]
Way = Callable[[SglangEngine, Path], Awaitable[None]]
Starts = Sequence[tuple[int, PolicyVersion]]
Weights = dict[PolicyVersion, Path]
V0, V1, V2 = VERSIONS = tuple(PolicyVersion(1, step) for step in range(3))
TOLERANCE = 2e-5  # of float32 logprobs
SEQUENCES = 8  # that an engine generates at a time
END = 2  # barred: no answer ends early
LENGTH = 400
TRIES = 20  # to change weights while answers are in the making: a slow machine may be too late
LONG = SamplingParams(temperature=1.0, max_new_tokens=LENGTH, min_new_tokens=LENGTH)
SHORT = SamplingParams(temperature=1.0, max_new_tokens=24, min_new_tokens=24)
PROMPTS = [[3, 4, 13], [7, 8, 9, 10, 13, 5], [12] * 5, [4]]
PREFIX = [3 + (7 * i * i + 3 * i) % 17 for i in range(96)]  # long enough to be cached


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    """Return a folder per version; they have one configuration."""
    folders = {version: tmp_path_factory.mktemp(version.label) for version in VERSIONS}
    for version, folder in folders.items():
        write_blank_model(folder, hidden=64, layers=2)
        write_random_weights(folder, scale=0.2, seed=version.step)
    return folders


class Oracle:
    """Asks the process that computes what logprobs must be."""

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
        """Return what the learner's own model computes for whole answers."""
        sequences = [answer.sequence for answer in answers]
        logprobs = self._ask({"model": str(model), "sequences": sequences})
        return [
            values[len(answer.prompt) - 1 :]
            for values, answer in zip(logprobs, answers, strict=True)
        ]

    def over_kept_cache(self, answer: "Answer", starts: Starts, weights: Weights) -> list[float]:
        """Return what is right for an answer whose keys and values outlived their weights."""
        runs = [
            (len(answer.prompt) + first if first else 1, str(weights[version]))
            for first, version in starts
        ]
        values: list[float] = self._ask({"sequence": answer.sequence, "runs": runs})
        return values[len(answer.prompt) - 1 :]


@pytest.fixture(scope="module")
def oracle(weights: Weights) -> Iterator[Oracle]:
    work = weights[V0]
    process = start(work, "support.in_flight_oracle", END, *weights.values(), asked=True)
    try:
        yield Oracle(process)
    finally:
        process.kill()
        process.communicate()


@contextmanager
def server(model: Path, mode: Mode, **sglang: bool) -> Iterator[SglangProcess]:
    with tempfile.TemporaryDirectory(prefix="sp-", dir="/tmp") as name:
        settings = generator_settings(
            {
                "run": {"name": "p", "dir": name, "model": str(model), "group_size": 2},
                "sampling": {"max_prompt_tokens": 100, "max_response_tokens": LENGTH},
                "generators": {
                    "device": "cpu",
                    "max_cached_tokens": 8192,
                    "max_sequences": SEQUENCES,
                    "sglang": sglang,
                },
                "weightbus": {"in_flight": mode, "probe_every": 0},  # which has lanes of its own
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
def retracting(weights: Weights) -> Iterator[SglangProcess]:
    with server(weights[V0], "retract") as process:
        yield process


@pytest.fixture(scope="module")
def overlapping(weights: Weights) -> Iterator[SglangProcess]:
    with server(weights[V0], "retract", disable_overlap_schedule=False) as process:
        yield process


@pytest.fixture(scope="module")
def keeping(weights: Weights) -> Iterator[SglangProcess]:
    with server(weights[V0], "in_place") as process:
        yield process


@pytest.fixture(params=["retract", "in_place"])
def either(request: pytest.FixtureRequest) -> tuple[SglangProcess, Mode]:
    name = "retracting" if request.param == "retract" else "keeping"
    return request.getfixturevalue(name), request.param


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


async def load(engine: SglangEngine, model: Path) -> None:
    with in_memory(model) as folder:
        await load_folder(engine, folder)


async def receive(engine: SglangEngine, model: Path) -> None:
    """Send the weights over a group of two; the engine is in it."""
    tensors = load_file(model / "model.safetensors")
    specs = [TensorSpec(name, "float32", tuple(tensors[name].shape)) for name in tensors]
    buckets = plan_layout(specs, bucket_bytes=64 * 1024).buckets
    group = EngineGroup("of-two", host="127.0.0.1", world_size=2, timeout_s=HANG_S)
    address = {"host": "127.0.0.1", "port": group.port, "group_name": group.name}
    joined = asyncio.create_task(asyncio.to_thread(group.join, "gloo"))
    await engine.open_group(**address, rank=1, world_size=2, backend="gloo")
    await joined
    await engine.begin_update()
    for bucket in buckets:
        flat = torch.cat([tensors[spec.name].flatten() for spec in bucket.tensors])
        loading = engine.load_bucket(bucket, group_name=group.name, last=bucket is buckets[-1])
        loaded = asyncio.create_task(loading)
        sent = await group.start(partial(flat.view, torch.uint8))
        await group.finish(sent, peer_failed=partial(has_failed, loaded))
        await loaded
    await engine.end_update()
    group.close()
    await engine.close_group(group.name)


def has_failed(task: "asyncio.Task[None]") -> bool:
    return task.done() and task.exception() is not None


async def change(
    engine: SglangEngine, model: Path, version: PolicyVersion, *, by: Way = load
) -> int:
    """Change weights as a publish does; return what was in flight."""
    num_in_flight = await pause(engine)
    await by(engine, model)
    await engine.label(version)
    await engine.resume()
    return num_in_flight


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


async def changed_twice(
    process: SglangProcess, engine: SglangEngine, weights: Weights
) -> list[Answer]:
    """Return long answers in which the weights changed twice; one had to wait in the queue."""
    for _ in range(TRIES):
        await change(engine, weights[V0], V0)
        asked = [asyncio.create_task(ask(engine, prompt, LONG, 2)) for prompt in PROMPTS]
        await until_busy(process, asked, lambda load: load.num_running == SEQUENCES)
        asked.append(asyncio.create_task(ask(engine, [5, 5], LONG, 1)))
        await until_busy(process, asked, lambda load: load.num_waiting == 1)
        in_flight = []
        for version, way in ((V1, load), (V2, receive)):
            enough = version.step * SEQUENCES * LENGTH // 5
            await until_busy(process, asked, lambda load: load.num_tokens >= enough)  # noqa: B023
            in_flight.append(await change(engine, weights[version], version, by=way))
        answers = [answer for answers in await asyncio.gather(*asked) for answer in answers]
        continued = [sum(max(one.versions) >= version for one in answers) for version in (V1, V2)]
        assert all(num >= more for num, more in zip(in_flight, continued, strict=True))
        if V0 in answers[-1].versions:  # out of the queue before the first change
            assert any(max(one.versions) == V0 for one in answers[:-1]), "there was no room for it"
        num_thrice = sum(answer.versions == [V0, V1, V2] for answer in answers)
        is_in_time = in_flight == [SEQUENCES + 1] * 2 and num_thrice >= SEQUENCES // 2
        if is_in_time and V0 not in answers[-1].versions:
            return answers
    raise AssertionError("the changes came too late, or nothing had to wait in the queue")


async def until_busy(
    process: SglangProcess,
    asked: Sequence["asyncio.Task[list[Answer]]"],
    is_enough: Callable[[Load], bool],
) -> None:
    """Wait until a server is so busy with what was asked, or too late."""
    await until_load(process, lambda load: is_enough(load) or any(one.done() for one in asked))


async def overlaps(process: SglangProcess) -> bool:
    """Return whether a server plans its next batch before it has read the last one's tokens."""
    headers = {"Authorization": f"Bearer {process.api_key}"}
    async with (
        aiohttp.ClientSession(headers=headers) as http,
        http.get(f"{process.url}/server_info") as response,
    ):
        (state,) = (await response.json())["internal_states"]
    return not state["disable_overlap_schedule"]


def moved(starts: Starts) -> Iterator[Starts]:
    """Yield these runs with one boundary one token off, each in both directions; none is empty."""
    firsts = [first for first, _ in starts] + [LENGTH]
    for i in range(1, len(starts)):
        for by in (-1, 1):
            first, version = starts[i]
            if firsts[i - 1] < first + by < firsts[i + 1]:
                yield [*starts[:i], (first + by, version), *starts[i + 1 :]]


def picked(by_version: dict[PolicyVersion, list[float]], starts: Starts) -> list[float]:
    """Return each token's logprob by the version that its run names."""
    values: list[float] = []
    firsts = [first for first, _ in starts] + [LENGTH]
    for (first, end), (_, version) in zip(pairwise(firsts), starts, strict=True):
        values += by_version[version][first:end]
    return values


def by_learner(
    oracle: Oracle, weights: Weights, answers: Sequence[Answer]
) -> Iterator[tuple[Answer, dict[PolicyVersion, list[float]]]]:
    """Yield each answer with what the learner's own model computes for it, by version."""
    columns = [oracle.by_learner(weights[version], answers) for version in VERSIONS]
    for answer, *row in zip(answers, *columns, strict=True):
        yield answer, dict(zip(VERSIONS, row, strict=True))


@pytest.fixture
def process(schedule: str, request: pytest.FixtureRequest) -> SglangProcess:
    return request.getfixturevalue(schedule)


# By default SGLang does not overlap; what a setting turns on has the same answers.
@pytest.mark.parametrize(
    "schedule", ["retracting", pytest.param("overlapping", marks=pytest.mark.slow)]
)
async def test_a_retracted_answer_has_the_learners_logprobs_of_the_version_that_each_run_names(
    weights: Weights, oracle: Oracle, schedule: str, process: SglangProcess
):
    async with client_of(process, in_flight="retract") as engine:
        assert await overlaps(process) == (schedule == "overlapping")
        answers = await changed_twice(process, engine, weights)
        for answer, by_version in by_learner(oracle, weights, answers):
            assert answer.error(picked(by_version, answer.starts)) < TOLERANCE
            for starts in moved(answer.starts):
                assert answer.error(picked(by_version, starts)) > TOLERANCE


async def test_answer_changed_in_place_keeps_its_keys_and_values(
    weights: Weights, oracle: Oracle, keeping: SglangProcess
):
    async with client_of(keeping, in_flight="in_place") as engine:
        answers = await changed_twice(keeping, engine, weights)
        off_the_learners = []
        for answer, by_version in by_learner(oracle, weights, answers):
            assert answer.error(oracle.over_kept_cache(answer, answer.starts, weights)) < TOLERANCE
            for starts in moved(answer.starts):
                assert answer.error(oracle.over_kept_cache(answer, starts, weights)) > TOLERANCE
            end = [*answer.starts, (LENGTH, None)][1][0]
            of_the_learner = by_version[answer.versions[0]][:end]
            assert answer.completion.logprobs[:end] == pytest.approx(of_the_learner, abs=TOLERANCE)
            off_the_learners.append(answer.error(picked(by_version, answer.starts)))
        assert max(off_the_learners) > 0.01, "no answer shows that keys and values were kept"


async def test_no_answer_of_a_version_is_read_from_prefixes_of_another(
    weights: Weights, oracle: Oracle, either: tuple[SglangProcess, Mode]
):
    process, mode = either

    async with client_of(process, in_flight=mode) as engine:
        await change(engine, weights[V0], V0)
        before = await ask(engine, PREFIX, SHORT, 3)
        cached = await num_cached(process, PREFIX)
        assert cached >= 64 if mode == "retract" else cached == 0
        for _ in range(TRIES):
            running = asyncio.create_task(ask(engine, PREFIX, LONG, SEQUENCES))
            await until_busy(process, [running], lambda load: load.num_running == SEQUENCES)
            queued = asyncio.create_task(ask(engine, PREFIX, SHORT, 2))
            await until_busy(process, [running], lambda load: load.num_waiting == 2)
            in_flight = await pause(engine)
            busy = await until_load(process, lambda _: True)
            if (busy.num_running, busy.num_waiting) == (SEQUENCES, 2):
                break
            await engine.resume()  # answers were finished before the pause
            await asyncio.gather(running, queued)
        assert in_flight == SEQUENCES + 2
        in_pause = asyncio.create_task(ask(engine, PREFIX, SHORT, 2))
        await asyncio.sleep(0.1)
        await load(engine, weights[V1])
        await engine.label(V1)
        await engine.resume()
        at_once = await ask(engine, PREFIX, SHORT, 3)
        changed = [*await queued, *await in_pause, *at_once, *await ask(engine, PREFIX, SHORT, 1)]
        assert {tuple(one.versions) for one in await running} == {(V0, V1)}
        await change(engine, weights[V2], V2)
        after = await ask(engine, PREFIX, SHORT, 3)

        for version, answers in ((V0, before), (V1, changed), (V2, after)):
            for answer, by_version in by_learner(oracle, weights, answers):
                assert answer.versions == [version]
                assert answer.error(by_version[version]) < TOLERANCE


async def test_a_change_that_leaves_cached_prefixes_would_be_seen(
    weights: Weights, oracle: Oracle, retracting: SglangProcess
):
    """An engine that keeps keys and values must not cache prefixes: here its server does."""

    async with client_of(retracting, in_flight="retract") as engine:
        await change(engine, weights[V0], V0)
        await ask(engine, PREFIX, SHORT, 2)
        async with client_of(retracting, in_flight="in_place") as careless:
            await change(careless, weights[V1], V1)
        stale = await ask(engine, PREFIX, SHORT, 2)
        for answer, by_version in by_learner(oracle, weights, stale):
            assert answer.versions == [V1]
            for expected in by_version.values():
                assert answer.error(expected) > 0.01
                assert abs(answer.completion.logprobs[0] - expected[0]) > TOLERANCE

        await change(engine, weights[V1], V2)
        clean = await ask(engine, PREFIX, SHORT, 2)
        for answer, by_version in by_learner(oracle, weights, clean):
            assert answer.error(by_version[V1]) < TOLERANCE


async def test_a_folder_that_lacks_a_file_of_its_index_is_refused_before_a_tensor_is_loaded(
    weights: Weights, oracle: Oracle, retracting: SglangProcess, tmp_path: Path
):
    (tmp_path / "model.safetensors").symlink_to(weights[V1] / "model.safetensors")
    index = {"weight_map": {"lm_head.weight": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))

    async with client_of(retracting, in_flight="retract") as engine:
        await change(engine, weights[V0], V0)
        await pause(engine)
        with pytest.raises(EngineError, match=r"model-2\.safetensors"):
            await load_folder(engine, tmp_path)
        await engine.resume()
        answers = await ask(engine, PREFIX, SHORT, 1)
        for answer, by_version in by_learner(oracle, weights, answers):
            assert answer.error(by_version[V0]) < TOLERANCE


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

"""What every engine promises, asked of the scripted one and of a real SGLang."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import pytest

from slipstream.generators.engine import Completion, EngineLoad, InferenceEngine, SamplingParams
from slipstream.generators.sglang.engine import SglangEngine
from slipstream.generators.sglang.process import SglangProcess
from slipstream.weightbus.version.engine_checksums import digest_of
from slipstream.wire.errors import EngineError
from slipstream.wire.messages.versions import PolicyVersion
from tests.integration.sglang_load import Load, client_of, until_load
from tests.support.engine_steps import load_folder, pause
from tests.support.scripted_engine import ScriptedEngine
from tests.support.tiny_run import sglang_server, write_policy
from tests.support.waiting import HANG_S, until_async

Completions: TypeAlias = "asyncio.Task[list[Completion]]"
OLD, NEW = PolicyVersion(1, 3), PolicyVersion(1, 4)
PROMPT = [3, 4, 13]
SHORT = SamplingParams(temperature=1.0, max_new_tokens=12, min_new_tokens=12)
LONG = SamplingParams(temperature=1.0, max_new_tokens=300, min_new_tokens=300)
CACHED = 4096  # tokens, as of the real server
TRIES = 20  # to pause while answers are in the making: a slow machine may do it too late


@pytest.fixture(scope="module")
def sglang() -> Iterator[SglangProcess]:
    with sglang_server(several_turns=True) as process:
        yield process


class OnEngine:
    """What there is to know of an engine from outside of it."""

    def __init__(self, server: SglangProcess | None) -> None:
        self._server = server  # None is a scripted engine

    @asynccontextmanager
    async def engine(self) -> AsyncIterator[InferenceEngine]:
        """Yield the engine, labelled OLD."""
        if self._server is None:
            scripted = ScriptedEngine(
                vocabulary=40, end_token_id=2, tokens_per_second=500.0, cached_tokens=CACHED
            )
            await scripted.label(OLD)
            yield scripted
            return
        engine = SglangEngine(
            self._server.url,
            self._server.api_key,
            request_timeout_s=HANG_S,
            control_timeout_s=HANG_S,
        )
        try:
            await engine.label(OLD)
            yield engine
        finally:
            await engine.close()

    async def paused_in(self, engine: InferenceEngine, count: int) -> Completions:
        """Ask for long answers; return them to come when the engine was paused in the midst."""
        for _ in range(TRIES):
            asked = asyncio.create_task(
                engine.sample(PROMPT, LONG, count=count, seeds=range(1, count + 1))
            )
            await self.until_busy(asked, count)
            in_flight = await pause(engine)
            if await self._num_running(asked, count) == count:
                assert in_flight == count
                return asked
            await engine.resume()
            await asked
        raise AssertionError("every pause came too late")

    async def until_busy(self, asked: Completions, count: int) -> None:
        """Wait until so many answers are in the making, or it is too late."""
        if self._server is None:
            await asyncio.sleep(0.05)  # the first tokens come at once
            return
        await until_load(self._server, lambda load: load.num_running == count or asked.done())

    async def until_idle(self, engine: InferenceEngine) -> None:
        """Wait until no answer is in the making, not even one whose caller has gone."""

        async def is_idle() -> bool:
            in_flight = await pause(engine)
            await engine.resume()
            return in_flight == 0

        await until_async(is_idle, "answers are still being written")
        if self._server is not None:
            # SGLang reports its load as of its last batch, maybe one of before the pause, and
            # needs seconds to notice that a client is gone.
            await engine.sample(PROMPT, SHORT, count=1)
            await until_load(self._server, lambda load: load == (0, 0, 0))

    async def _num_running(self, asked: Completions, count: int) -> int:
        if self._server is None:
            return 0 if asked.done() else count
        busy: Load = await until_load(self._server, lambda _: True)
        return busy.num_running


@pytest.fixture(params=["scripted", pytest.param("sglang", marks=pytest.mark.integration)])
def on_engine(request: pytest.FixtureRequest) -> OnEngine:
    scripted = request.param == "scripted"
    return OnEngine(None if scripted else request.getfixturevalue("sglang"))


@pytest.fixture
def engine(on_engine: OnEngine) -> AbstractAsyncContextManager[InferenceEngine]:
    return on_engine.engine()


def ids(completions: list[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


async def test_there_are_as_many_answers_as_asked_for_each_with_a_logprob_per_token(
    engine: InferenceEngine,
):
    answers = await engine.sample(PROMPT, SHORT, count=3, seeds=[1, 2, 3])
    assert len(answers) == 3
    for answer in answers:
        assert len(answer.token_ids) == len(answer.logprobs) == 12
        assert all(logprob <= 0.0 for logprob in answer.logprobs)
        assert answer.version_starts == [(0, OLD)]
        assert answer.finish_reason == "length"


async def test_a_seed_decides_an_answer_whatever_is_answered_beside_it(engine: InferenceEngine):
    (alone,) = ids(await engine.sample(PROMPT, SHORT, count=1, seeds=[7]))
    among = ids(await engine.sample(PROMPT, SHORT, count=3, seeds=[6, 7, 2**63 - 1]))
    assert among[1] == alone
    assert len({tuple(answer) for answer in among}) == 3
    unseeded = ids(await engine.sample(PROMPT, SHORT, count=3))
    assert len({tuple(answer) for answer in unseeded}) == 3


async def test_a_session_changes_no_answer_and_may_end_at_any_time(engine: InferenceEngine):
    (alone,) = ids(await engine.sample(PROMPT, SHORT, count=1, seeds=[7]))
    for session in ("a", "a", "b", "a"):  # also after its end
        params = replace(SHORT, session=session)
        (answer,) = ids(await engine.sample(PROMPT, params, count=1, seeds=[7]))
        assert answer == alone
        engine.end_session(session)
    engine.end_session("never heard of")
    asked = asyncio.create_task(engine.sample(PROMPT, replace(SHORT, session="c"), count=2))
    engine.end_session("c")
    assert len(await asked) == 2


@pytest.mark.integration
async def test_prefixes_of_live_trajectories_stay_and_others_make_room(
    sglang: SglangProcess, tmp_path: Path
):
    write_policy(tmp_path / "policy")
    async with client_of(sglang, OLD) as engine:

        async def cached_after(first: int, session: str, *, is_ended: bool = False) -> int:
            """Return how much of an answer is still in the cache when others had filled it."""
            prompt = [first, *[3 + i % 30 for i in range(100)]]
            params = replace(LONG, session=session)
            for _ in range(TRIES):
                asked = asyncio.create_task(engine.sample(prompt, params, count=1))
                await until_load(
                    sglang, lambda load, asked=asked: load.num_running == 1 or asked.done()
                )
                await engine.adopt_folder(tmp_path / "policy", NEW, digest="")
                (answer,) = await asked
                await engine.label(OLD)
                if len(answer.version_starts) == 2:  # new weights came amid it
                    break
            if is_ended:
                engine.end_session(session)
                await until_async(lambda: not engine._ending)
            for other in range(15):
                filling = [20 + other, *range(3, 38), first] * 8
                await engine.sample(filling, SHORT, count=1)
            whole = [*prompt, *answer.token_ids]
            return (await engine.score([[*whole, 5]], num_context=len(whole))).num_cached

        assert await cached_after(4, "live") >= 398
        assert await cached_after(5, "") == 0
        assert await cached_after(6, "ended", is_ended=True) == 0


async def test_greedy_answers_are_equal(engine: InferenceEngine):
    greedy = SamplingParams(temperature=0.0, max_new_tokens=12)
    first, second = ids(await engine.sample(PROMPT, greedy, count=2))
    assert first == second


async def test_version_change_in_mid_answer_is_reported_to_the_token(
    engine: InferenceEngine, on_engine: OnEngine
):
    asked = await on_engine.paused_in(engine, 2)
    await asyncio.sleep(0.2)
    assert not asked.done(), "an answer was finished in the pause"
    await engine.label(NEW)
    await engine.resume()
    for answer in await asked:
        (first, old), (second, new) = answer.version_starts
        assert (first, old, new) == (0, OLD, NEW)
        assert 0 < second < 300


async def test_a_version_is_loaded_from_a_folder_in_mid_answer(
    engine: InferenceEngine, on_engine: OnEngine, tmp_path: Path
):
    write_policy(tmp_path / "policy")
    folder = tmp_path / "version"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(tmp_path / "policy" / "model.safetensors")
    checksums = await engine.checksums()
    asked = await on_engine.paused_in(engine, 2)
    await load_folder(engine, folder)
    await engine.label(NEW)
    assert not asked.done(), "an answer was finished in the pause"
    await engine.resume()
    for answer in await asked:
        assert [version for _, version in answer.version_starts] == [OLD, NEW]
        assert len(answer.token_ids) == len(answer.logprobs) == 300
    assert await engine.checksums() == checksums, "the same weights were loaded"


@pytest.mark.parametrize("damage", ["no file", "a bare name", "cut off", "too long", "no header"])
async def test_a_folder_without_whole_files_is_refused_and_the_engine_lives(
    engine: InferenceEngine, tmp_path: Path, damage: str
):
    write_policy(tmp_path / "policy")
    whole = (tmp_path / "policy" / "model.safetensors").read_bytes()
    file = tmp_path / "model.safetensors"
    match damage:
        case "a bare name":
            file.symlink_to(tmp_path / "gone")
        case "cut off":
            file.write_bytes(whole[:-1])
        case "too long":
            file.write_bytes(whole + b"0")
        case "no header":
            file.write_bytes(b"not safetensors at all")
    await pause(engine)
    with pytest.raises(EngineError):
        await load_folder(engine, tmp_path)
    await engine.resume()
    (answer,) = await engine.sample(PROMPT, SHORT, count=1)
    assert answer.version_starts == [(0, OLD)]


@pytest.mark.integration
async def test_a_version_is_staged_while_answers_are_made_and_then_copied(
    sglang: SglangProcess, tmp_path: Path
):
    write_policy(tmp_path / "policy")
    (tmp_path / "damaged").mkdir()
    whole = (tmp_path / "policy" / "model.safetensors").read_bytes()
    (tmp_path / "damaged" / "model.safetensors").write_bytes(whole[:-1])
    async with client_of(sglang, OLD) as engine:
        held = digest_of(await engine.checksums())
        for _ in range(TRIES):
            asked = asyncio.create_task(engine.sample(PROMPT, LONG, count=2))
            await until_load(
                sglang, lambda load, asked=asked: load.num_running == 2 or asked.done()
            )
            with pytest.raises(EngineError, match="stage: SafetensorError: Error while"):
                await engine.stage_folder(tmp_path / "damaged", NEW)
            staged = await engine.stage_folder(tmp_path / "policy", NEW)
            assert staged.keys() == {"stage", "prove"}
            refused = await engine.adopt_folder(tmp_path / "policy", NEW, digest="another")
            assert digest_of(refused.differing) == held
            assert (refused.is_paused, refused.phase_seconds.keys()) == (False, {"verify"})
            await engine.stage_folder(tmp_path / "policy", NEW)
            adopted = await engine.adopt_folder(tmp_path / "policy", NEW, digest=held)
            assert adopted.phase_seconds.keys() == {"verify", "pause", "load", "commit"}
            versions = {tuple(v for _, v in answer.version_starts) for answer in await asked}
            if versions == {(OLD, NEW)}:
                return
            await engine.label(OLD)
    raise AssertionError(f"every version came too late: {versions}")


async def test_an_answer_that_is_cancelled_ends(engine: InferenceEngine, on_engine: OnEngine):
    asked = asyncio.create_task(engine.sample(PROMPT, LONG, count=2, seeds=[1, 2]))
    await on_engine.until_busy(asked, 2)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    await on_engine.until_idle(engine)


async def test_engine_reports_its_load_and_that_it_is_idle(
    engine: InferenceEngine, on_engine: OnEngine
):
    await on_engine.until_idle(engine)
    idle = await engine.load()
    assert (idle.num_running, idle.num_waiting, idle.used_tokens) == (0, 0, 0)
    assert (idle.capacity_tokens, idle.kv_use) == (CACHED, 0.0)
    for _ in range(TRIES):  # to read it twice while they are in the making
        asked = asyncio.create_task(engine.sample(PROMPT, LONG, count=3, seeds=[1, 2, 3]))
        busy = [idle]
        while not asked.done():
            busy.append(await engine.load())
            await asyncio.sleep(0.02)
        used = sorted({load.used_tokens for load in busy if load.num_running == 3})
        if len(used) > 1:
            break
    assert len(used) > 1
    assert 3 <= used[0] < used[-1] <= 3 * (len(PROMPT) + 300)
    for load in busy:
        assert load.num_running + load.num_waiting <= 3
        assert load.kv_use == load.used_tokens / CACHED
        assert load.num_retractions == idle.num_retractions
    await load_of(engine, lambda load: (load.num_running, load.used_tokens) == (0, 0))


async def test_answers_that_do_not_fit_are_retracted_counted_and_finished_all_the_same(
    engine: InferenceEngine, on_engine: OnEngine
):
    await on_engine.until_idle(engine)
    before = await engine.load()
    seeds = range(1, 25)  # 24 answers of 300 tokens are 1.8 times the cache
    asked = asyncio.create_task(engine.sample(PROMPT, LONG, count=24, seeds=seeds))
    full = await load_of(
        engine, lambda load: load.num_retractions > before.num_retractions or asked.done()
    )
    assert full.num_retractions > before.num_retractions
    answers = await asked
    assert [len(answer.token_ids) for answer in answers] == [300] * 24
    assert [len(answer.logprobs) for answer in answers] == [300] * 24
    after = await engine.load()
    assert after.num_retractions >= full.num_retractions


async def test_pause_is_no_retraction_and_the_load_is_reported_in_it(
    engine: InferenceEngine, on_engine: OnEngine
):
    before = await engine.load()
    asked = await on_engine.paused_in(engine, 3)
    paused = await engine.load()
    assert paused.num_running + paused.num_waiting == 3
    await engine.resume()
    await asked
    assert (await engine.load()).num_retractions == before.num_retractions


async def load_of(engine: InferenceEngine, is_enough: Callable[[EngineLoad], bool]) -> EngineLoad:
    """Wait until an engine is so busy."""
    seen: list[EngineLoad] = []

    async def poll() -> bool:
        seen.append(await engine.load())
        return is_enough(seen[-1])

    await until_async(poll, lambda: f"it is busy with {seen[-3:]}")
    return seen[-1]

"""Seeds and stops on a real SGLang server."""

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator

import pytest

from slipstream.generators.engine import Completion, SamplingParams
from slipstream.generators.sglang.engine import SglangEngine
from slipstream.generators.sglang.process import SglangProcess
from slipstream.wire.messages.versions import PolicyVersion
from tests.support.tiny_run import sglang_server
from tests.support.waiting import HANG_S

pytestmark = pytest.mark.integration
PROMPT = [3, 4, 13]
PARAMS = SamplingParams(temperature=1.0, max_new_tokens=40, min_new_tokens=40)
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=60, min_new_tokens=60)
NUCLEUS = SamplingParams(temperature=1.0, max_new_tokens=60, min_new_tokens=60, top_p=0.5, top_k=9)


@pytest.fixture(scope="module")
def server() -> Iterator[SglangProcess]:
    with sglang_server() as process:
        yield process


def on(server: SglangProcess, scenario: Callable[[SglangEngine], Awaitable[None]]) -> None:
    async def run() -> None:
        engine = SglangEngine(
            server.url, server.api_key, request_timeout_s=HANG_S, control_timeout_s=HANG_S
        )
        try:
            await engine.label(PolicyVersion(1, 0))
            await scenario(engine)
        finally:
            await engine.close()

    asyncio.run(run())


def ids(completions: list[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


def test_the_same_seed_gives_the_same_answer_whatever_ran_before(server: SglangProcess):
    async def scenario(engine: SglangEngine) -> None:
        (first,) = ids(await engine.sample(PROMPT, PARAMS, count=1, seeds=[7]))
        (second,) = ids(await engine.sample(PROMPT, PARAMS, count=1, seeds=[7]))
        await engine.sample([5, 6], PARAMS, count=3)
        (third,) = ids(await engine.sample(PROMPT, PARAMS, count=1, seeds=[7]))
        assert first == second == third
        (other,) = ids(await engine.sample(PROMPT, PARAMS, count=1, seeds=[2**63 - 1]))
        assert other != first
        unseeded = ids(await engine.sample(PROMPT, PARAMS, count=3))
        assert len({tuple(answer) for answer in unseeded}) == 3

    on(server, scenario)


def test_a_seeded_answer_is_the_same_beside_others_greedy_and_truncated_ones_too(
    server: SglangProcess,
):
    async def scenario(engine: SglangEngine) -> None:
        (alone,) = ids(await engine.sample(PROMPT, PARAMS, count=1, seeds=[11]))
        (greedy,) = ids(await engine.sample(PROMPT, GREEDY, count=1))
        (nucleus,) = ids(await engine.sample(PROMPT, NUCLEUS, count=1, seeds=[12]))
        beside_greedy, beside_nucleus, among = await asyncio.gather(
            engine.sample(PROMPT, GREEDY, count=1),
            engine.sample(PROMPT, NUCLEUS, count=1, seeds=[12]),
            engine.sample(PROMPT, PARAMS, count=4, seeds=[9, 10, 11, 12]),
        )
        assert ids(among)[2] == alone
        assert ids(beside_greedy) == [greedy]
        assert ids(beside_nucleus) == [nucleus]

    on(server, scenario)


def test_first_tokens_of_many_seeds_follow_the_softmax(server: SglangProcess):
    async def scenario(engine: SglangEngine) -> None:
        one_token = SamplingParams(temperature=0.7, max_new_tokens=1)
        answers = await engine.sample(PROMPT, one_token, count=3000, seeds=range(3000))
        counts = Counter(answer.token_ids[0] for answer in answers)
        probs = {answer.token_ids[0]: math.exp(answer.logprobs[0]) for answer in answers}
        common = {token: p for token, p in probs.items() if p * 3000 >= 5}
        rest = 1.0 - sum(common.values())
        chi_square = sum((counts[t] - 3000 * p) ** 2 / (3000 * p) for t, p in common.items())
        rare = 3000 - sum(counts[token] for token in common)
        chi_square += (rare - 3000 * rest) ** 2 / (3000 * rest)
        degrees = len(common)
        assert degrees > 5
        assert chi_square < degrees + 4.5 * math.sqrt(2 * degrees)

    on(server, scenario)


def test_a_response_ends_after_a_stop_token_or_a_stop_text(server: SglangProcess):
    async def scenario(engine: SglangEngine) -> None:
        stop_id, text_id = 9, 12  # "6" and "9" of the quickstart's characters
        by_token = SamplingParams(temperature=1.0, max_new_tokens=400, stop_token_ids=(stop_id,))
        for answer in await engine.sample(PROMPT, by_token, count=8, seeds=range(8)):
            assert answer.finish_reason == "stop"
            assert answer.token_ids[-1] in {stop_id, 2}
            assert stop_id not in answer.token_ids[:-1]
        by_text = SamplingParams(temperature=1.0, max_new_tokens=400, stop=("9",))
        for answer in await engine.sample(PROMPT, by_text, count=8, seeds=range(8)):
            assert answer.token_ids[-1] in {text_id, 2}
            assert text_id not in answer.token_ids[:-1]
            assert len(answer.logprobs) == len(answer.token_ids)
        barred = SamplingParams(
            temperature=1.0, max_new_tokens=60, min_new_tokens=50, stop_token_ids=(stop_id,)
        )
        for answer in await engine.sample(PROMPT, barred, count=8, seeds=range(8)):
            assert not {stop_id, 2} & set(answer.token_ids[:50])

    on(server, scenario)

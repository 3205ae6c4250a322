"""What the client of an engine makes of its answers to /generate, and what it asks for."""

import asyncio
import base64
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import pytest
from aiohttp import web

from slipstream.generators.engine import Completion, ExpertLayers, SamplingParams, Scores
from slipstream.generators.sglang.engine import SglangEngine, scores_of
from slipstream.wire.errors import EngineError
from slipstream.wire.messages.versions import PolicyVersion
from tests.support.waiting import HANG_S

T = TypeVar("T")
PROMPT = [3, 4]
PLAIN = SamplingParams(temperature=1.0, max_new_tokens=2, top_p=0.9)


def answer(**info: object) -> dict[str, Any]:
    return {
        "output_ids": [5, 2],
        "meta_info": {
            "output_token_logprobs": [[-1.5, 5, None], [-2.5, 2, None]],
            "finish_reason": {"type": "stop"},
            "weight_versions": [{"version": "v1.3", "start": 0, "end": 2}],
            **info,
        },
    }


def sampled(params: SamplingParams, given: dict[str, Any]) -> tuple[Completion, dict[str, Any]]:
    """Return what the client makes of one answer, and what it asked."""

    async def sample(engine: SglangEngine) -> Completion:
        (completion,) = await engine.sample(PROMPT, params, count=1)
        return completion

    return told("/generate", [given], sample)


def told(
    path: str, given: object, ask: Callable[[SglangEngine], Awaitable[T]]
) -> tuple[T, dict[str, Any]]:
    """Return what a client makes of an answer to a request, and that request."""
    asked: list[dict[str, Any]] = []

    async def answer_to(request: web.Request) -> web.Response:
        asked.append(await request.json())
        return web.json_response(given)

    async def body() -> T:
        app = web.Application()
        app.router.add_post(path, answer_to)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        engine = SglangEngine(
            f"http://127.0.0.1:{runner.addresses[0][1]}",
            "key",
            request_timeout_s=HANG_S,
            control_timeout_s=HANG_S,
        )
        try:
            return await ask(engine)
        finally:
            await engine.close()
            await runner.cleanup()

    return asyncio.run(body()), asked[0]


def test_ids_of_calls_are_of_nine_letters_and_digits_as_templates_of_mistral_ask_for():
    parsed = {"normal_text": "", "calls": [{"name": "look", "parameters": "{}"}] * 2}
    (_, calls, _), _ = told(
        "/parse_function_call", parsed, lambda engine: engine.tool_calls("x", [], "hermes")
    )
    ids = [str(call["id"]) for call in calls]
    assert all(len(one) == 9 and one.isalnum() for one in ids), ids
    assert len(set(ids)) == 2


def test_nothing_is_asked_for_beside_the_tokens_unless_it_is_recorded():
    completion, asked = sampled(PLAIN, answer())
    assert completion.logprobs == [-1.5, -2.5]
    assert completion.kept is None
    assert completion.experts is None
    assert asked["return_sampling_mask"] is asked["return_routed_experts"] is False
    assert "logprob_start_len" not in asked, "SGLang has no logprobs of the prompt by itself"
    assert asked["sampling_params"]["top_k"] == -1


@pytest.mark.parametrize(("top_k", "asked_for"), [(-1, 50), (20, 20), (60, 50)])
def test_logprobs_are_those_over_kept_tokens_of_which_there_is_a_bound(top_k: int, asked_for: int):
    params = SamplingParams(
        temperature=1.0, max_new_tokens=2, top_p=0.9, min_p=0.1, top_k=top_k, max_kept=50
    )
    recorded = {
        "output_token_sampling_mask": [[5, 7, 1], [2]],
        "output_token_sampling_logprobs": [-0.5, 0.0],
    }
    completion, asked = sampled(params, answer(**recorded))
    assert completion.logprobs == [-0.5, 0.0]
    assert completion.kept == [[5, 7, 1], [2]]
    assert asked["return_sampling_mask"] is True
    wanted = {"top_k": asked_for, "top_p": 0.9, "min_p": 0.1}
    assert asked["sampling_params"].items() >= wanted.items()


def test_kept_tokens_that_are_missing_are_an_error():
    for recorded, why in [
        ({}, "unexpected answer"),
        (
            {"output_token_sampling_mask": [[5]], "output_token_sampling_logprobs": [-0.5]},
            "1 masks of 2 tokens",
        ),
    ]:
        params = SamplingParams(temperature=1.0, max_new_tokens=2, max_kept=50)
        with pytest.raises(EngineError, match=why):
            sampled(params, answer(**recorded))


LAYERS = ExpertLayers(total=3, dense=1)
RECORDING = SamplingParams(temperature=1.0, max_new_tokens=2, experts_of=LAYERS)


def encoded(experts: "np.typing.NDArray[np.int32]") -> str:
    return base64.b64encode(experts.astype("<i4").tobytes()).decode()


def test_experts_are_those_of_layers_that_have_them():
    experts = np.arange(3 * 3 * 2, dtype=np.int32).reshape(3, 3, 2)  # of 4 tokens but the last
    completion, asked = sampled(RECORDING, answer(routed_experts=encoded(experts)))
    assert completion.experts is not None
    assert np.array_equal(completion.experts, experts[:, 1:])
    assert asked["return_routed_experts"] is True
    assert asked["routed_experts_start_len"] == 0
    assert asked["session_id"] is None


def test_experts_that_are_known_are_not_asked_for_again():
    experts = np.arange(2 * 3 * 2, dtype=np.int32).reshape(2, 3, 2)  # of tokens 1 and 2 of 4
    params = replace(RECORDING, experts_from=1)
    completion, asked = sampled(params, answer(routed_experts=encoded(experts)))
    assert completion.experts is not None
    assert np.array_equal(completion.experts, experts[:, 1:])
    assert asked["routed_experts_start_len"] == 1
    with pytest.raises(EngineError, match="experts of 2 tokens in 3 layers asked, got"):
        sampled(params, answer(routed_experts=encoded(np.zeros((4, 2, 2), np.int32))))


@pytest.mark.parametrize(
    "info",
    [{}, {"routed_experts": None}, {"routed_experts": encoded(np.zeros((4, 2, 2), np.int32))}],
    ids=["missing", "none", "of-other-sizes"],
)
def test_experts_that_are_missing_or_of_other_sizes_are_an_error(info: dict[str, object]):
    with pytest.raises(EngineError, match="experts of 3 tokens in 3 layers asked, got"):
        sampled(RECORDING, answer(**info))


def scored(
    tokens: list[int], label: str = "v1.4", cached: int = 0, **changed: object
) -> dict[str, Any]:
    rows = [[None, 7, None], *([-0.5 * (i + 1), token, None] for i, token in enumerate(tokens))]
    info = {
        "input_token_logprobs": rows,
        "weight_versions": [{"version": label, "start": 0, "end": 1}],
        "cached_tokens": cached,
    }
    return {"output_ids": [3], "meta_info": info | changed}


SCORED = [[9, 7, 1, 2], [8, 7, 4, 5]]


def test_scores_are_of_the_tokens_after_the_context():
    found = scores_of([scored([1, 2]), scored([4, 5], cached=1)], SCORED, 2)
    assert found == Scores(PolicyVersion(1, 4), [[-0.5, -1.0], [-0.5, -1.0]], 1)


def test_scores_of_a_vocabularys_last_token_are_named_0():
    assert scores_of([scored([1, 2]), scored([4, 0])], SCORED, 2).logprobs == [[-0.5, -1.0]] * 2


def test_scores_under_two_versions_have_none():
    found = scores_of([scored([1, 2]), scored([4, 5], "v1.5")], SCORED, 2)
    assert found.version is None
    named = scores_of([scored([1, 2], "x"), scored([4, 5], "x")], SCORED, 2, PolicyVersion(1, 7))
    assert named.version == PolicyVersion(1, 7)


def test_scores_of_something_else_are_refused():
    for answer, why in [
        (scored([4, 6]), "logprobs of other tokens"),
        (scored([4]), "1 logprobs of other tokens"),
        (scored([4, 5], "default"), "default"),
        (scored([4, 5], input_token_logprobs=None), "unexpected scores"),
        ({"meta_info": {}}, "unexpected scores"),
    ]:
        with pytest.raises(EngineError, match=why):
            scores_of([scored([1, 2]), answer], SCORED, 2)


def test_checksums_are_of_every_rank_that_a_server_has_and_of_no_other():
    ranks = [
        {"parallelism_info": [{"tp_rank": rank}], "checksums": {"w": f"c{rank}"}} for rank in (0, 1)
    ]
    ask = SglangEngine.checksums
    assert list(told("/weights_checker", {"ranks": ranks[:1]}, ask)[0].values()) == ["c0"]
    with pytest.raises(EngineError, match=r"ranks \[0, 1\] answered, it has 1"):
        told("/weights_checker", {"ranks": ranks}, ask)

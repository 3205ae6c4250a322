"""Anthropic's Messages as its JSON; tests/integration/test_agent_clients.py has its own client."""

import json
from typing import Any

import aiohttp
import pytest

from slipstream.generators.capture.messages import read
from slipstream.generators.turns.requests import BadRequestError
from tests.unit.generators.capture.test_capture import CALL, Served, served, user
from tests.unit.generators.capture.test_responses import events_of

LOOK = {"name": "look", "description": "Look.", "input_schema": {"type": "object"}}


async def post(
    it: Served,
    *messages: Any,  # noqa: ANN401 JSON
    path: str = "",
    **options: Any,  # noqa: ANN401 JSON
) -> tuple[int, Any]:
    """Return the status and the body of an answer."""
    body = {"model": "policy", "max_tokens": 200, "messages": list(messages), **options}
    headers = {"x-api-key": it.key, "anthropic-version": "2023-06-01"}
    async with (
        aiohttp.ClientSession(headers=headers) as http,
        http.post(
            f"{it.server.url}/messages/{path}".rstrip("/") + "?beta=true", json=body
        ) as answer,
    ):
        return answer.status, await answer.json()


def says(*blocks: Any) -> dict[str, Any]:  # noqa: ANN401 JSON
    return {"role": "assistant", "content": list(blocks)}


def told(*blocks: Any) -> dict[str, Any]:  # noqa: ANN401 JSON
    return {"role": "user", "content": list(blocks)}


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content, "cache_control": {"type": "ephemeral"}}


async def test_blocks_of_an_answer_continue_its_trajectory():
    async with served("hm</think>let me CALL " + CALL, "found", "bye") as it:
        asked = {"system": [text("Look.")], "tools": [LOOK]}
        status, first = await post(it, user("where?"), **asked)
        assert (status, first["type"], first["role"]) == (200, "message", "assistant")
        assert first["stop_reason"] == "tool_use"
        thought, said, call = first["content"]
        assert (thought["thinking"], said["text"]) == ("hm", "let me ")
        assert (call["type"], call["name"], call["input"]) == ("tool_use", "look", {"at": "it"})
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": [text("here")]}
        history = [told(text("whe"), text("re?")), says(*first["content"]), told(result)]
        _, second = await post(it, *history, **asked)
        assert second["content"] == [{"type": "text", "text": "found", "citations": None}]
        assert second["stop_reason"] == "end_turn"
        assert second["usage"]["output_tokens"] == len("found") + 1
        history = [*history, says(text("found")), told(text("so?"))]
        await post(it, *history, **asked)
        assert it.calls.conversation.branches == ()
        assert "<|end|>\n<|user|><result>here</result>" in it.tokens
        functions = json.loads(it.tokens.partition("<|system|>\n")[2].partition("<|end|>")[0])
        function = {"name": "look", "description": "Look.", "parameters": {"type": "object"}}
        assert functions == [{"type": "function", "function": function}]


async def test_thoughts_that_a_client_leaves_out_are_the_same_history():
    async with served("hm</think>4", "six") as it:
        _, first = await post(it, user("2+2?"))
        await post(it, user("2+2?"), says(first["content"][1]), user("3+3?"))
        assert it.calls.conversation.branches == ()


async def test_one_trajectory_is_told_on_wires_of_both():
    async with served("4", "six") as it:
        await it.client.responses.create(model="policy", input="2+2?", instructions="Add.")
        await post(it, user("2+2?"), says(text("4")), user("3+3?"), system="Add.")
        assert it.calls.conversation.branches == ()


async def test_events_of_a_stream():
    async with served("hm</think>a text of two pieces CALL " + CALL) as it:
        body = {"max_tokens": 99, "messages": [user("?")], "tools": [LOOK]}
        events = await events_of(it, body, "messages")
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert [one["type"] for one in events] == [
        "message_start",
        *(block[0], block[1], *block[1:]),
        *(block[0], block[1], *block[1:]),
        *block,
        *("message_delta", "message_stop"),
    ]
    assert [one["index"] for one in events[1:-2]] == [0] * 4 + [1] * 4 + [2] * 3
    deltas = [one["delta"] for one in events if one["type"] == block[1]]
    assert [one["type"] for one in deltas] == [
        *("thinking_delta", "signature_delta", "text_delta", "text_delta", "input_json_delta")
    ]
    assert "".join(one.get("text", "") for one in deltas) == "a text of two pieces "
    assert json.loads(deltas[-1]["partial_json"]) == {"at": "it"}
    assert events[0]["message"]["content"] == []
    assert events[0]["message"]["usage"]["input_tokens"] == len(it.engine.sampled[0][0])
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    assert events[-2]["usage"]["output_tokens"] == len(it.engine.sampled[0][1])


async def test_why_a_reply_ended():
    async with served("x" * 50, "yes, STOP", "no") as it:
        assert (await post(it, user("?"), max_tokens=3))[1]["stop_reason"] == "max_tokens"
        _, stopped = await post(it, user("?"), stop_sequences=["HALT", "STOP"])
        assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "STOP")
        assert it.engine.asked[-1][1].stop == ("HALT", "STOP")
        _, ended = await post(it, user("?"), stop_sequences=["STOP"])
        assert (ended["stop_reason"], ended["stop_sequence"]) == ("end_turn", None)


async def test_tools_that_may_not_be_called_are_not_shown():
    async with served("CALL " + CALL) as it:
        _, answer = await post(it, user("?"), tools=[LOOK], tool_choice={"type": "none"})
        assert answer["content"][0]["text"] == "CALL " + CALL


async def test_a_turn_that_a_client_began_is_continued():
    async with served("5.", "so") as it:
        _, answer = await post(it, user("2+3?"), says(text("It is ")))
        assert answer["content"][0]["text"] == "5."
        await post(it, user("2+3?"), says(text("It is "), text("5.")), user("so?"))
        assert it.calls.conversation.branches == ()
        assert [turn.num_tokens for turn in it.calls.conversation.turns] == [3, 3]
        status, refused = await post(it, user("?"), says(text("hm</think>")))
        assert (status, refused["error"]["param"]) == (400, "messages")
        assert "read as a thought" in refused["error"]["message"]


IMAGE = {"type": "image", "source": {"type": "url", "url": "x"}}


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"container": "c"}, "container"),
        ({"a_field_to_come": 1}, "a_field_to_come"),
        ({"output_config": {"effort": "high", "format": {}}}, "output_config.format"),
        ({"tool_choice": {"type": "other"}}, "tool_choice.type"),
        ({"tools": [LOOK, {"type": "bash_20250124", "name": "bash"}]}, "tools[1]"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"system": [IMAGE]}, "system[0]"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "judge", "content": "?"}]}, "messages[0].role"),
        ({"messages": [user("?"), told(text("?"), IMAGE)]}, "messages[1].content[1]"),
        (
            {"messages": [told({"type": "tool_result", "content": 0})]},
            "messages[0].content[0].content",
        ),
        ({"messages": [told({"type": "tool_use"})]}, "messages[0].content[0]"),
        ({"messages": [says({"type": "tool_use", "name": "look"})]}, "messages[0].content[0]"),
        ({"messages": [says({"type": "redacted_thinking"})]}, "messages[0].content[0]"),
    ],
)
async def test_what_is_not_offered_is_refused_by_name(options: dict[str, Any], param: str):
    async with served("x") as it:
        status, body = await post(it, **{"messages": [user("?")], **options})
        assert (status, body["type"]) == (400, "error")
        assert body["error"]["type"] == "invalid_request_error"
        assert body["error"]["param"] == param
        assert not it.engine.asked


async def test_what_the_run_chooses_or_nobody_sees_is_not_refused():
    async with served("x") as it:
        status, _ = await post(
            it,
            user("?"),
            temperature=0.1,
            top_k=3,
            metadata={"user_id": "me"},
            thinking={"type": "enabled", "budget_tokens": 1024},
            output_config={"effort": "low"},
        )
        assert status == 200
        assert it.engine.asked[0][1].temperature == 1.0


async def test_errors_have_anthropic_s_form():
    async with served("fail", "x", max_tokens=30) as it:
        status, failed = await post(it, user("?"))
        assert (status, failed["error"]["type"]) == (503, "api_error")
        status, large = await post(it, user("?" * 99))
        assert (status, large["error"]["code"]) == (400, "context_length_exceeded")
        status, none = await post(it, user("?"), max_tokens=None)
        assert (status, none["error"]["type"]) == (400, "invalid_request_error")
        assert "`max_tokens`" in none["error"]["message"]
        it.key = "no"
        status, stranger = await post(it, user("?"))
        assert (status, stranger["error"]["type"]) == (401, "authentication_error")


async def test_a_prompt_is_counted_as_it_would_be_asked_and_leaves_nothing():
    async with served("4", "six", max_turns=2, longest_token=1) as it:
        asked = {"system": [text("Look.")], "tools": [LOOK]}
        history = [user("2+2?")]
        for said in ("4", "six"):
            _, counted = await post(it, *history, path="count_tokens", max_tokens=None, **asked)
            _, answer = await post(it, *history, **asked)
            assert counted == {"input_tokens": answer["usage"]["input_tokens"]}
            history += [says(text(said)), user("so?")]
        tokens = it.tokens
        for prompt in ([user("2+2?"), says(text("5")), user("no")], [user("x" * 999_999)]):
            await post(it, *prompt, path="count_tokens", max_tokens=None)
        assert it.calls.first_difference == ""
        assert not it.calls.reached_limit
        assert (it.tokens, len(it.engine.asked)) == (tokens, 2)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"max_tokens": 3}, "max_tokens"),
        ({"max_tokens": None, "messages": []}, "messages"),
        ({"max_tokens": None, "messages": [told(IMAGE)]}, "messages[0].content[0]"),
    ],
)
async def test_what_cannot_be_counted_is_refused_by_name(options: dict[str, Any], param: str):
    async with served() as it:
        asked = {"messages": [user("?")], "path": "count_tokens", **options}
        status, body = await post(it, **asked)
        assert (status, body["error"]["param"]) == (400, param)


@pytest.mark.parametrize("content", [[3], [[]], 3, None, [{"type": "thinking", "thinking": 3}]])
def test_content_of_another_form_is_refused(content: Any):  # noqa: ANN401 JSON
    messages = [{"role": "assistant", "content": content}]
    with pytest.raises(BadRequestError, match=r"messages\[0\]\.content"):
        read(json.dumps({"max_tokens": 1, "messages": messages}).encode())

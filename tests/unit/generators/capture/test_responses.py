"""OpenAI's Responses, as its client and as its JSON."""

import json
from typing import Any

import aiohttp
import msgspec
import openai
import pytest

from slipstream.generators.capture.responses import ResponsesRequest, read
from slipstream.generators.turns.requests import BadRequestError
from tests.unit.generators.capture.test_capture import CALL, Served, served, user

LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": True}


async def respond(it: Served, given: Any, **options: Any) -> Any:  # noqa: ANN401 OpenAI's
    return await it.client.responses.create(model="policy", input=given, **options)


async def events_of(it: Served, body: dict[str, Any], path: str = "responses") -> list[Any]:
    """Return the events of a stream, as they are on the wire."""
    headers = {"x-api-key": it.key}
    async with (
        aiohttp.ClientSession(headers=headers) as http,
        http.post(f"{it.server.url}/{path}", json={**body, "stream": True}) as answer,
    ):
        assert answer.status == 200, await answer.text()
        assert answer.content_type == "text/event-stream"
        events = []
        for part in (await answer.text()).split("\n\n")[:-1]:
            name, data = part.split("\n")
            events.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {events[-1]['type']}"
        return events


async def test_items_of_an_answer_continue_its_trajectory():
    async with served("hm</think>let me CALL " + CALL, "found", "bye") as it:
        history: list[Any] = [user("where?")]
        asked = {"instructions": "Look.", "tools": [LOOK]}
        first = await respond(it, history, **asked)
        assert first.status == "completed"
        thought, said, call = first.output
        assert thought.content[0].text == "hm"
        assert first.output_text == said.content[0].text == "let me "
        assert (call.name, call.arguments) == ("look", '{"at": "it"}')
        found = {"type": "function_call_output", "call_id": call.call_id, "output": "here"}
        history += [*(one.model_dump() for one in first.output), found]
        second = await respond(it, history, **asked)
        assert second.output_text == "found"
        assert second.usage.output_tokens == len("found") + 1
        said = {"type": "message", "role": "assistant", "content": "found"}
        await respond(it, [*history, said, user("so?")], **asked)
        assert it.calls.conversation.branches == ()
        assert "<|end|>\n<|user|><result>here</result>" in it.tokens
        assert it.tokens.startswith('<|system|>\n[{"type": "function", "function": {"name"')


async def test_one_trajectory_is_told_on_both_of_openai_s_wires():
    async with served("4", "six") as it:
        first = await respond(it, "2+2?")
        history = [user("2+2?"), {"role": "assistant", "content": first.output_text}]
        chat = it.client.chat.completions
        await chat.create(model="policy", messages=[*history, user("3+3?")])  # type: ignore[list-item]
        assert it.calls.conversation.branches == ()


async def test_a_stream_of_events_is_what_the_client_puts_together():
    says = "hm</think>a text of more than one piece CALL " + CALL
    async with served(says) as it:
        async with it.client.responses.stream(
            model="policy",
            input="?",
            tools=[LOOK],  # type: ignore[list-item]
        ) as stream:
            kinds = [one.type async for one in stream]
            response = await stream.get_final_response()
        assert response.output_text == "a text of more than one piece "
        assert response.output[-1].arguments == '{"at": "it"}'  # type: ignore[union-attr]
        assert kinds[-1] == "response.completed"


async def test_events_of_a_stream():
    async with served("hm</think>ok CALL " + CALL) as it:
        events = await events_of(it, {"input": "?", "tools": [LOOK]})
    assert [one["sequence_number"] for one in events] == list(range(len(events)))
    item = ["response.output_item.added", "response.output_item.done"]
    part = ["response.content_part.added", "response.content_part.done"]
    assert [one["type"] for one in events] == [
        *("response.created", "response.in_progress"),
        *(item[0], part[0], "response.reasoning_text.delta", "response.reasoning_text.done"),
        *(part[1], item[1]),
        *(item[0], part[0], "response.output_text.delta", "response.output_text.done"),
        *(part[1], item[1]),
        *(item[0], "response.function_call_arguments.delta"),
        *("response.function_call_arguments.done", item[1], "response.completed"),
    ]
    output = events[-1]["response"]["output"]
    assert [one["item"] for one in events if one["type"] == item[1]] == output
    assert [one["type"] for one in output] == ["reasoning", "message", "function_call"]


async def test_a_reply_that_is_cut_off_is_incomplete():
    async with served("x" * 50, "y" * 50) as it:
        response = await respond(it, "?", max_output_tokens=3)
        assert (response.status, response.output_text) == ("incomplete", "xxx")
        assert response.incomplete_details.reason == "max_output_tokens"
        events = await events_of(it, {"input": "?", "max_output_tokens": 3})
        assert events[-1]["type"] == "response.incomplete"
        assert events[-2]["item"]["status"] == "incomplete"


async def test_a_message_that_an_assistant_began_is_continued():
    async with served("a long", " text", "so") as it:
        first = await respond(it, "?", max_output_tokens=6)
        assert first.status == "incomplete"
        history = [user("?"), *(one.model_dump() for one in first.output)]
        second = await respond(it, history)
        assert second.output_text == " text"
        history += [*(one.model_dump() for one in second.output), user("so?")]
        await respond(it, history)  # as two messages side by side, which are one
        assert it.calls.conversation.branches == ()
        assert "\na long text<|end|>\n" in it.tokens
        with pytest.raises(openai.BadRequestError, match="has ended") as caught:
            await respond(it, [*history, {"role": "assistant", "content": "so"}])
        assert caught.value.param == "input"


CONTENT = [{"type": "input_text", "text": "?"}, {"type": "input_image", "image_url": "x"}]


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_tool_calls": 3}, "max_tool_calls"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"text": {"a_field_to_come": 1}}, "text.a_field_to_come"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"extra_body": {"a_field_to_come": 1}}, "a_field_to_come"),
        ({"tools": [LOOK, {"type": "web_search"}]}, "tools[1]"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
        ({"input": [user("?"), {"role": "user", "content": CONTENT}]}, "input[1].content[1]"),
        ({"input": [{"role": "judge", "content": "?"}]}, "input[0].role"),
        ({"input": [{"type": "function_call", "name": "look"}]}, "input[0]"),
    ],
)
async def test_what_is_not_offered_is_refused_by_name(options: dict[str, Any], param: str):
    async with served("x") as it:
        with pytest.raises(openai.BadRequestError) as caught:
            await it.client.responses.create(**{"model": "policy", "input": "?", **options})
        assert caught.value.param == param
        assert param in str(caught.value)
        assert not it.engine.asked


async def test_what_the_run_chooses_or_nobody_sees_is_not_refused():
    async with served("x") as it:
        response = await respond(
            it,
            "?",
            temperature=0.1,
            store=False,
            reasoning={"effort": "high"},
            include=["reasoning.encrypted_content"],
            prompt_cache_key="me",
            metadata={"a": "b"},
            text={"verbosity": "low", "format": None},
            extra_body={"previous_response_id": None},
        )
        assert response.metadata == {"a": "b"}
        assert it.engine.asked[0][1].temperature == 1.0


def test_each_field_of_the_client_is_honoured_ignored_or_refused():
    """Fields of OpenAI's client; one that is new is refused until somebody decides."""
    kinds = openai.types.responses.response_create_params.ResponseCreateParamsNonStreaming
    known = set(ResponsesRequest.__struct_fields__)
    assert set(kinds.__annotations__) - known == {
        *("conversation", "max_tool_calls", "previous_response_id", "prompt")
    }


def test_what_is_given_back_is_small():
    """Events repeat it three times."""
    for name, value in (("metadata", {"a": "b" * 513}), ("tool_choice", "x" * 99)):
        with pytest.raises(msgspec.ValidationError, match=name):
            read(json.dumps({"input": "?", name: value}).encode())


def test_parts_of_an_assistant_are_one_message():
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "rules"}]},
        {"type": "reasoning", "id": "rs", "summary": [], "content": None},
        {"type": "message", "role": "assistant", "content": "so"},
        {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "go", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "here"},
    ]
    request = read(json.dumps({"input": items}).encode()).request
    roles = [one["role"] for one in request.messages]  # type: ignore[union-attr]
    assert roles == ["developer", "assistant", "tool"]
    with pytest.raises(BadRequestError, match=r"input\[0\] of type None"):
        read(json.dumps({"input": [{"type": None}]}).encode())

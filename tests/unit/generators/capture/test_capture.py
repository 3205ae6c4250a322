"""The endpoint as OpenAI's own client sees it, before an engine that says what it is told."""

import asyncio
import io
import json
import random
import secrets
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import httpx
import openai
import pytest
import yarl

from slipstream.broker.listening.gate import Limit
from slipstream.generators.capture.server import CaptureServer
from slipstream.generators.engine import Completion, SamplingParams
from slipstream.generators.text.chat_template import ChatTemplate
from slipstream.generators.turns.calls import TrajectoryCalls
from slipstream.generators.turns.conversation import Conversation
from slipstream.generators.turns.histories import numbered
from slipstream.generators.turns.images import TrajectoryImages
from slipstream.generators.turns.rendering import MessageRendering
from slipstream.generators.turns.replies import ParsedReply
from slipstream.generators.turns.requests import MAX_REQUEST_BYTES, ChatRequest, TextRequest
from slipstream.wire.errors import EngineError, EngineRefusedError
from slipstream.wire.messages.trajectory import Json
from slipstream.wire.messages.versions import PolicyVersion
from tests.support.waiting import HANG_S, until_async
from tests.unit.generators.turns.test_rendering import END, STOP, TOOLS, decode, encode, token_text

CALL = '{"name": "look", "arguments": {"at": "it"}}'
VOCABULARY = 2_000
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # a client reads certificates otherwise
GO = {"type": "function", "function": {"name": "go", "parameters": {"type": "object"}}}
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@dataclass
class Engine:
    """Says the next thing, and remembers what it was asked."""

    says: list[str] = field(default_factory=list)
    asked: list[tuple[str, SamplingParams]] = field(default_factory=list)
    sampled: list[tuple[list[int], list[int]]] = field(default_factory=list)
    hold: asyncio.Event | None = None
    num_cancelled: int = 0

    async def sample(self, prompt_ids: list[int], params: SamplingParams) -> Completion:
        self.asked.append((decode(prompt_ids), params))
        if self.hold is not None:
            try:
                await self.hold.wait()
            except asyncio.CancelledError:
                self.num_cancelled += 1
                raise
        text = self.says.pop(0)
        if text == "fail":
            raise EngineError("SGLang /generate: 500")
        if text == "refuse":
            raise EngineRefusedError("SGLang /generate: 400: the prompt is too long")
        ids = [*encode(text), END][: params.max_new_tokens]
        self.sampled.append((prompt_ids, ids))
        return Completion(
            token_ids=ids,
            logprobs=[-0.5] * len(ids),
            version_starts=[(0, PolicyVersion(1, len(self.sampled)))],
            finish_reason="stop" if ids[-1] == END else "length",
        )


@dataclass
class Served:
    engine: Engine
    calls: TrajectoryCalls
    server: CaptureServer
    key: str
    client: openai.AsyncOpenAI

    @property
    def tokens(self) -> str:
        return decode(self.calls.conversation.token_ids)

    @property
    def in_flight(self) -> int:
        return len(self.server._agents[self.key].in_flight)


async def parse(text: str, tools: Sequence[Json]) -> ParsedReply:
    thought, _, said = text.rpartition("</think>")
    before, found, call = said.partition("CALL ")
    if not tools or not found:
        return ParsedReply(thought, said, [])
    function = json.loads(call)
    function["arguments"] = json.dumps(function["arguments"])
    one = {"id": f"call_{secrets.token_hex(4)}", "type": "function", "function": function}
    return ParsedReply(thought, before, [one])


@asynccontextmanager
async def served(
    *says: str,
    max_turns: int = 999,
    max_tokens: int = 99_999,
    limit: Limit | None = None,
    idle_s: float = 60.0,
    longest_token: int = 0,
    encoded: Callable[[str], list[int]] = encode,
    template: str = TOOLS,
    images: TrajectoryImages | None = None,
) -> AsyncIterator[Served]:
    engine = Engine(list(says))
    calls = TrajectoryCalls(
        sample=engine.sample,
        params=SamplingParams(temperature=1.0, max_new_tokens=200),
        rendering=MessageRendering(
            ChatTemplate(template, {}, origin="test"), encoded, token_text, {END, STOP}
        ),
        conversation=Conversation(max_turns=max_turns, max_tokens=max_tokens),
        encode=encode,
        decode=lambda ids: decode([one for one in ids if one not in {END, STOP}]),
        parse=parse,
        vocab_size=VOCABULARY,
        longest_token=longest_token,
        images=images,
    )
    server = CaptureServer(
        host="127.0.0.1", port=0, model="policy", token_text=token_text, limit=limit, idle_s=idle_s
    )
    await server.start()
    key = server.open(calls)
    http = openai.DefaultAsyncHttpxClient(verify=NO_TLS)
    client = openai.AsyncOpenAI(base_url=server.url, api_key=key, max_retries=0, http_client=http)
    try:
        yield Served(engine, calls, server, key, client)
    finally:
        await client.close()
        await server.close()


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def ask(it: Served, messages: list[Any], **options: Any) -> Any:  # noqa: ANN401 OpenAI's
    return await it.client.chat.completions.create(model="policy", messages=messages, **options)


async def test_a_second_question_has_the_tokens_of_the_first_and_of_its_reply():
    async with served("4", "six") as it:
        first = await ask(it, [user("2+2?")])
        assert first.choices[0].message.content == "4"
        assert first.choices[0].finish_reason == "stop"
        assert first.usage.completion_tokens == 2
        history = [user("2+2?"), first.choices[0].message, user("3+3?")]
        second = await ask(it, history)
        assert second.choices[0].message.content == "six"
        assert it.calls.conversation.branches == ()
        assert [turn.num_tokens for turn in it.calls.conversation.turns] == [2, 4]
        assert it.tokens == (
            "<|user|>\n2+2?<|end|>\n<|assistant|>\n4<|end|>"
            "\n<|user|>\n3+3?<|end|>\n<|assistant|>\nsix<|end|>"
        )


async def test_calls_of_tools_and_their_results_continue_a_trajectory():
    async with served("let me CALL " + CALL, "found") as it:
        first = await ask(it, [user("where?")], tools=[LOOK])
        (choice,) = first.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "let me "
        (call,) = choice.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("look", '{"at": "it"}')
        result = {"role": "tool", "tool_call_id": call.id, "content": "here"}
        await ask(it, [user("where?"), choice.message, result], tools=[LOOK])
        assert it.calls.conversation.branches == ()
        assert f"let me CALL {CALL}<|end|>\n<|user|><result>here</result>" in it.tokens


async def test_a_stream_says_the_same_in_pieces():
    async with served("a reply of more than one piece", "CALL " + CALL) as it:
        stream = await ask(it, [user("?")], stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == "a reply of more than one piece"
        assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
        assert chunks[-1].usage.completion_tokens == len(text) + 1
        stream = await ask(it, [user("!")], stream=True, tools=[LOOK])
        calls = [c.choices[0].delta.tool_calls async for c in stream if c.choices]
        assert [one[0].function.name for one in calls if one] == ["look"]


async def test_logprobs_are_of_the_chosen_tokens():
    async with served("ab", "cd") as it:
        chat = await ask(it, [user("?")], logprobs=True)
        rows = chat.choices[0].logprobs.content
        assert [(row.token, row.logprob) for row in rows] == [
            ("a", -0.5),
            ("b", -0.5),
            ("<|end|>", -0.5),
        ]
        text = await it.client.completions.create(model="policy", prompt="x", logprobs=0)
        assert text.choices[0].logprobs is not None
        assert text.choices[0].logprobs.tokens == ["c", "d", "<|end|>"]


@pytest.mark.parametrize(
    "rewritten",
    [
        [user("2+3?"), {"role": "assistant", "content": "4"}, user("so?")],  # edited
        [{"role": "system", "content": "they spoke of sums"}, user("so?")],  # compacted
        [user("2+2?"), {"role": "assistant", "content": "four"}, user("so?")],  # put in its mouth
        [user("2+2?")],  # asked again
    ],
)
async def test_a_history_that_was_rewritten_opens_a_branch(rewritten: list[Any]):
    async with served("4", "more") as it:
        await ask(it, [user("2+2?")])
        await ask(it, rewritten)
        conversation = it.calls.conversation
        first = len(encode("<|user|>\n2+2?<|end|>\n<|assistant|>\n4<|end|>"))
        assert conversation.branches == (first,)
        whole = ChatTemplate(TOOLS, {}, origin="test").text(rewritten)
        assert decode(conversation.token_ids[first:]) == whole + "more<|end|>"
        assert [turn.num_tokens for turn in conversation.turns] == [2, 5]


SHOWS_IDS = (  # as templates of Mistral do, which want nine characters
    "{% if tools %}{{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}"
    "{% for call in m.tool_calls or [] %}"
    "{% if call.id | length != 9 %}{{ raise_exception('an id of nine characters') }}{% endif %}"
    "{{ call.id }}: {{ call.function | tojson }}{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
FORMS: dict[str, Callable[[dict[str, Any], list[dict[str, Any]]], object]] = {
    "as it came": lambda _reply, _tools: None,
    "ids of its own": lambda reply, _: reply["tool_calls"][0].update(id="mine"),
    "no ids": lambda reply, _: reply["tool_calls"][0].pop("id"),
    "no type": lambda reply, _: reply["tool_calls"][0].pop("type"),
    "a name": lambda reply, _: reply.update(name="an assistant"),
    "tools the other way round": lambda _, tools: tools.reverse(),
    "keys of tools in another order": lambda _, tools: tools.append(
        dict(reversed(tools.pop().items()))
    ),
    "keys of tools in another order, and trimmed": lambda reply, tools: (
        tools.append(dict(reversed(tools.pop().items()))),
        reply.update(content=reply["content"].strip()),
    ),
    "trimmed as by the template": lambda reply, _: reply.update(content=reply["content"].strip()),
    "arguments in another order": lambda reply, _: reply["tool_calls"][0]["function"].update(
        arguments='{"to":2, "at":1}'
    ),
}


@pytest.mark.parametrize("form", FORMS)
async def test_a_history_that_differs_in_what_no_token_shows_is_the_same(form: str):
    call = 'CALL {"name": "look", "arguments": {"at": 1, "to": 2}}'
    async with served(*[f" so {call}"] * 3, template=SHOWS_IDS) as it:
        messages, tools = [user("?")], [LOOK, {**LOOK, "function": {"name": "go"}}]
        for _ in range(3):
            reply = (await ask(it, messages, tools=tools)).choices[0].message.model_dump()
            FORMS[form](reply, tools)
            found = {"role": "tool", "tool_call_id": reply["tool_calls"][0].get("id", "x")}
            messages = [*messages, reply, {**found, "content": "it"}]
        assert it.calls.conversation.branches == ()
        assert it.calls.first_difference == ""


THINKS = (  # as a template that shows the thoughts of newest replies
    "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content %}<think>"
    "{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.mark.parametrize(("sent", "num_branches"), [("hm", 0), (None, 0), ("another thought", 1)])
async def test_a_thought_comes_apart_and_goes_back_or_is_left_out(
    sent: str | None, num_branches: int
):
    async with served("hm</think>4", "CALL " + CALL, template=THINKS) as it:
        stream = await ask(it, [user("2+2?")], stream=True)
        deltas = [one.choices[0].delta async for one in stream if one.choices]
        thought = "".join(getattr(one, "reasoning_content", "") or "" for one in deltas)
        assert (thought, "".join(one.content or "" for one in deltas)) == ("hm", "4")
        reply: dict[str, Any] = {"role": "assistant", "content": "4"}
        if sent is not None:
            reply["reasoning_content"] = sent
        found = await ask(it, [user("2+2?"), reply, user("sure?")], tools=[GO])
        assert len(it.calls.conversation.branches) == num_branches
        assert found.choices[0].message.tool_calls[0].function.name == "look"
        assert it.calls.rejected["unknown"] == 1, "a call of a tool that there is not"


@pytest.mark.parametrize(
    ("change", "came", "now"),
    [({"at": 2}, ": {\"at\": ' came '1", "2}"), ({"at": 1.0}, "1' came '", ".0}")],
)
async def test_a_history_whose_calls_were_changed_is_another_and_says_where(
    change: Json, came: str, now: str
):
    call = 'CALL {"name": "look", "arguments": {"at": 1}}'
    async with served(f"so {call}", "yes", "no", template=SHOWS_IDS) as it:
        reply = (await ask(it, [user("?")], tools=[LOOK])).choices[0].message.model_dump()
        reply["tool_calls"][0]["id"] = "123456789"
        reply["tool_calls"][0]["function"]["arguments"] = json.dumps(change)
        changed = [user("?"), reply, {"role": "tool", "content": "it"}]
        await ask(it, changed, tools=[LOOK])
        assert len(it.calls.conversation.branches) == 1
        shown = it.calls.first_difference
        assert shown.startswith("after '")
        assert came in shown, shown
        assert f"and now '{now}" in shown, shown
        await ask(it, [user("!")], tools=[LOOK])
        assert it.calls.first_difference == shown, "the first one is kept"


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


async def test_a_role_of_an_agent_that_has_others_began_no_rewritten_history():
    async with served("a plan", "work", "a better plan", "more work", "wrong") as it:
        planner, worker = [system("You plan."), user("?")], [system("You work."), user("?")]
        for _ in range(2):
            for messages in (planner, worker):
                messages += [(await ask(it, messages)).choices[0].message, user("and?")]
        assert len(it.calls.conversation.branches) == 1
        assert it.calls.first_difference == ""
        await ask(it, [*worker[:4], said("more play"), *worker[5:]])
        assert "more ' came 'work<" in it.calls.first_difference, it.calls.first_difference
        assert "now 'play<" in it.calls.first_difference


@pytest.mark.parametrize(
    "shown", [[], [user("1?"), said("one")], [user("1?"), said("one"), user("2?"), said("two")]]
)
async def test_another_task_of_an_agent_is_no_rewritten_history(shown: list[Any]):
    async with served("a", "b", "c") as it:
        for task in ("2+2?", "3+3?"):
            messages = [system("You add."), *shown, user(task)]
            reply = (await ask(it, messages)).choices[0].message
        assert len(it.calls.conversation.branches) == 1
        assert it.calls.first_difference == ""
        changed = said(f"not {reply.content}")
        await ask(it, [*messages, changed, user("and?")])
        assert "|>\\n' came 'b<" in it.calls.first_difference, it.calls.first_difference


@pytest.mark.parametrize(("asked", "reply"), [("?", "a"), ("?", "another"), ("They met.", "a")])
async def test_the_time_in_a_system_message_rewrites_a_history_whatever_else_does(
    asked: str, reply: str
):
    async with served("a", "b") as it:
        await ask(it, [system("It is 10:01."), user("?")])
        await ask(it, [system("It is 10:02."), user(asked), said(reply), user("and?")])
        assert "is 10:0' came '1." in it.calls.first_difference, it.calls.first_difference


async def test_results_in_another_order_than_their_calls_have_another_history():
    """Which result is of which call is what ids say, whatever they are."""
    both = numbered(
        [
            {"role": "assistant", "content": "", "tool_calls": [{"id": "a"}, {"id": "b"}]},
            {"role": "tool", "content": "", "tool_call_id": "b"},
            {"role": "tool", "content": "", "tool_call_id": "a"},
            {"role": "assistant", "content": "", "tool_calls": [{"id": ""}]},
            {"role": "tool", "content": ""},
        ]
    )
    assert [one["tool_call_id"][-1] for one in both if one["role"] == "tool"] == list("100")


async def test_a_text_that_goes_on_keeps_the_tokens_of_the_reply_in_it():
    async with served("b", "d") as it:
        first = await it.client.completions.create(model="policy", prompt="a")
        assert first.choices[0].text == "b"
        await it.client.completions.create(model="policy", prompt="abc")
        assert it.tokens == "ab<|end|>cd<|end|>"
        assert it.calls.conversation.branches == ()


async def test_parallel_calls_are_branches_and_none_is_lost():
    async with served("1", "2", "3") as it:
        await asyncio.gather(*(ask(it, [user("?")]) for _ in range(3)))
        conversation = it.calls.conversation
        assert len(conversation.branches) == 2
        assert sum(turn.num_tokens for turn in conversation.turns) == 6


async def test_a_client_that_goes_away_ends_the_generation_and_leaves_nothing():
    async with served("late", "on time") as it:
        it.engine.hold = asyncio.Event()
        call = asyncio.create_task(ask(it, [user("?")]))
        await until_async(lambda: it.engine.asked)
        call.cancel()
        await until_async(lambda: it.engine.num_cancelled)
        assert it.calls.conversation.num_tokens == 0
        it.engine.hold = None
        await ask(it, [user("?")])
        assert it.calls.conversation.num_turns == 1


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
async def test_a_call_that_is_asked_for_is_not_forced(choice: object):
    async with served("no") as it:
        found = await ask(it, [user("?")], tools=[LOOK], tool_choice=choice)
        assert found.choices[0].message.content == "no"


HUGE = "x" * 200_000
SAYS = {"name": "look", "arguments": json.dumps({"at": HUGE})}
CALLS = {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": SAYS}]}


@pytest.mark.parametrize(
    ("messages", "options"),
    [
        ([user(HUGE)], {}),
        ([user("?"), CALLS, {"role": "tool", "tool_call_id": "1", "content": "it"}], {}),
        ([{"role": "user", "name": HUGE, "content": "?"}], {}),
        ([{"role": "tool", "tool_call_id": HUGE, "content": "?"}], {}),
        ([user("?")], {"tools": [{**LOOK, "function": {"name": "look", "description": HUGE}}]}),
        ([user("")] * 501, {}),
        ([user("?")], {"user": HUGE * 5}),
        ([{**user("?"), "more": [[]] * 80_000}], {}),
    ],
    ids=[
        *("content", "arguments", "name", "id", "tools", "number", "what is not read"),
        *("empty values",),
    ],
)
async def test_a_request_larger_than_its_trajectory_is_refused_before_it_is_rendered(
    messages: list[dict[str, Any]], options: dict[str, Any]
):
    """Contents alone were counted: 900,000 empty messages held up a generator for 91 s."""

    rendered: list[str] = []

    def encoded(text: str) -> list[int]:
        rendered.append(text)
        return encode(text)

    async with served("x", max_tokens=500, longest_token=10, encoded=encoded) as it:
        with pytest.raises(openai.BadRequestError, match=r"environment\.max_tokens") as caught:
            await ask(it, messages, **options)
        assert caught.value.code == "context_length_exceeded"
        assert (rendered, it.engine.asked) == ([], [])
        assert (await ask(it, [user("?")], tools=[LOOK])).choices[0].message.content == "x"


@pytest.mark.parametrize("where", ["content", "tools"])
async def test_others_are_answered_while_a_large_request_is_rendered(where: str):
    answered = threading.Event()

    def encoded(text: str) -> list[int]:
        if HUGE in text:
            assert answered.wait(HANG_S), "nobody was answered meanwhile"
        return encode(text)

    described = {"name": "look", "description": HUGE}
    options = {"tools": [{"type": "function", "function": described}]}
    async with served("x", max_tokens=500_000, encoded=encoded) as it:
        large = asyncio.create_task(
            ask(it, [user(HUGE)]) if where == "content" else ask(it, [user("?")], **options)
        )
        await until_async(lambda: it.in_flight)
        assert (await it.client.models.list()).data
        answered.set()
        assert (await large).choices[0].message.content == "x"


@pytest.mark.parametrize(
    ("options", "param", "why"),
    [
        ({"n": 2}, "n", "one reply"),
        ({"top_logprobs": 3, "logprobs": True}, "top_logprobs", "only chosen tokens"),
        ({"response_format": {"type": "json_object"}}, "response_format", "forced into a form"),
        ({"stop": [""]}, "stop", "empty"),
        ({"functions": [{"name": "look"}]}, "functions", "not offered"),
        ({"audio": {"voice": "x", "format": "wav"}}, "audio", "not offered"),
        ({"modalities": ["text", "audio"]}, "modalities", "are text"),
        ({"logit_bias": {"5": -100}}, "logit_bias", "not offered"),
        ({"extra_body": {"chat_template_kwargs": {}}}, "chat_template_kwargs", "not offered"),
        ({"tool_choice": "any"}, "tool_choice", "any is not offered"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice", "allowed_tools is not"),
        ({"tools": [{**LOOK, "type": "custom"}]}, "tools", "is no tool"),
        ({"stop": "x" * 1_025}, "stop", "1025 characters"),
        ({"messages": [{**said("x"), "function_call": {}}]}, "messages", "function_call of a"),
        ({"messages": [{**said("x"), "refusal": "no"}]}, "messages", "refusal of a message"),
    ],
)
async def test_what_is_not_offered_is_refused_by_name(
    options: dict[str, Any], param: str, why: str
):
    async with served("x") as it:
        with pytest.raises(openai.BadRequestError, match=why) as caught:
            await ask(it, **{"messages": [user("?")], **options})
        assert caught.value.param == param
        assert not it.engine.asked


def test_each_field_of_the_client_is_honoured_ignored_or_refused():
    """Fields of OpenAI's client; one that is new is refused until somebody decides."""
    chat = openai.types.chat.completion_create_params.CompletionCreateParamsBase
    text = openai.types.completion_create_params.CompletionCreateParamsBase
    assert set(chat.__annotations__) - set(ChatRequest.__struct_fields__) == {
        *("audio", "function_call", "functions", "logit_bias", "web_search_options")
    }
    assert set(text.__annotations__) - set(TextRequest.__struct_fields__) == {"logit_bias"}


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"{", "not a request"),
        (b"\xff\xfe", "not a request"),
        (b'{"messages": [{"role": "user", "content": "\xff"}]}', "not a request"),
        (b'{"messages": "hello"}', "not a request"),
        (b'{"messages": []}', "messages is empty"),
        (b'{"messages": [{"role": 4}]}', "has the role 4"),
        (b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "no data URL"),
        (b'{"messages": [{"role": "assistant", "tool_calls": [3]}]}', "is not a call"),
        (b'{"messages": [{"role": "user", "content": "?"}], "max_tokens": 0}', "not a request"),
    ],
)
async def test_bad_requests_have_reasons(body: bytes, why: str):
    async with served("x") as it, aiohttp.ClientSession() as http:
        headers = {"Authorization": f"Bearer {it.key}"}
        url = f"{it.server.url}/chat/completions"
        async with http.post(url, data=body, headers=headers) as answer:
            assert answer.status == 400
            assert why in (await answer.json())["error"]["message"]


async def test_without_its_key_nobody_speaks_for_a_trajectory():
    async with served("x") as it:
        stranger = it.client.with_options(api_key="no")
        with pytest.raises(openai.AuthenticationError) as caught:
            await stranger.chat.completions.create(model="p", messages=[user("?")])
        assert caught.value.response.headers["Connection"] == "close", "as it is"
        await it.server.end(it.key)
        with pytest.raises(openai.AuthenticationError):
            await ask(it, [user("?")])


@pytest.mark.parametrize(
    ("max_tokens", "has_ended", "status"), [(3, False, 400), (999, True, 401), (999, False, 503)]
)
async def test_a_client_tries_again_what_may_succeed_and_nothing_else(
    max_tokens: int, status: int, *, has_ended: bool
):
    seen: list[int] = []

    async def note(response: httpx.Response) -> None:
        seen.append(response.status_code)

    async with served("fail", "yes", max_tokens=max_tokens) as it:
        if has_ended:
            await it.server.end(it.key)
        http = openai.DefaultAsyncHttpxClient(verify=NO_TLS, event_hooks={"response": [note]})
        client = it.client.with_options(http_client=http, max_retries=1)
        with suppress(openai.APIStatusError):
            await client.chat.completions.create(model="policy", messages=[user("2+2?")])
        await http.aclose()
    assert seen == ([503, 200] if status == 503 else [status])


@pytest.mark.parametrize(
    ("method", "path", "size", "status", "kind"),
    [
        ("POST", "embeddings", 0, 404, "invalid_request_error"),
        ("GET", "responses/resp_1", 0, 404, "invalid_request_error"),
        ("GET", "chat/completions", 0, 405, "invalid_request_error"),
        ("POST", "responses", MAX_REQUEST_BYTES, 413, "invalid_request_error"),
        ("POST", "messages/batches", 0, 404, "not_found_error"),
        ("DELETE", "messages", 0, 405, "invalid_request_error"),
        ("POST", "messages/count_tokens", MAX_REQUEST_BYTES, 413, "request_too_large"),
    ],
)
async def test_what_the_server_itself_refuses_has_the_form_of_a_wire(
    method: str, path: str, size: int, status: int, kind: str
):
    async with served() as it, aiohttp.ClientSession(headers={"x-api-key": it.key}) as http:
        url = f"{it.server.url}/{path}"
        async with http.request(method, url, data=io.BytesIO(b" " * (size + 1))) as answer:
            body = await answer.json()
            assert answer.status == status
            assert ("Allow" in answer.headers) is (status == 405)
    assert body["error"]["type"] == kind
    assert f"{method} /v1/{path}: " in body["error"]["message"]
    assert (body.get("type") == "error") is ("messages" in path)


async def test_an_engine_that_fails_is_no_fault_of_the_client():
    async with served("fail") as it:
        with pytest.raises(openai.InternalServerError, match="SGLang /generate: 500"):
            await ask(it, [user("?")])
        assert it.calls.conversation.num_turns == 0


async def test_what_the_engine_refuses_is_the_fault_of_the_request():
    async with served("refuse", "fail", "b") as it:
        with pytest.raises(openai.BadRequestError, match="the engine refuses it"):
            await ask(it, [user("?")])
        assert it.calls.engine_error is None
        with pytest.raises(openai.InternalServerError):
            await ask(it, [user("?")])
        assert it.calls.engine_error is not None
        await ask(it, [user("?")])
        assert it.calls.engine_error is None, "it was tried again"


@pytest.mark.parametrize("wrong", [-1, VOCABULARY])
async def test_a_prompt_of_tokens_that_there_are_not_reaches_no_engine(wrong: int):
    async with served("b") as it:
        with pytest.raises(openai.BadRequestError, match=f"0 to {VOCABULARY - 1}"):
            await it.client.completions.create(model="policy", prompt=[97, wrong])
        assert not it.engine.asked


async def test_what_was_said_is_known_of_texts_and_without_what_nobody_got():
    async with served("b", "d", "f") as it:
        await it.client.completions.create(model="policy", prompt="a")
        said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        assert it.calls.newest_history == said
        reply = await it.calls.complete(TextRequest(prompt="abc"))
        it.calls.keep(reply)
        assert it.calls.newest_history[-1]["content"] == "d"
        it.calls.abandon(reply)
        assert it.calls.newest_history == said
        await it.client.completions.create(model="policy", prompt=encode("e"))
        assert it.calls.newest_history[0]["content"] == "e"


async def test_a_reply_is_no_longer_than_the_trajectory_may_be():
    async with served("x" * 50, "y", max_tokens=60) as it:
        reply = await ask(it, [user("?")])
        assert reply.choices[0].finish_reason == "length"
        assert it.calls.conversation.num_tokens == 60
        with pytest.raises(openai.BadRequestError, match="60 at most") as caught:
            await ask(it, [user("?"), reply.choices[0].message, user("and?")])
        assert caught.value.code == "context_length_exceeded"


async def test_a_client_s_own_sampling_parameters_do_not_change_the_distribution():
    async with served("x") as it:
        await ask(it, [user("?")], temperature=0.1, top_p=0.5, max_tokens=7, stop=["!"])
        ((_, params),) = it.engine.asked
        assert (params.temperature, params.top_p) == (1.0, 1.0)
        assert (params.max_new_tokens, params.stop) == (7, ("!",))


@pytest.mark.parametrize("seed", range(20))
async def test_what_is_trained_is_what_was_sampled_whatever_a_client_does_to_its_history(seed: int):
    """Continue, edit, cut, compact, call tools, ask in parallel, begin replies, go away."""
    rng = random.Random(seed)

    def text() -> str:
        return "".join(rng.choices("ab <|>\n", k=rng.randint(1, 6)))

    async def turn(it: Served, messages: list[Any]) -> list[Any]:
        reply = await ask(it, messages, tools=[LOOK], stream=False)
        return [*messages, reply.choices[0].message]

    says = [f"{text()}CALL {CALL}" if rng.random() < 0.3 else text() for _ in range(60)]
    async with served(*says) as it:
        histories: list[list[Any]] = [[]]
        for _ in range(25):
            history = list(rng.choice(histories))
            match rng.choice(
                ["on", "on", "on", "cut", "edit", "compact", "both", "begin", "leave"]
            ):
                case "cut":
                    history = history[: rng.randint(0, len(history))]
                case "edit" if history:
                    history[rng.randrange(len(history))] = user(text())
                case "compact":
                    history = [{"role": "system", "content": text()}, *history[-1:]]
                case "both":
                    histories += await asyncio.gather(
                        turn(it, [*history, user("1")]), turn(it, [*history, user("1")])
                    )
                    continue
                case "begin":
                    begun = said(text())
                    *asked, reply = await turn(it, [*history, user("begin"), begun])
                    begun["content"] += reply.content or ""
                    begun["tool_calls"] = reply.model_dump()["tool_calls"] or []
                    histories.append([*asked[:-1], begun])
                    continue
                case "leave":
                    it.engine.hold = asyncio.Event()
                    call = asyncio.create_task(turn(it, [*history, user(text())]))
                    await asyncio.sleep(rng.uniform(0, 0.01))
                    call.cancel()
                    it.engine.hold.set()
                    await asyncio.gather(call, return_exceptions=True)
                    await until_async(lambda: not it.in_flight)
                    it.engine.hold = None
                    continue
                case _:
                    pass
            histories.append(await turn(it, [*history, user(text())]))
        conversation = it.calls.conversation
        ids = conversation.token_ids
        trained = sorted(tuple(ids[t.first_token : t.end]) for t in conversation.turns)
        sampled = sorted(tuple(reply) for _, reply in it.engine.sampled)
        for one in trained:  # each as the engine sampled it, and no more often
            sampled.remove(one)
        assert len(sampled) == it.calls.num_abandoned


async def test_a_trajectory_takes_no_more_calls_at_a_time_than_it_may_have():
    async with served(*"abc", max_turns=2) as it:
        it.engine.hold = asyncio.Event()
        calls = [asyncio.create_task(ask(it, [user("?")])) for _ in range(2)]
        await until_async(lambda: len(it.engine.asked) == 2)
        with pytest.raises(openai.RateLimitError, match=r"environment\.max_turns"):
            await ask(it, [user("?")])
        await it.server.end(it.key)
        assert it.calls.conversation.num_tokens == 0
        assert it.engine.num_cancelled == 2
        await asyncio.gather(*calls, return_exceptions=True)


class Door:
    """Connections to an endpoint, without a client of HTTP. All are closed at its end."""

    def __init__(self, it: Served) -> None:
        self._it = it
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> "Door":
        return self

    async def __aexit__(self, *_error: object) -> None:
        for writer in self._writers:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def connect(self, say: bytes = b"") -> asyncio.StreamReader:
        address = yarl.URL(self._it.server.url)
        reader, writer = await asyncio.open_connection(address.host, address.port)
        self._writers.append(writer)
        writer.write(say)
        return reader

    async def status(self, key: str) -> int:
        """Return how a request on a new connection is answered; that stays open."""
        asking = (
            f"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n\r\n"
        )
        line = await (await self.connect(asking.encode())).readline()
        return int(line.split()[1])

    def leave(self) -> None:
        """Close the first one."""
        self._writers[0].close()

    @property
    def num_open(self) -> int:
        return self._it.server._http.num_open


async def test_connections_past_a_bound_are_refused_and_counted(caplog: pytest.LogCaptureFixture):
    async with served("yes", limit=Limit(3, "ulimit -n")) as it, Door(it) as door:
        for _ in range(3):
            await door.connect()
        await until_async(lambda: door.num_open == 3)
        for _ in range(20):
            with suppress(ConnectionError):
                assert await (await door.connect()).read() == b""
        with pytest.raises(openai.APIConnectionError):
            await ask(it, [user("?")])
        assert it.server.num_refused == 21
        door.leave()
        await until_async(lambda: door.num_open < 3)
        assert (await ask(it, [user("?")])).choices[0].message.content == "yes"
    assert len([one for one in caplog.messages if "3 are open, of all" in one]) == 1


async def test_one_trajectory_cannot_take_all_connections():
    async with served("yes", max_turns=2) as it, Door(it) as door:
        other = it.server.open(it.calls)
        assert [await door.status(it.key) for _ in range(19)] == [*[200] * 18, 429]
        assert await door.status(other) == 200
        assert it.server.num_refused == 1
        door.leave()
        await until_async(lambda: door.num_open == 18)
        assert await door.status(it.key) == 200
        await it.server.end(it.key)  # with all that it has open
        await until_async(lambda: door.num_open == 1)


@pytest.mark.parametrize("begun", [b"", b"POST /v1/chat/completions HTTP/1.1\r\nHost: "])
async def test_a_connection_that_asks_nothing_is_closed(begun: bytes):
    async with served("yes", idle_s=0.05) as it, Door(it) as door:
        assert await (await door.connect(begun)).read() == b""


async def test_a_reply_that_was_cut_off_is_continued_from_its_tokens():
    async with served("hm</think>a long text", "ng text", " and more", "so") as it:
        history = [user("?")]
        first = (await ask(it, history, max_tokens=14)).choices[0]
        assert (first.finish_reason, first.message.content) == ("length", "a lo")
        message = {"role": "assistant", "content": "a lo"}  # without its thought
        second = (await ask(it, [*history, message], max_tokens=7)).choices[0].message
        assert (second.content, getattr(second, "reasoning_content", None)) == ("ng text", None)
        message["content"] += second.content
        third = (await ask(it, [*history, message])).choices[0].message.content
        assert third == " and more"
        message["content"] += third
        assert it.calls.newest_history[1:] == [
            {"role": "assistant", "content": "a long text and more", "reasoning_content": "hm"}
        ]
        await ask(it, [*history, message, user("so?")])
        assert it.calls.conversation.branches == ()
        assert it.tokens == (
            "<|user|>\n?<|end|>\n<|assistant|>\nhm</think>a long text and more<|end|>"
            "\n<|user|>\nso?<|end|>\n<|assistant|>\nso<|end|>"
        )
        assert [turn.num_tokens for turn in it.calls.conversation.turns] == [31, 3]


async def test_a_reply_that_a_client_began_is_continued_and_what_it_wrote_is_context():
    async with served("4", "5. CALL " + CALL, "found") as it:
        history = [user("2+2?"), said("4"), user("2+3?")]
        await ask(it, history[:1])
        second = (await ask(it, [*history, said("It is ")], tools=[LOOK])).choices[0].message
        assert second.content == "5. "
        whole = {**second.model_dump(), "content": "It is 5. "}
        result = {"role": "tool", "tool_call_id": "1", "content": "it"}
        await ask(it, [*history, whole, result], tools=[LOOK])
        ids, turns = it.calls.conversation.token_ids, it.calls.conversation.turns
        written = [decode(ids[turn.first_token : turn.end]) for turn in turns]
        assert written == ["4<|end|>", f"5. CALL {CALL}<|end|>", "found<|end|>"]
        assert "<|assistant|>\nIt is 5. CALL" in it.tokens
        assert len(it.calls.conversation.branches) == 1, "of other tools"


@pytest.mark.parametrize(
    ("last", "why"),
    [
        (said("4"), "a reply of the policy that has ended"),
        ({**said(""), "tool_calls": [{"function": {"name": "look"}}]}, "results are missing"),
        ({**said("so"), "reasoning_content": "hm"}, "with a thought"),
        (said("hm</think>"), "read as a thought"),
        (said("CALL " + CALL), "read as a thought, a call"),
        (said("so<|end|>"), "marks of the chat template"),
    ],
)
async def test_an_assistant_s_turn_that_cannot_be_continued_is_refused(
    last: dict[str, Any], why: str
):
    async with served("4") as it:
        await ask(it, [user("2+2?")])
        with pytest.raises(openai.BadRequestError, match=why) as caught:
            await ask(it, [user("2+2?"), last], tools=[LOOK] if "call" in why else [])
        assert caught.value.param == "messages"
        with pytest.raises(openai.BadRequestError, match="the only one"):
            await ask(it, [last | {"content": "x", "tool_calls": [], "reasoning_content": ""}])
        assert len(it.engine.asked) == 1

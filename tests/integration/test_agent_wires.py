"""Each wire of agents over a real SGLang: what is recorded is what the engine said it chose."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import openai
import pytest
from typing_extensions import override

from slipstream.generators.capture.server import CaptureServer
from slipstream.generators.engine import Completion, SamplingParams
from slipstream.generators.environments.turn_sampler import rendering_of, replies_of
from slipstream.generators.sglang.engine import SglangEngine
from slipstream.generators.sglang.process import SglangProcess
from slipstream.generators.text.codec import TextCodec
from slipstream.generators.turns.calls import TrajectoryCalls
from slipstream.generators.turns.conversation import Conversation
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.settings.sections import EnvironmentSection, SamplingSection
from tests.support.custody import Chosen, Sampled, replies_after, take
from tests.support.tiny_run import sglang_server
from tests.support.tool_policy import write_tool_policy
from tests.support.waiting import HANG_S

pytestmark = pytest.mark.integration
SCHEMA = {"type": "object", "properties": {"at": {"type": "integer"}}}
NOISE = 1e-4  # nats, of float32 in batches of other shapes
TRIES = 40  # replies until one calls a tool, which every other does, or is cut off


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    write_tool_policy(folder)
    return folder


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[SglangProcess]:
    with sglang_server(model) as process:
        yield process


class Recording(SglangEngine):
    """Keeps SGLang's answers as they came."""

    def __init__(self, server: SglangProcess) -> None:
        super().__init__(
            server.url, server.api_key, request_timeout_s=HANG_S, control_timeout_s=HANG_S
        )
        self.answers: list[tuple[tuple[int, ...], dict[str, Any]]] = []
        self._seeds = itertools.count(1)

    @override
    async def _answers(self, body: dict[str, Any], count: int) -> list[dict[str, Any]]:
        answers = await super()._answers(body, count)
        self.answers += zip(map(tuple, body["input_ids"]), answers, strict=True)
        return answers

    async def reply(self, prompt_ids: list[int], params: SamplingParams) -> Completion:
        (reply,) = await self.sample(prompt_ids, params, count=1, seeds=[next(self._seeds)])
        return reply


@dataclass
class Endpoint:
    """The endpoint of one trajectory."""

    engine: Recording
    conversation: Conversation
    client: openai.AsyncOpenAI
    http: aiohttp.ClientSession
    url: str

    @property
    def num_branches(self) -> int:
        return len(self.conversation.branches)


@asynccontextmanager
async def endpoint(server: SglangProcess, model: Path) -> AsyncIterator[Endpoint]:
    codec = TextCodec(model, SamplingSection())
    section = EnvironmentSection(function="none.py:Nothing", tool_call_parser="qwen25")
    engine = Recording(server)
    await engine.label(PolicyVersion(1, 0))
    calls = TrajectoryCalls(
        sample=engine.reply,
        params=SamplingParams(temperature=1.0, max_new_tokens=40),
        rendering=rendering_of(codec),
        conversation=Conversation(max_turns=999, max_tokens=99_999),
        encode=codec.text_ids,
        decode=codec.decode,
        parse=replies_of(engine, section, codec),
        longest_token=codec.longest_token,
        vocab_size=codec.vocab_size,
    )
    capture = CaptureServer(host="127.0.0.1", port=0, model="policy", token_text=codec.token_text)
    await capture.start()
    key = capture.open(calls)
    client = openai.AsyncOpenAI(base_url=capture.url, api_key=key, max_retries=0)
    try:
        async with aiohttp.ClientSession(headers={"x-api-key": key}) as http, client:
            yield Endpoint(engine, calls.conversation, client, http, capture.url)
    finally:
        await capture.close()
        await engine.close()


class Said(NamedTuple):
    """A reply as a client has it."""

    calls: list[str]  # ids
    is_cut: bool


class Chat:
    """A history on chat completions."""

    def __init__(self, it: Endpoint, *, streams: bool) -> None:
        self.it, self.streams = it, streams
        self.history: list[Any] = []

    def tell(self, text: str) -> None:
        self.history.append({"role": "user", "content": text})

    def begin(self, text: str) -> None:
        self.history.append({"role": "assistant", "content": text})

    def result(self, call: str) -> None:
        self.history.append({"role": "tool", "tool_call_id": call, "content": "a tree"})

    async def ask(self, most: int, *, may_call: bool = False) -> Said:
        """Have the policy reply; its reply is part of the history."""
        tool = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
        asked = {"max_tokens": most, **({"tools": [tool]} if may_call else {})}
        create: Any = self.it.client.chat.completions.create
        text, calls, reason = "", [], ""
        if self.streams:
            async for chunk in await create(
                model="policy", messages=self.history, stream=True, **asked
            ):
                (choice,) = chunk.choices
                text += choice.delta.content or ""
                calls += [call.model_dump() for call in choice.delta.tool_calls or ()]
                reason = choice.finish_reason or reason
        else:
            whole = await create(model="policy", messages=self.history, **asked)
            (choice,) = whole.choices
            text, reason = choice.message.content or "", choice.finish_reason
            calls = [call.model_dump() for call in choice.message.tool_calls or ()]
        if self.history[-1]["role"] == "assistant":
            text = self.history.pop()["content"] + text
        said: dict[str, Any] = {"role": "assistant", "content": text}
        self.history.append(said | ({"tool_calls": calls} if calls else {}))
        return Said([call["id"] for call in calls], reason == "length")


class Responses(Chat):
    """A history on Responses, whose items are given back as they came."""

    @override
    def result(self, call: str) -> None:
        output = {"type": "function_call_output", "call_id": call, "output": "a tree"}
        self.history.append(output)

    @override
    async def ask(self, most: int, *, may_call: bool = False) -> Said:
        tool: Any = {"type": "function", "name": "look", "parameters": SCHEMA}
        asked: dict[str, Any] = {"max_output_tokens": most, "tools": [tool] if may_call else []}
        responses = self.it.client.responses
        whole: Any
        if self.streams:
            async with responses.stream(model="policy", input=self.history, **asked) as stream:
                events = [event async for event in stream]
            assert events[-1].type in {"response.completed", "response.incomplete"}
            whole = events[-1].response  # type: ignore[union-attr]
        else:
            whole = await responses.create(model="policy", input=self.history, **asked)
        self.history += [item.model_dump() for item in whole.output]
        calls = [item.call_id for item in whole.output if item.type == "function_call"]
        return Said(calls, whole.status == "incomplete")


class Messages(Chat):
    """A history on Anthropic's Messages, without its client."""

    @override
    def result(self, call: str) -> None:
        block = {"type": "tool_result", "tool_use_id": call, "content": "a tree"}
        self.history.append({"role": "user", "content": [block]})

    @override
    async def ask(self, most: int, *, may_call: bool = False) -> Said:
        tool = {"name": "look", "input_schema": SCHEMA}
        body = {"messages": self.history, "max_tokens": most, "stream": self.streams}
        body["tools"] = [tool] if may_call else []
        async with self.it.http.post(f"{self.it.url}/messages", json=body) as answer:
            content = await answer.text()
            assert answer.status == 200, content
        whole = put_together(content) if self.streams else json.loads(content)
        self.history.append({"role": "assistant", "content": whole["content"]})
        calls = [block["id"] for block in whole["content"] if block["type"] == "tool_use"]
        return Said(calls, whole["stop_reason"] == "max_tokens")


def put_together(content: str) -> dict[str, Any]:
    """Return the message of a stream of events."""
    message: dict[str, Any] = {}
    for part in content.split("\n\n")[:-1]:
        data = json.loads(part.partition("\ndata: ")[2])
        match data["type"]:
            case "message_start":
                message = data["message"]
            case "content_block_start":
                message["content"].append({**data["content_block"], "json": ""})
            case "content_block_delta":
                block, delta = message["content"][data["index"]], data["delta"]
                block["text"] = block.get("text", "") + delta.get("text", "")
                block["json"] += delta.get("partial_json", "")
            case "content_block_stop":
                block = message["content"][data["index"]]
                if given := block.pop("json"):
                    block["input"] = json.loads(given)
            case "message_delta":
                message |= data["delta"]
    return message


async def assert_recorded(it: Endpoint) -> None:
    """Compare what was recorded with SGLang's answers, and with what it computes of it now."""
    conversation, sampled = it.conversation, Sampled()
    for prompt, answer in it.engine.answers:
        info = answer["meta_info"]
        rows = info["output_token_logprobs"]
        sampled[prompt, tuple(Chosen(token, 0, logprob) for logprob, token, *_ in rows)] += 1
        assert not info["input_token_logprobs"], "logprobs of a reply alone were asked for"
    ids, logprobs = conversation.token_ids, conversation.logprobs
    chosen = [Chosen(token, 0, logprob) for token, logprob in zip(ids, logprobs, strict=True)]
    turns = [(turn.first_token, turn.num_tokens) for turn in conversation.turns]
    for prompt, reply in replies_after(chosen, turns, conversation.branches):
        assert take(sampled, prompt, reply), f"{prompt} was not answered with {reply}"
    assert not sampled.total(), "each reply is kept"
    ends = [*conversation.branches, len(ids)]
    for start, end in zip((0, *conversation.branches), ends, strict=True):
        of_branch = [turn for turn in conversation.turns if start <= turn.first_token < end]
        before = of_branch[0].first_token
        scores = await it.engine.score([ids[start:end]], num_context=before - start)
        for turn in of_branch:
            computed = scores.logprobs[0][turn.first_token - before : turn.end - before]
            assert computed == pytest.approx(logprobs[turn.first_token : turn.end], abs=NOISE)


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("wire", [Chat, Responses, Messages])
async def test_what_a_wire_records_is_what_the_engine_chose(
    server: SglangProcess, model: Path, wire: type[Chat], *, streams: bool
):
    """A call of a tool and its result, a reply that was cut off, one that the client began."""
    async with asyncio.timeout(HANG_S), endpoint(server, model) as it:
        talk, said = wire(it, streams=streams), Said([], is_cut=False)

        async def until(is_enough: Any, text: str, most: int, *, may_call: bool) -> None:  # noqa: ANN401
            nonlocal talk, said
            for _ in range(TRIES):
                talk = wire(it, streams=streams)
                talk.tell(text)
                said = await talk.ask(most, may_call=may_call)
                if is_enough():
                    return
            raise AssertionError(f"{said} after {TRIES} tries")

        await until(lambda: said.calls, "Where?", 40, may_call=True)
        num_branches = it.num_branches
        for call in said.calls:
            talk.result(call)
        await talk.ask(20, may_call=True)
        talk.tell("So?")
        await talk.ask(20, may_call=True)
        assert it.num_branches == num_branches
        await until(lambda: said.is_cut, "Count.", 3, may_call=False)
        num_branches = it.num_branches
        await talk.ask(20)
        talk.tell("And?")
        await talk.ask(20)
        assert it.num_branches == num_branches
        talk = wire(it, streams=streams)
        talk.tell("2+3?")
        talk.begin("It is ")
        await talk.ask(20)
        talk.tell("Why?")
        await talk.ask(20)
        assert it.num_branches == num_branches + 1
        await assert_recorded(it)


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
async def test_what_text_completions_record_is_what_the_engine_chose(
    server: SglangProcess, model: Path, *, streams: bool
):
    async with asyncio.timeout(HANG_S), endpoint(server, model) as it:
        prompt = "2+3="
        create: Any = it.client.completions.create
        for more in ("", "", "\nand 3+4="):  # the second goes on where the first one ended
            prompt += more
            answer = await create(model="policy", prompt=prompt, max_tokens=9, stream=streams)
            parts = [part async for part in answer] if streams else [answer]
            prompt += "".join(part.choices[0].text for part in parts)
        assert it.num_branches == 0
        await assert_recorded(it)

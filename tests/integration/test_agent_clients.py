"""Agents of other packages before the endpoint, unchanged. This project does not need them."""

import asyncio
import base64
import json
import os
from functools import partial
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest

from slipstream.generators.capture.messages import CountRequest, MessagesRequest
from slipstream.wire.messages.images import digest_of
from tests.support.guide import fences
from tests.support.tiny_run import ROOT
from tests.support.waiting import HANG_S
from tests.unit.generators.capture.test_capture import Served, served
from tests.unit.generators.capture.test_images_of_agents import BLUE, RED, digests, seeing

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]

CODEX = ROOT / ".cache/codex/node_modules/.bin/codex"
CODEX_SETTINGS = """
model = "policy"
model_provider = "here"
approval_policy = "never"
sandbox_mode = "danger-full-access"
web_search = "disabled"
check_for_update_on_startup = false
agents.enabled = false
analytics.enabled = false
[model_providers.here]
name = "here"
base_url = "{url}"
env_key = "POLICY_KEY"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
"""


def call(name: str, **arguments: object) -> str:
    return "CALL " + json.dumps({"name": name, "arguments": arguments})


def assert_kept(it: Served) -> None:
    """Each reply of the engine is in the trajectory once, after the prompt that it was for."""
    conversation = it.calls.conversation
    tokens, starts = conversation.token_ids, (0, *conversation.branches)
    found = [
        (
            tokens[max(one for one in starts if one <= turn.first_token) : turn.first_token],
            tokens[turn.first_token : turn.end],
        )
        for turn in conversation.turns
    ]
    assert sorted(found) == sorted(it.engine.sampled)


def adding_agents() -> tuple[Any, Any, list[int]]:
    """Return the package of openai-agents, a tool that adds, and what it will have returned."""
    agents: Any = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)
    seen: list[int] = []

    @agents.function_tool  # type: ignore[untyped-decorator]
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        seen.append(a + b)
        return a + b

    return agents, add, seen


@pytest.mark.parametrize("streams", [False, True])
async def test_openai_agents_call_a_tool_and_hand_over(streams: bool):
    agents, add, seen = adding_agents()
    says = [call("add", a=2, b=3), call("transfer_to_judge"), "it is 5"]
    async with asyncio.timeout(HANG_S), served(*says) as it:
        model = agents.OpenAIChatCompletionsModel("policy", openai_client=it.client)
        judge = agents.Agent(name="judge", instructions="Judge.", model=model)
        agent = agents.Agent(
            name="adder", instructions="Add.", model=model, tools=[add], handoffs=[judge]
        )
        if streams:
            running = agents.Runner.run_streamed(agent, "what is 2+3?")
            async for _event in running.stream_events():
                pass
            output = running.final_output
        else:
            output = (await agents.Runner.run(agent, "what is 2+3?")).final_output
        assert (output, seen) == ("it is 5", [5])
        assert_kept(it)
        # The second call goes on after the first; the judge has other instructions and tools.
        assert len(it.calls.conversation.branches) == 1


@pytest.mark.parametrize("streams", [False, True])
async def test_openai_agents_in_their_default_mode_ask_for_responses(streams: bool):
    agents, add, seen = adding_agents()
    says = ["hm</think>" + call("add", a=2, b=3), call("add", a=5, b=1), "it is 6", "bye"]
    async with asyncio.timeout(HANG_S), served(*says) as it:
        agents.set_default_openai_client(it.client, use_for_tracing=False)
        agent = agents.Agent(name="adder", instructions="Add.", model="policy", tools=[add])
        if streams:
            running = agents.Runner.run_streamed(agent, "what is 2+3+1?")
            kinds = {one.type async for one in running.stream_events()}
            assert "raw_response_event" in kinds
        else:
            running = await agents.Runner.run(agent, "what is 2+3+1?")
        assert (running.final_output, seen) == ("it is 6", [5, 6])
        history = [*running.to_input_list(), {"role": "user", "content": "thanks"}]
        assert (await agents.Runner.run(agent, history)).final_output == "bye"
        assert_kept(it)
        assert it.calls.conversation.branches == ()
        assert len(it.calls.conversation.turns) == 4


ADD: dict[str, Any] = {
    "name": "add",
    "description": "Add two numbers.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
}


@pytest.mark.parametrize("streams", [False, True])
async def test_anthropic_s_client_calls_a_tool_and_thinks(streams: bool):
    anthropic: Any = pytest.importorskip("anthropic")
    says = ["hm</think>so " + call("add", a=2, b=3), "it is 5", "x" * 50, "no"]
    async with asyncio.timeout(HANG_S), served(*says) as it:
        client = anthropic.AsyncAnthropic(
            base_url=it.server.url.removesuffix("/v1"), api_key=it.key, max_retries=0
        )

        async def ask(messages: list[Any], **options: object) -> Any:  # noqa: ANN401 Anthropic's
            asked = {"model": "policy", "max_tokens": 200, "messages": messages, **options}
            if not streams:
                return await client.messages.create(**asked)
            async with client.messages.stream(**asked) as stream:
                async for _event in stream:
                    pass
                return await stream.get_final_message()

        asked = {"system": "Add.", "tools": [ADD]}
        messages: list[Any] = [{"role": "user", "content": "2+3?"}]
        first = await ask(messages, **asked)
        assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
        assert (first.content[0].thinking, first.content[1].text) == ("hm", "so ")
        assert (first.stop_reason, first.content[2].input) == ("tool_use", {"a": 2, "b": 3})
        result = {"type": "tool_result", "tool_use_id": first.content[2].id, "content": "5"}
        messages += [{"role": "assistant", "content": first.content}]
        messages += [{"role": "user", "content": [result]}]
        second = await ask(messages, **asked)
        assert (second.stop_reason, second.content[0].text) == ("end_turn", "it is 5")
        messages += [{"role": "assistant", "content": second.content}]
        messages += [{"role": "user", "content": "so?"}]
        third = await ask(messages, **{**asked, "max_tokens": 4})
        assert (third.stop_reason, third.usage.output_tokens) == ("max_tokens", 4)
        assert it.calls.conversation.branches == ()
        assert_kept(it)
        with pytest.raises(anthropic.BadRequestError, match=r"tools\[0\]"):
            await ask(messages, tools=[{"type": "bash_20250124", "name": "bash"}])
        counted = await client.messages.count_tokens(model="policy", messages=messages[:1], **asked)
        assert counted.input_tokens == first.usage.input_tokens
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.batches.retrieve("none")
        with pytest.raises(anthropic.AuthenticationError):
            await client.with_options(api_key="no").messages.create(
                model="policy", max_tokens=1, messages=messages
            )
        await client.close()


async def test_anthropic_s_client_shows_images():
    """The client of OpenAI is that of tests/unit/generators/capture/test_images_of_agents.py."""
    anthropic: Any = pytest.importorskip("anthropic")

    def image(content: bytes) -> dict[str, Any]:
        data = base64.b64encode(content).decode()
        source = {"type": "base64", "media_type": "image/png", "data": data}
        return {"type": "image", "source": source}

    async with asyncio.timeout(HANG_S), seeing("red", "blue") as (it, stored):
        client = anthropic.AsyncAnthropic(
            base_url=it.server.url.removesuffix("/v1"), api_key=it.key, max_retries=0
        )
        create = partial(client.messages.create, model="policy", max_tokens=99)
        messages: list[Any] = [{"role": "user", "content": [image(RED)]}]
        first = await create(messages=messages)
        call = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "t1", "content": [image(BLUE)]}
        messages += [{"role": "assistant", "content": [*first.content, call]}]
        messages += [{"role": "user", "content": [result]}]
        await create(messages=messages)
        assert stored == [RED, BLUE]
        assert {*digests(it)} == {digest_of(RED), digest_of(BLUE)}
        elsewhere = {"type": "image", "source": {"type": "url", "url": "https://x.org/a.png"}}
        with pytest.raises(anthropic.BadRequestError, match="an image elsewhere"):
            await create(messages=[{"role": "user", "content": [elsewhere]}])
        await client.close()


def test_each_field_of_anthropic_s_client_is_honoured_ignored_or_refused():
    """Fields that are new are refused until somebody decides."""
    anthropic: Any = pytest.importorskip("anthropic")
    asked = anthropic.types.message_create_params.MessageCreateParamsNonStreaming
    counted = anthropic.types.message_count_tokens_params.MessageCountTokensParams
    refused = {"speed", "user_profile_id", "workspace_id"}
    assert set(counted.__annotations__) - set(CountRequest.__struct_fields__) == refused
    refused |= {"container", "diagnostics", "inference_geo"}
    assert set(asked.__annotations__) - set(MessagesRequest.__struct_fields__) == refused


async def test_each_call_of_the_guide_is_answered():
    anthropic: Any = pytest.importorskip("anthropic")
    (example,) = (
        body
        for kind, body in fences(ROOT / "docs/environments.md", "A function that drives any agent")
        if kind == "python" and "base_url" in body
    )
    async with asyncio.timeout(HANG_S), served(*"abcd") as it:
        names: dict[str, Any] = {"anthropic": anthropic}
        body = indent(f"{example}await claude.close()\n", "    ")
        exec(f"async def ask(client):\n{body}", names)  # noqa: S102
        await names["ask"](it.client)
        assert len(it.engine.sampled) == 4
        assert_kept(it)


@pytest.mark.skipif(not CODEX.exists(), reason="npm has not installed @openai/codex (Apache-2.0)")
async def test_codex_runs_a_command(tmp_path: Path):
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    says = ["hm</think>" + call("exec_command", cmd="echo 5 > five.txt"), "it is five"]
    async with asyncio.timeout(HANG_S), served(*says, max_tokens=999_999) as it:
        (home / "config.toml").write_text(CODEX_SETTINGS.format(url=it.server.url))
        codex = await asyncio.create_subprocess_exec(
            *(CODEX, "exec", "--skip-git-repo-check", "what is 2+3?"),
            cwd=work,
            env={**os.environ, "CODEX_HOME": str(home), "POLICY_KEY": it.key},  # noqa: TID251
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            output, errors = await codex.communicate()
        finally:
            if codex.returncode is None:
                codex.kill()
        assert codex.returncode == 0, errors.decode()[-4000:]
        assert "it is five" in output.decode()
        assert (work / "five.txt").read_text() == "5\n"
        assert_kept(it)
        assert it.calls.conversation.branches == ()


async def test_smolagents_call_a_tool():
    smolagents: Any = pytest.importorskip("smolagents")

    @smolagents.tool  # type: ignore[untyped-decorator]
    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: the one.
            b: the other.
        """
        return a + b

    says = [call("add", a=2, b=3), call("final_answer", answer="5")]
    async with asyncio.timeout(HANG_S), served(*says) as it:

        def run() -> object:
            model = smolagents.OpenAIServerModel("policy", api_base=it.server.url, api_key=it.key)
            agent = smolagents.ToolCallingAgent(tools=[add], model=model, verbosity_level=0)
            return agent.run("what is 2+3?")

        assert await asyncio.to_thread(run) == "5"
        assert_kept(it)


async def test_smolagents_write_code():
    smolagents: Any = pytest.importorskip("smolagents")

    says = ["Thought: add.\n<code>\nx = 2 + 3\nprint(x)\n</code>", "<code>final_answer(x)</code>"]
    async with asyncio.timeout(HANG_S), served(*says) as it:

        def run() -> object:
            model = smolagents.OpenAIServerModel("policy", api_base=it.server.url, api_key=it.key)
            agent = smolagents.CodeAgent(tools=[], model=model, verbosity_level=0)
            return agent.run("what is 2+3?")

        assert await asyncio.to_thread(run) == 5
        assert_kept(it)

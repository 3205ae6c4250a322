"""Agents of other packages before the endpoint, unchanged. This project does not need them."""

import asyncio
import json
from typing import Any

import pytest

from tests.support.waiting import HANG_S
from tests.unit.generators.capture.test_capture import Served, served

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]


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


@pytest.mark.parametrize("streams", [False, True])
async def test_openai_agents_call_a_tool_and_hand_over(streams: bool):
    agents: Any = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)
    seen: list[int] = []

    @agents.function_tool  # type: ignore[untyped-decorator]
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        seen.append(a + b)
        return a + b

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

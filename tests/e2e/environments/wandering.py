"""An agent that does to its history whatever agents do, and now and then dies."""

import asyncio
import os
import random
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai

from slipstream.generators.environments.sdk import Prompt

_LOOK = {
    "name": "look",
    "description": "Looks.",
    "parameters": {"type": "object", "properties": {"at": {"type": "integer"}}},
}
_TOOLS = [{"type": "function", "function": _LOOK}]
_ASKS = ("ask", "ask", "ask", "tools", "tools", "stream", "together", "together", "cancel", "text")


async def rollout(
    client: openai.AsyncOpenAI, prompt: Prompt, deaths: float, died: str, most: int = 5
) -> dict[str, float]:
    """Ask ``most`` times at most; before each the agent dies by the probability ``deaths``.

    One of a row dies, which is noted in the folder ``died``: what is tried again succeeds. Row 1
    never does.
    """
    if prompt.row == 1:
        raise RuntimeError("there is no world for row 1")
    agent = _Agent(client, prompt.text)
    for _ in range(agent.draw.randint(1, most)):
        if agent.draw.random() < deaths:
            with suppress(FileExistsError):
                (Path(died) / str(prompt.row)).touch(exist_ok=False)
                os._exit(9)
        await agent.take_a_turn()
    await agent.ask()
    return {"score": agent.draw.random(), **agent.did}


class _Agent:
    def __init__(self, client: openai.AsyncOpenAI, question: str) -> None:
        self._client = client
        self._question = question
        self._messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
        self.draw = random.Random()
        self.did: Counter[str] = Counter()

    async def ask(self, **more: object) -> Any:  # noqa: ANN401 openai's
        create: Any = self._client.chat.completions.create
        return await create(model="policy", messages=self._messages, max_tokens=12, **more)

    async def take_a_turn(self) -> None:
        what = self.draw.choice(_ASKS)
        self.did[what] += 1
        reply = await getattr(self, f"_{what}")()
        if reply is None:
            return
        calls = reply.get("tool_calls") or ()
        self.did["calls"] += len(calls)
        self._messages.append(reply)
        for call in calls:
            seen = str(self.draw.randint(0, 99))
            result = {"role": "tool", "tool_call_id": call["id"], "content": seen}
            self._messages.append(result)
        if not calls:
            said = self.draw.choice(["go on", "why?", "1+1="])
            self._messages.append({"role": "user", "content": said})
        self._rewrite()

    def _rewrite(self) -> None:
        messages = self._messages
        if len(messages) > 3 and self.draw.random() < 0.25:
            self.did["compacted"] += 1
            summary = {"role": "user", "content": f"so far {len(messages)}: on"}
            self._messages = [messages[0], summary]
        elif self.draw.random() < 0.25:
            one = self.draw.randrange(len(messages))
            self.did["edited"] += 1
            messages[one] = {**messages[one], "content": "edited"}

    async def _ask(self) -> dict[str, Any]:
        return _message(await self.ask())

    async def _tools(self) -> dict[str, Any]:
        return _message(await self.ask(tools=_TOOLS))

    async def _together(self) -> dict[str, Any]:
        several = [self.ask(tools=_TOOLS) for _ in range(self.draw.randint(2, 3))]
        return _message(self.draw.choice(await asyncio.gather(*several)))

    async def _stream(self) -> dict[str, Any]:
        text = ""
        async for chunk in await self.ask(stream=True):
            text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
        return {"role": "assistant", "content": text}

    async def _cancel(self) -> None:
        """Leave a stream, or do not even wait for it to begin."""
        asking = asyncio.ensure_future(self.ask(stream=True))
        await asyncio.wait({asking}, timeout=self.draw.choice([0.001, 0.02, None]))
        if not asking.done():
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            return
        stream = asking.result()
        async for _chunk in stream:
            if self.draw.random() < 0.5:
                break
        await stream.close()

    async def _text(self) -> None:
        said = await self._client.completions.create(
            model="policy", prompt=f"{self._question}?", max_tokens=self.draw.randint(1, 6)
        )
        text = f"{self._question}?{said.choices[0].text}"
        await self._client.completions.create(model="policy", prompt=text, max_tokens=2)


def _message(found: Any) -> dict[str, Any]:  # noqa: ANN401 openai's
    message: dict[str, Any] = found.choices[0].message.model_dump(exclude_none=True)
    return message

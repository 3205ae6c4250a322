"""An agent whose requests end in all ways, for each row in the same ones; some die."""

import asyncio
import os
import random
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai

from slipstream.generators.environments.sdk import Prompt

HELD = "held in delivery"  # mark of a request
_LOOK = {
    "name": "look",
    "description": "Looks.",
    "parameters": {"type": "object", "properties": {"at": {"type": "integer"}}},
}
_TOOLS = [{"type": "function", "function": _LOOK}]
_WAYS = ("ask", "tools", "tools", "cut", "cut", "stream", "together", "text", "hang_up", "leave")


async def rollout(client: openai.AsyncOpenAI, prompt: Prompt, died: str) -> dict[str, float]:
    """Return how many replies there were, and what became of the others.

    Row 1 has no world. One agent of each seventh row dies, which is noted in the folder ``died``.
    """
    if prompt.row == 1:
        raise RuntimeError("there is no world for row 1")
    agent = _Agent(client, prompt)
    is_faithful = prompt.row % 3 == 0  # its history goes on, and is never rewritten
    agent.did["faithful"] += is_faithful
    await agent.take_a_turn("tools")
    for _ in range(agent.draw.randint(1, 5)):
        await agent.take_a_turn(agent.draw.choice(("tools", "cut") if is_faithful else _WAYS))
        if not is_faithful:
            agent.rewrite()
    if prompt.row % 7 == 3:
        with suppress(FileExistsError):
            (Path(died) / str(prompt.row)).touch(exist_ok=False)
            os._exit(9)
    if prompt.row % 10 == 7:
        await agent.fill()
    elif prompt.row % 5 == 0:
        agent.unread = await agent.held()
    return {"score": agent.draw.random(), "row": prompt.row, **agent.did}


class _Agent:
    def __init__(self, client: openai.AsyncOpenAI, prompt: Prompt) -> None:
        self._client = client
        self._question = prompt.text
        self._messages: list[dict[str, Any]] = [{"role": "user", "content": prompt.text}]
        self.unread: Any = None  # a stream that nobody reads or closes
        self.draw = random.Random(prompt.row)
        self.did: Counter[str] = Counter(heard=0, left=0)

    async def take_a_turn(self, way: str) -> None:
        self.did[way] += 1
        reply = await getattr(self, f"_{way}")()
        if reply is None:
            return
        text, calls = reply.get("content") or "", reply.get("tool_calls") or ()
        self.did["calls"] += len(calls)
        self.did["cut_calls"] += text.count("<tool_call>") > text.count("</tool_call>")
        self._messages.append(reply)
        for call in calls:
            result = {"role": "tool", "tool_call_id": call["id"], "content": "7"}
            self._messages.append(result)
        if not calls:
            self._messages.append({"role": "user", "content": "go on"})

    def rewrite(self) -> None:
        """Forget or change a part of the history, now and then."""
        messages = self._messages
        if len(messages) > 3 and self.draw.random() < 0.2:
            self.did["compacted"] += 1
            self._messages = [messages[0], {"role": "user", "content": "so far"}]
        elif self.draw.random() < 0.2:
            at = self.draw.randrange(len(messages))
            self.did["edited"] += 1
            messages[at] = {**messages[at], "content": "edited"}

    async def fill(self) -> None:
        """Ask until the trajectory is full."""
        with suppress(openai.BadRequestError):
            while True:
                self._messages.append(_message(await self._asked(tools=_TOOLS, max_tokens=1_000)))
                self._messages.append({"role": "user", "content": "more"})
        self.did["full"] += 1

    async def held(self) -> Any:  # noqa: ANN401 openai's
        """Return a stream as soon as it begins; its end never comes."""
        self.did["left"] += 1
        return await self._create(stream=True, logprobs=True, user=HELD)

    async def _create(self, **more: object) -> Any:  # noqa: ANN401 openai's
        create: Any = self._client.chat.completions.create
        return await create(model="policy", messages=self._messages, **more)

    async def _asked(self, **more: object) -> Any:  # noqa: ANN401 openai's
        found = await self._create(**more)
        self.did["heard"] += 1
        return found

    async def _ask(self) -> dict[str, Any]:
        return _message(await self._asked(max_tokens=20))

    async def _tools(self) -> dict[str, Any]:
        return _message(await self._asked(tools=_TOOLS, max_tokens=90))

    async def _cut(self) -> dict[str, Any]:
        most = self.draw.randint(12, 40)
        return _message(await self._asked(tools=_TOOLS, max_tokens=most))

    async def _stream(self) -> dict[str, Any]:
        text = ""
        async for chunk in await self._asked(stream=True, max_tokens=40):
            text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
        return {"role": "assistant", "content": text}

    async def _together(self) -> dict[str, Any]:
        several = (self._asked(tools=_TOOLS, max_tokens=20) for _ in range(3))
        return _message((await asyncio.gather(*several))[0])

    async def _text(self) -> None:
        complete: Any = self._client.completions.create
        said = await complete(model="policy", prompt=f"{self._question}?", max_tokens=6)
        text = f"{self._question}?{said.choices[0].text}"
        await complete(model="policy", prompt=text, max_tokens=10)
        self.did["heard"] += 2

    async def _hang_up(self) -> None:
        """Leave a reply that was handed over; none of it is read."""
        await (await self._asked(stream=True, max_tokens=12)).close()

    async def _leave(self) -> None:
        await (await self.held()).close()


def _message(found: Any) -> dict[str, Any]:  # noqa: ANN401 openai's
    message: dict[str, Any] = found.choices[0].message.model_dump(exclude_none=True)
    return message

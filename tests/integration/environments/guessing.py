"""Environments that behave, and some that do not."""

import asyncio
import ctypes
import os
import struct
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import httpx
import openai

from slipstream.broker.sandbox import sandbox
from slipstream.generators.environments.sdk import (
    Environment,
    Messages,
    Prompt,
    Reply,
    Step,
    Unavailable,
)


class Guess(Environment):
    """Asks for a number until it is said."""

    def __init__(self, *, most: int = 5) -> None:
        self._most = most
        self._said = 0

    async def reset(self, prompt: Prompt) -> str:
        self._number = str(prompt.ground_truth)
        return prompt.text

    async def step(self, reply: Reply) -> Step:
        self._said += 1
        if reply.text == self._number:
            return Step(done=True, reward=1.0, parts={"guesses": self._said})
        if self._said == self._most:
            return Step(done=True, reward=0.0)
        return Step(messages="no", reward=-0.25)


def look(at: str, times: int = 1) -> str:
    """Look at something."""
    return " ".join([at] * times)


def fail(why: str) -> str:
    """Fail."""
    raise RuntimeError(why)


class Tools(Environment):
    tools = (look, fail)


class Hangs(Environment):
    async def step(self, _reply: Reply) -> Step:
        time.sleep(1_000)  # noqa: ASYNC251 that is what it does wrong
        return Step(done=True)


def start_two() -> str:
    started = [subprocess.Popen(["sleep", "1000"], start_new_session=True) for _ in range(2)]
    return "\n".join(str(one.pid) for one in started)


class Leaves(Environment):
    """Starts processes, some of which leave its session; says their ids."""

    async def step(self, reply: Reply) -> Step:
        pids = start_two()
        await asyncio.to_thread(Path(reply.text).write_text, pids)
        return Step(done=True, reward=1.0)


class Crashes(Environment):
    async def step(self, _reply: Reply) -> Messages:
        ctypes.string_at(0)
        return "never"


class Exits(Environment):
    async def step(self, _reply: Reply) -> Messages:
        os._exit(7)


class Raises(Environment):
    async def step(self, reply: Reply) -> Messages:
        raise ValueError(f"what is {reply.text}?")


class Busy(Environment):
    async def step(self, _reply: Reply) -> Messages:
        raise Unavailable("its server is busy")


class Huge(Environment):
    async def step(self, _reply: Reply) -> Messages:
        return "x" * 10_000_000


class Binary(Environment):
    async def step(self, _reply: Reply) -> Messages:
        return {"role": "user", "content": b"\xff"}  # type: ignore[dict-item]


class Grows(Environment):
    async def step(self, _reply: Reply) -> Messages:
        held = [bytearray(1 << 20) for _ in range(400)]
        await asyncio.sleep(1_000)
        return str(len(held))


_HOLD = """
import os, time
held = os.memfd_create("held")
for _ in range(400):
    os.write(held, bytes(1 << 20))
time.sleep(1_000)
"""


class HoldsFiles(Environment):
    """Starts a program with memory that no process has mapped."""

    async def step(self, _reply: Reply) -> Messages:
        program = await asyncio.create_subprocess_exec(sys.executable, "-c", _HOLD)
        await program.wait()
        return "never"


class FillsSharedMemory(Environment):
    """Leaves files in /dev/shm until there is no room; says how many MiB."""

    async def step(self, _reply: Reply) -> Step:
        written = 0
        try:
            while written < 10_000:
                Path(f"/dev/shm/fills-{written}").write_bytes(bytes(1 << 20))  # noqa: ASYNC240, S108
                written += 1
        except OSError as error:
            parts = {"errno": float(error.errno or 0), "written": float(written)}
            return Step(done=True, reward=1.0, parts=parts)
        return Step(done=True)


async def rollout(client: openai.AsyncOpenAI, prompt: Prompt) -> dict[str, float]:
    """Ask twice, and forget the first question."""
    first = await client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": prompt.text}]
    )
    said = first.choices[0].message.content
    second = await client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": f"is it {said}?"}]
    )
    right = second.choices[0].message.content == "yes"
    return {"score": float(right), "length": float(len(said or ""))}


async def asks_with_a_client_of_its_own(
    client: openai.AsyncOpenAI, prompt: Prompt
) -> dict[str, float]:
    own = openai.AsyncOpenAI(base_url=client.base_url, api_key=client.api_key, max_retries=0)
    async with own:
        return await rollout(own, prompt)


async def asks_on_other_wires(client: openai.AsyncOpenAI, prompt: Prompt) -> dict[str, float]:
    """Ask by Responses and then by Messages, with the key where clients of Anthropic's have it."""
    first = await client.responses.create(model="policy", input=prompt.text)
    said = first.output_text
    messages = [
        {"role": "user", "content": prompt.text},
        {"role": "assistant", "content": [{"type": "text", "text": said}]},
        {"role": "user", "content": "is it?"},
    ]
    async with httpx.AsyncClient(trust_env=False) as http:
        second = await http.post(
            f"{client.base_url}messages",
            json={"model": "policy", "max_tokens": 99, "messages": messages},
            headers={"x-api-key": client.api_key},
        )
    right = second.json()["content"] == [{"type": "text", "text": "yes", "citations": None}]
    return {"score": float(right), "length": float(len(said))}


async def asks_on(client: openai.AsyncOpenAI, prompt: Prompt) -> float:
    messages: list[Any] = [{"role": "user", "content": prompt.text}]
    while True:
        found = await client.chat.completions.create(model="policy", messages=messages)
        said = {"role": "assistant", "content": found.choices[0].message.content}
        messages += [said, {"role": "user", "content": "on"}]


async def rewards_turns(
    client: openai.AsyncOpenAI, prompt: Prompt, *, count: int = 2, score: float | None = None
) -> dict[str, object]:
    """Ask twice, and give each reply a reward."""
    found = await rollout(client, prompt)
    found.pop("score")
    rewards = {"turn_rewards": [0.25 * (n + 1) for n in range(count)]}
    return {**found, **rewards} | ({} if score is None else {"score": score})


class BusyLoop(Environment):
    async def reset(self, _prompt: Prompt) -> str:
        while True:
            pass


class RunsPrograms(Environment):
    """Runs what the policy wrote in the sandbox of rewards, and rewards what it prints."""

    async def step(self, reply: Reply) -> Step:
        found = await asyncio.to_thread(sandbox.run, reply.text)
        return Step(done=True, reward=float(found.text), parts={"ok": float(found.status == "ok")})


class LongAnswer(Environment):
    """Has a long question and an answer that no trajectory holds."""

    async def reset(self, _prompt: Prompt) -> str:
        return "1" * 2_000

    async def step(self, _reply: Reply) -> Messages:
        return "2" * 4_000_000


class NoRole(Environment):
    async def step(self, _reply: Reply) -> Messages:
        return {"content": "who says this?"}


class ListContent(Environment):
    async def step(self, _reply: Reply) -> Messages:
        return {"role": "user", "content": [1, 2]}


class NotANumber(Environment):
    async def step(self, _reply: Reply) -> Step:
        return Step(done=True, reward=float("nan"))


async def rewards_beyond_float32(client: openai.AsyncOpenAI, prompt: Prompt) -> dict[str, object]:
    return {**await rewards_turns(client, prompt), "turn_rewards": [1.0, -1e39]}


class GoesOn(Environment):
    async def step(self, _reply: Reply) -> Messages:
        return "on"


class Forgets(Environment):
    async def step(self, _reply: Reply) -> Step:
        return Step(done=True)


class NeverConnects(Environment):
    """Has a library whose handler after a fork hangs."""

    @classmethod
    def prepare(cls, **_options: object) -> None:
        os.register_at_fork(after_in_child=lambda: time.sleep(1_000))


class OneTurn(Environment):
    async def step(self, _reply: Reply) -> Step:
        return Step(done=True, reward=1.0)


class LeavesAnOrphan(Environment):
    """Starts a process that leaves its session, and dies."""

    async def step(self, reply: Reply) -> Messages:
        subprocess.Popen(["sleep", "1000"], start_new_session=True)  # noqa: ASYNC220 it is brief
        Path(reply.text).write_text("begun")  # noqa: ASYNC240 the same
        os._exit(3)


async def forgets_arguments(client: openai.AsyncOpenAI, prompt: Prompt) -> float:
    call = {"id": "x", "type": "function", "function": {"name": "look"}}
    messages: Any = [
        {"role": "user", "content": [{"type": "text", "text": prompt.text}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "x", "content": "y"},
    ]
    await client.chat.completions.create(model="policy", messages=messages)
    return 1.0


async def asks_nothing(_client: openai.AsyncOpenAI, _prompt: Prompt) -> float:
    return 1.0


def not_async(_client: object, _prompt: object) -> float:
    return 0.0


def untyped(at) -> str:  # type: ignore[no-untyped-def]  # noqa: ANN001
    return str(at)


class BadTool(Environment):
    tools = (untyped,)


class NoStep:
    pass


if __name__ == "__main__":
    sys.exit("environments are imported")


class Showing(Environment):
    """Shows the prompt, then an image from a file, then one that it drew."""

    shown = 0

    async def step(self, reply: Reply) -> Step:
        del reply
        self.shown += 1
        image: bytes | Path = png(shade=self.shown)
        if self.shown == 1:
            file = os.memfd_create("seen.png")
            os.write(file, png(shade=self.shown))
            image = Path(f"/proc/self/fd/{file}")
        parts = [{"type": "text", "text": "now "}, {"type": "image", "image": image}]
        return Step(messages={"role": "user", "content": parts}, done=self.shown == 3, reward=1.0)


def png(*, shade: int) -> bytes:
    """Return a file of 84 x 56 pixels of one shade of gray."""
    rows = (b"\0" + bytes([shade]) * 84) * 56
    head = struct.pack(">IIBBBBB", 84, 56, 8, 0, 0, 0, 0)
    file = b"\x89PNG\r\n\x1a\n"
    for name, content in ((b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")):
        file += struct.pack(">I", len(content)) + name + content
        file += struct.pack(">I", zlib.crc32(name + content))
    return file

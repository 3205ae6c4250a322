"""The process of one trajectory: its environment, or an agent with a client of its own.

It stays until it is killed, so that all it has started can be found below it.
"""

import asyncio
import math
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from slipstream.broker.sandbox.frames import Link, frame_of
from slipstream.generators.environments.loading import LoadedEnvironment
from slipstream.generators.environments.messages import (
    MAX_OBSERVATION_BYTES,
    BeginTrajectory,
    Connected,
    Fork,
    FromEnvironment,
    Replied,
    ToEnvironment,
    Turned,
    Unable,
    to_environment,
)
from slipstream.generators.environments.sdk import (
    Environment,
    Messages,
    Reply,
    Step,
    ToolCall,
    Unavailable,
    schema_of,
)
from slipstream.generators.text.chat_template import message_of
from slipstream.wire.messages.bounds import shortened, why_no_reward
from slipstream.wire.messages.images import Image
from slipstream.wire.messages.trajectory import MAX_PART_NAME, ChatMessage, Json


def connected(order: Fork) -> Link[ToEnvironment]:
    """Return a connection to the generator, after the ticket was sent."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(order.address)
    connection.sendall(frame_of(Connected(ticket=order.ticket)))
    connection.setblocking(False)
    return Link(connection, to_environment)


def act(environment: LoadedEnvironment, link: Link[ToEnvironment]) -> None:
    """Serve one trajectory, then wait for the end."""
    asyncio.run(_Trajectory(environment, link).serve())


class _Trajectory:
    def __init__(self, environment: LoadedEnvironment, link: Link[ToEnvironment]) -> None:
        self._loaded = environment
        self._link = link

    async def serve(self) -> None:
        made: Environment | None = None
        try:
            begin = await self._link.received()
            if isinstance(begin, BeginTrajectory) and self._loaded.rollout is not None:
                await self._send(await _driven(self._loaded.rollout, begin))
            elif isinstance(begin, BeginTrajectory) and self._loaded.make is not None:
                made = self._loaded.make()
                await self._turns(made, begin)
        except Unavailable as error:
            await self._send(Unable(reason=shortened(str(error)) or "Unavailable"))
        except BaseException as error:  # noqa: BLE001 foreign code may raise anything
            await self._send(Unable(reason=f"{type(error).__name__}: {error}"[:2_000]))
        while await self._link.received() is not None:
            pass  # the trajectory is over; the generator hangs up and kills this process
        if made is not None:
            with suppress(Exception):
                await made.close()

    async def _turns(self, environment: Environment, begin: BeginTrajectory) -> None:
        first = messages_of(await environment.reset(begin.prompt))
        tools = tuple(schema_of(tool) for tool in environment.tools)
        await self._send(Turned(messages=first, tools=tools))
        while isinstance(replied := await self._link.received(), Replied):
            result = await environment.step(reply_of(replied))
            step = result if isinstance(result, Step) else Step(messages=result)
            turned = Turned(
                messages=messages_of(step.messages),
                reward=_reward(step.reward, "reward"),
                done=bool(step.done),
                parts=_parts(step.parts),
            )
            await self._send(turned)
            if turned.done or not turned.messages:
                return

    async def _send(self, message: FromEnvironment) -> None:
        frame = frame_of(message)
        if len(frame) > MAX_OBSERVATION_BYTES:
            frame = frame_of(
                Unable(
                    reason=f"the environment says {len(frame)} bytes, at most "
                    f"{MAX_OBSERVATION_BYTES} in a turn"
                )
            )
        await asyncio.get_running_loop().sock_sendall(self._link.connection, frame)


async def _driven(rollout: Any, begin: BeginTrajectory) -> Turned:  # noqa: ANN401 foreign
    import openai  # only functions that drive themselves need it

    client = openai.AsyncOpenAI(
        base_url=begin.url,
        api_key=begin.api_key,
        max_retries=0,
        timeout=None,  # environment.timeout_s limits the whole trajectory
        # Within this host: no proxies, and no TLS, whose certificates take long to load.
        http_client=openai.DefaultAsyncHttpxClient(verify=False, trust_env=False),
    )
    try:
        result = await rollout(client, begin.prompt)
    finally:
        await client.close()
    if isinstance(result, Mapping):
        parts = dict(result)
        return Turned(
            messages=(),
            reward=_reward(parts.pop("score", None), "score"),
            turn_rewards=_numbers(parts.pop("turn_rewards", None), "turn_rewards"),
            done=True,
            parts=_parts(parts),
        )
    return Turned(messages=(), reward=_reward(result, "reward"), done=True)


def _parts(parts: Mapping[Any, object]) -> dict[str, float]:
    return {str(name)[:MAX_PART_NAME]: number(part, name) or 0.0 for name, part in parts.items()}


def number(value: object, name: str) -> float | None:
    """Return a value of an environment as a number; None stays None.

    Raises:
        TypeError: the value is not a number.
        ValueError: the number is not finite.
    """
    if value is None:
        return None
    if isinstance(value, bool | int | float) or hasattr(value, "__float__"):
        converted = float(value)
        if not math.isfinite(converted):
            raise ValueError(f"{name} is {converted}, expected a finite number")
        return converted
    raise TypeError(f"{name} is {type(value).__name__}, expected a number")


def _reward(value: object, name: str) -> float | None:
    reward = number(value, name)
    if reward is not None and (refusal := why_no_reward(reward, name)):
        raise ValueError(refusal)
    return reward


def _numbers(values: object, name: str) -> tuple[float, ...] | None:
    if values is None:
        return None
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise TypeError(f"{name} is {type(values).__name__}, expected a list of numbers")
    return tuple(_reward(value, f"a number of {name}") or 0.0 for value in values)


def messages_of(text_or_messages: Messages) -> tuple[dict[str, Json], ...]:
    """Return an environment's text or messages as messages of OpenAI's API.

    Raises:
        TypeError: a message is neither text nor a message of text.
    """
    if isinstance(text_or_messages, str):
        return ({"role": "user", "content": text_or_messages},)
    is_single = isinstance(text_or_messages, Mapping)
    messages: list[dict[str, Json]] = []
    for message in [text_or_messages] if is_single else text_or_messages:
        if isinstance(message, ChatMessage):
            messages.append(message_of(message))
        elif isinstance(message, Mapping):
            messages.append(_with_bytes(message))
        else:
            raise TypeError(f"a message is {type(message).__name__}, expected text or a mapping")
        content = messages[-1].get("content")
        if not isinstance(content, str | list):
            raise TypeError(f"content of a message is {type(content).__name__}, expected text")
    msgspec.json.encode(messages)  # raises at values that JSON does not have
    return tuple(messages)


def _with_bytes(message: Mapping[str, Json]) -> dict[str, Json]:
    """Return a message with an image's bytes in place of its file."""
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return dict(message)
    return {**message, "content": [_part(part) for part in content]}


def _part(part: Json) -> Json:
    if not isinstance(part, Mapping) or part.get("type") != "image":
        return part
    match part.get("image"):
        case Path() | str() as file:
            return {"type": "image", "image": Path(file).read_bytes()}
        case Image() as known:
            return {"type": "image", "image": msgspec.to_builtins(known)}
        case bytes() | bytearray() | memoryview() as content:
            return {"type": "image", "image": bytes(content)}
        case other:
            kind = type(other).__name__
            raise TypeError(f"an image of a message is {kind}, expected bytes or a file's path")


def reply_of(replied: Replied) -> Reply:
    """Return a reply in the form for environments."""
    calls = []
    for call in replied.tool_calls:
        function = call["function"]
        arguments = msgspec.json.decode(function["arguments"] or "{}")
        calls.append(ToolCall(function["name"], arguments, call.get("id", "")))
    return Reply(
        replied.text,
        tuple(calls),
        replied.finish_reason,
        replied.num_tokens,
        thought=replied.thought,
        num_unreadable=replied.num_unreadable,
    )


def become_a_reaper() -> None:
    """Make orphans below this process its children, so that they are found."""
    import ctypes

    pr_set_child_subreaper = 36
    ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1)

"""The process of one trajectory: its environment, or an agent with a client of its own.

It stays until it is killed, so that whatever it has started can be found below it.
"""

import asyncio
import math
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
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
from slipstream.wire.messages.bounds import shortened, why_no_reward
from slipstream.wire.messages.trajectory import MAX_PART_NAME, ChatMessage, Json


def connected(order: Fork) -> Link[ToEnvironment]:
    """Return a connection to the generator, to which the ticket is sent at once."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(order.address)
    connection.sendall(frame_of(Connected(ticket=order.ticket)))
    connection.setblocking(False)
    return Link(connection, to_environment)


def act(environment: LoadedEnvironment, link: Link[ToEnvironment]) -> None:
    """Serve one trajectory, then wait for the end."""
    asyncio.run(_Acting(environment, link).serve())


class _Acting:
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
            pass  # it is over; the generator hangs up and kills
        if made is not None:
            with suppress(Exception):
                await made.close()

    async def _turns(self, environment: Environment, begin: BeginTrajectory) -> None:
        first = messages_of(await environment.reset(begin.prompt))
        tools = tuple(schema_of(tool) for tool in environment.tools)
        await self._send(Turned(messages=first, tools=tools))
        while isinstance(replied := await self._link.received(), Replied):
            found = await environment.step(reply_of(replied))
            step = found if isinstance(found, Step) else Step(messages=found)
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
    import openai  # for such functions alone

    client = openai.AsyncOpenAI(
        base_url=begin.url,
        api_key=begin.api_key,
        max_retries=0,
        timeout=None,  # environment.timeout_s is for the whole trajectory
        # Within this host: past proxies, and without TLS, whose certificates take long to load.
        http_client=openai.DefaultAsyncHttpxClient(verify=False, trust_env=False),
    )
    try:
        found = await rollout(client, begin.prompt)
    finally:
        await client.close()
    if isinstance(found, Mapping):
        given = dict(found)
        return Turned(
            messages=(),
            reward=_reward(given.pop("score", None), "score"),
            turn_rewards=_numbers(given.pop("turn_rewards", None), "turn_rewards"),
            done=True,
            parts=_parts(given),
        )
    return Turned(messages=(), reward=_reward(found, "reward"), done=True)


def _parts(given: Mapping[Any, object]) -> dict[str, float]:
    return {str(name)[:MAX_PART_NAME]: number(one, name) or 0.0 for name, one in given.items()}


def number(value: object, name: str) -> float | None:
    """Return a number that an environment gave; None is none.

    Raises:
        TypeError: it is no number.
        ValueError: it is none that is finite.
    """
    if value is None:
        return None
    if isinstance(value, bool | int | float) or hasattr(value, "__float__"):
        found = float(value)
        if not math.isfinite(found):
            raise ValueError(f"{name} is {found}, expected a finite number")
        return found
    raise TypeError(f"{name} is {type(value).__name__}, expected a number")


def _reward(value: object, name: str) -> float | None:
    found = number(value, name)
    if found is not None and (why := why_no_reward(found, name)):
        raise ValueError(why)
    return found


def _numbers(values: object, name: str) -> tuple[float, ...] | None:
    if values is None:
        return None
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise TypeError(f"{name} is {type(values).__name__}, expected a list of numbers")
    return tuple(_reward(one, f"a number of {name}") or 0.0 for one in values)


def messages_of(said: Messages) -> tuple[dict[str, Json], ...]:
    """Return what an environment says as messages of OpenAI's API.

    Raises:
        TypeError: it is no text, and no message of text.
    """
    if isinstance(said, str):
        return ({"role": "user", "content": said},)
    several = [said] if isinstance(said, Mapping) else list(said)
    found: list[dict[str, Json]] = []
    for one in several:
        if isinstance(one, ChatMessage):
            found.append({"role": one.role, "content": one.content})
        elif isinstance(one, Mapping):
            found.append(dict(one))
        else:
            raise TypeError(f"a message is {type(one).__name__}, expected text or a mapping")
        content = found[-1].get("content")
        if not isinstance(content, str | list):
            raise TypeError(f"content of a message is {type(content).__name__}, expected text")
    msgspec.json.encode(found)  # what JSON does not have is an error here
    return tuple(found)


def reply_of(replied: Replied) -> Reply:
    """Return a reply as environments get it."""
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
    """Have orphans below this process become its children, so that they are found."""
    import ctypes

    pr_set_child_subreaper = 36
    ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1)

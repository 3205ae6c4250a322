"""One trajectory of several turns: environment and policy in turns, until one of them is done."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Literal, Protocol

from slipstream.generators.capture.off_loop import LARGE_BYTES
from slipstream.generators.capture.requests import ChatRequest, content_text
from slipstream.generators.capture.server import LIMIT_REACHED, CaptureServer
from slipstream.generators.capture.session import CaptureSession
from slipstream.generators.environments.host import EnvironmentFailedError
from slipstream.generators.environments.messages import (
    Begin,
    FromEnvironment,
    Replied,
    ToEnvironment,
    Turned,
    Unable,
)
from slipstream.generators.turns.conversation import TrajectoryLimitError
from slipstream.wire.messages.trajectory import Json, Prompt
from slipstream.wire.thoughts import THINK, THINK_ENDS

EndedBy = Literal["environment", "turns", "tokens"]


class ActingProcess(Protocol):
    """The process of one trajectory, here or on another host."""

    async def tell(self, message: ToEnvironment, /) -> None:
        """Send it a message; it answers each with one."""
        ...

    async def hear(self) -> FromEnvironment:
        """Return its next message.

        Raises:
            EnvironmentFailedError: there comes none.
        """
        ...


class Environments(Protocol):
    """What runs an environment's processes: an EnvironmentHost, or servers on other hosts."""

    version: str
    drives_itself: bool
    may_reward: bool  # False: a reward function has to
    replaced: Counter[str]

    def trajectory(self) -> AbstractAsyncContextManager[ActingProcess]:
        """Yield the process of a trajectory; afterwards nothing is left of it.

        Raises:
            EnvironmentFailedError: it does not start.
        """
        ...

    async def close(self) -> None:
        """End all."""
        ...


@dataclass(slots=True)
class Outcome:
    """What came of a trajectory, besides its tokens."""

    ended_by: EndedBy
    messages: list[dict[str, Json]]  # all that was said, in order
    rewards: list[float | None] = field(default_factory=list)
    """Of each reply in the order of time, None where none was given; empty if of none."""
    total: float | None = None  # where the environment gave one besides
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def has_turn_rewards(self) -> bool:
        """True if the environment gave a reward for a reply."""
        return any(one is not None for one in self.rewards)

    @property
    def reward(self) -> float | None:
        """Of all; the sum over replies if none was given, None if they have none either."""
        if self.total is not None or not self.has_turn_rewards:
            return self.total
        return sum(one or 0.0 for one in self.rewards)


async def run_trajectory(
    host: Environments,
    session: CaptureSession,
    prompt: Prompt,
    *,
    timeout_s: float,
    server: CaptureServer | None = None,
) -> Outcome:
    """Run one trajectory; its tokens are in ``session.conversation``.

    Args:
        host: of the environment.
        session: of this trajectory.
        prompt: that it begins with.
        timeout_s: for all of it, engine and environment together.
        server: where an agent that drives itself finds the policy.

    Raises:
        EnvironmentFailedError: the environment cannot go on: no reward, and none of 0.
        EngineError: the engine failed.
    """
    try:
        async with asyncio.timeout(timeout_s), host.trajectory() as acting:
            if host.drives_itself:
                return await _driven(acting, session, prompt, server)
            return await _in_turns(acting, session, prompt)
    except TimeoutError:
        raise EnvironmentFailedError(
            f"a trajectory took longer than environment.timeout_s = {timeout_s:g}"
        ) from None


async def _in_turns(acting: ActingProcess, session: CaptureSession, prompt: Prompt) -> Outcome:
    await acting.tell(Begin(prompt=prompt))
    turned = await _turned(acting)
    if not turned.messages:
        raise EnvironmentFailedError("reset returned no message")
    said: list[dict[str, Json]] = []
    outcome, tools = Outcome("environment", said), list(turned.tools) or None
    while True:
        asked = [*said, *turned.messages]
        try:
            request = ChatRequest(messages=asked, tools=tools)
            reply = await session.chat(request, _size(asked, tools))
        except TrajectoryLimitError as error:
            outcome.ended_by = _limit_of(session, str(error))
            return outcome
        session.keep(reply)
        said[:] = [*asked, reply.message]
        await acting.tell(
            Replied(
                text=reply.text,
                tool_calls=tuple(reply.tool_calls),
                thought=reply.thought,
                num_unreadable=reply.rejected["unreadable"],
                finish_reason=reply.finish_reason,
                num_tokens=len(reply.completion.token_ids),
            )
        )
        turned = await _turned(acting)
        outcome.rewards.append(turned.reward)
        outcome.parts |= turned.parts
        if turned.done or not turned.messages:
            return outcome


def _size(messages: Sequence[Mapping[str, Json]], tools: Sequence[Json] | None) -> int:
    """Return how many characters messages have; those with more than text count as many."""
    values = [value for one in messages for value in one.values()]
    is_text = not tools and all(isinstance(one, str) for one in values)
    return sum(map(len, values)) if is_text else LARGE_BYTES


async def _driven(
    acting: ActingProcess, session: CaptureSession, prompt: Prompt, server: CaptureServer | None
) -> Outcome:
    if server is None:
        raise EnvironmentFailedError("there is no endpoint for an agent that drives itself")
    key = server.open(session)
    try:
        begin = Begin(prompt=prompt, url=server.url, api_key=key)
        await acting.tell(begin)
        message = await acting.hear()
    finally:
        await server.end(key)
    if isinstance(message, Unable) and session.reached_limit and LIMIT_REACHED in message.reason:
        return Outcome(_limit_of(session, message.reason), said_in(session))
    if isinstance(message, Unable) and session.engine_error is not None:
        raise session.engine_error
    turned = _as_turned(message)
    count, given = session.conversation.num_turns, turned.turn_rewards
    if not count:
        raise EnvironmentFailedError("it asked the policy for nothing")
    if given is not None and len(given) != count:
        raise EnvironmentFailedError(
            f"its turn_rewards has {len(given)} numbers, and the policy gave {count} replies"
        )
    return Outcome(
        "environment",
        said_in(session),
        rewards=list(given or ()),
        total=turned.reward,
        parts=dict(turned.parts),
    )


def _limit_of(session: CaptureSession, why: str) -> EndedBy:
    """Return which limit ended a trajectory, which goes on as far as it came.

    Raises:
        EnvironmentFailedError: it did not begin.
    """
    if not session.conversation.num_turns:
        raise EnvironmentFailedError(f"the first prompt is too long: {why}")
    return "turns" if session.conversation.is_full else "tokens"


def said_in(session: CaptureSession) -> list[dict[str, Json]]:
    """Return the newest history of a client, with the reply to it."""
    return [dict(message) for message in session.newest_messages]


async def _turned(acting: ActingProcess) -> Turned:
    return _as_turned(await acting.hear())


def _as_turned(message: FromEnvironment) -> Turned:
    if isinstance(message, Unable):
        raise EnvironmentFailedError(message.reason)
    if not isinstance(message, Turned):
        raise EnvironmentFailedError("it sent nonsense")
    return message


def transcript_text(messages: Sequence[Json]) -> str:
    """Return all that was said after the first question, for reward functions and people."""
    lines = []
    for message in messages:
        calls = message.get("tool_calls") or ()
        thought = message.get("reasoning_content")
        said = [f"{THINK}{thought}{THINK_ENDS}" if thought and isinstance(thought, str) else ""]
        said += [content_text(message.get("content"))]
        functions = [one["function"] for one in calls]
        said += [f"{one['name']}({one.get('arguments') or '{}'})" for one in functions]
        lines.append(f"{message['role']}: " + "\n".join(part for part in said if part))
    return "\n".join(lines)

"""One trajectory of several turns: environment and policy alternate until one of them is done."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Literal, Protocol

from slipstream.generators.capture.server import LIMIT_REACHED, CaptureServer
from slipstream.generators.environments.host import EnvironmentFailedError
from slipstream.generators.environments.messages import (
    BeginTrajectory,
    FromEnvironment,
    Replied,
    ToEnvironment,
    Turned,
    Unable,
)
from slipstream.generators.turns.calls import TrajectoryCalls
from slipstream.generators.turns.conversation import TrajectoryLimitError
from slipstream.generators.turns.off_loop import LARGE_BYTES
from slipstream.generators.turns.requests import ChatRequest, content_text
from slipstream.wire.messages.trajectory import Json, Prompt
from slipstream.wire.thoughts import THINK, THINK_ENDS

EndedBy = Literal["environment", "turns", "tokens"]


class ActingProcess(Protocol):
    """The process of one trajectory, here or on another host."""

    async def tell(self, message: ToEnvironment, /) -> None:
        """Send a message; the process answers each with one."""
        ...

    async def hear(self) -> FromEnvironment:
        """Return the next message of the process.

        Raises:
            EnvironmentFailedError: no message comes.
        """
        ...


class Environments(Protocol):
    """Runner of an environment's processes: an EnvironmentHost, or servers on other hosts."""

    version: str
    drives_itself: bool
    may_reward: bool  # False: a reward function must
    replaced: Counter[str]

    def trajectory(self) -> AbstractAsyncContextManager[ActingProcess]:
        """Yield the process of a trajectory; afterwards nothing is left of it.

        Raises:
            EnvironmentFailedError: the process does not start.
        """
        ...

    async def close(self) -> None:
        """End all processes."""
        ...


@dataclass(slots=True)
class TrajectoryOutcome:
    """Result of a trajectory, besides its tokens."""

    ended_by: EndedBy
    messages: list[dict[str, Json]]  # messages of both sides, in order
    rewards: list[float | None] = field(default_factory=list)
    """Rewards of the replies in the order of time, or empty; None where a reply has no reward."""
    total: float | None = None  # reward of the whole trajectory, if the environment gave one
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def has_turn_rewards(self) -> bool:
        """True if the environment gave a reward for a reply."""
        return any(reward is not None for reward in self.rewards)

    @property
    def reward(self) -> float | None:
        """Reward of the trajectory: the total, else the sum over replies; None without either."""
        if self.total is not None or not self.has_turn_rewards:
            return self.total
        return sum(reward or 0.0 for reward in self.rewards)


async def run_trajectory(
    host: Environments,
    calls: TrajectoryCalls,
    prompt: Prompt,
    *,
    timeout_s: float,
    server: CaptureServer | None = None,
) -> TrajectoryOutcome:
    """Run one trajectory; its tokens are in ``calls.conversation``.

    Args:
        host: Runs the environment's processes.
        calls: Calls of this trajectory.
        prompt: First prompt.
        timeout_s: Limit of the whole trajectory, engine and environment together.
        server: Endpoint at which an agent that drives itself reaches the policy.

    Raises:
        EnvironmentFailedError: the environment failed; no reward is given, not even 0.
        EngineError: the engine failed.
    """
    try:
        async with asyncio.timeout(timeout_s), host.trajectory() as process:
            if host.drives_itself:
                return await _driven(process, calls, prompt, server)
            return await _in_turns(process, calls, prompt)
    except TimeoutError:
        raise EnvironmentFailedError(
            f"a trajectory took longer than environment.timeout_s = {timeout_s:g}"
        ) from None


async def _in_turns(
    process: ActingProcess, calls: TrajectoryCalls, prompt: Prompt
) -> TrajectoryOutcome:
    await process.tell(BeginTrajectory(prompt=prompt))
    turned = _as_turned(await process.hear())
    if not turned.messages:
        raise EnvironmentFailedError("reset returned no message")
    outcome, tools = TrajectoryOutcome("environment", []), list(turned.tools) or None
    while True:
        asked = [*outcome.messages, *turned.messages]
        try:
            request = ChatRequest(messages=asked, tools=tools)
            reply = await calls.chat(request, _size(asked, tools))
        except TrajectoryLimitError as error:
            outcome.ended_by = _limit_of(calls, str(error))
            return outcome
        calls.keep(reply)
        outcome.messages = [dict(message) for message in reply.history]
        await process.tell(
            Replied(
                text=reply.text,
                tool_calls=tuple(reply.tool_calls),
                thought=reply.thought,
                num_unreadable=reply.rejected["unreadable"],
                finish_reason=reply.finish_reason,
                num_tokens=len(reply.completion.token_ids),
            )
        )
        turned = _as_turned(await process.hear())
        outcome.rewards.append(turned.reward)
        outcome.parts |= turned.parts
        if turned.done or not turned.messages:
            return outcome


def _size(messages: Sequence[Mapping[str, Json]], tools: Sequence[Json] | None) -> int:
    """Return how many characters messages have; messages with more than text count as large."""
    values = [value for message in messages for value in message.values()]
    is_text = not tools and all(isinstance(value, str) for value in values)
    return sum(map(len, values)) if is_text else LARGE_BYTES


async def _driven(
    process: ActingProcess, calls: TrajectoryCalls, prompt: Prompt, server: CaptureServer | None
) -> TrajectoryOutcome:
    if server is None:
        raise EnvironmentFailedError("there is no endpoint for an agent that drives itself")
    key = server.open(calls)
    try:
        begin = BeginTrajectory(prompt=prompt, url=server.url, api_key=key)
        await process.tell(begin)
        message = await process.hear()
    finally:
        await server.end(key)
    history = [dict(message) for message in calls.newest_history]
    if isinstance(message, Unable) and calls.reached_limit and LIMIT_REACHED in message.reason:
        return TrajectoryOutcome(_limit_of(calls, message.reason), history)
    if isinstance(message, Unable) and calls.engine_error is not None:
        raise calls.engine_error
    turned = _as_turned(message)
    count, rewards = calls.conversation.num_turns, turned.turn_rewards
    if not count:
        raise EnvironmentFailedError("it asked the policy for nothing")
    if rewards is not None and len(rewards) != count:
        raise EnvironmentFailedError(
            f"its turn_rewards has {len(rewards)} numbers, and the policy gave {count} replies"
        )
    return TrajectoryOutcome(
        "environment",
        history,
        rewards=list(rewards or ()),
        total=turned.reward,
        parts=dict(turned.parts),
    )


def _limit_of(calls: TrajectoryCalls, reason: str) -> EndedBy:
    """Return the limit that ended a trajectory; its turns until then are used.

    Raises:
        EnvironmentFailedError: the trajectory has no turn.
    """
    if not calls.conversation.num_turns:
        raise EnvironmentFailedError(f"the first prompt is too long: {reason}")
    return "turns" if calls.conversation.is_full else "tokens"


def _as_turned(message: FromEnvironment) -> Turned:
    if isinstance(message, Unable):
        raise EnvironmentFailedError(message.reason)
    if not isinstance(message, Turned):
        raise EnvironmentFailedError("it sent nonsense")
    return message


def transcript_text(messages: Sequence[Json]) -> str:
    """Return messages as a text for reward functions and people."""
    lines = []
    for message in messages:
        thought = message.get("reasoning_content")
        parts = [f"{THINK}{thought}{THINK_ENDS}" if thought and isinstance(thought, str) else ""]
        parts += [content_text(message.get("content"))]
        functions = [call["function"] for call in message.get("tool_calls") or ()]
        parts += [f"{called['name']}({called.get('arguments') or '{}'})" for called in functions]
        lines.append(f"{message['role']}: " + "\n".join(filter(None, parts)))
    return "\n".join(lines)

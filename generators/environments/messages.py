"""Messages between a generator, the loader of its environment, and processes of trajectories.

The loader forks a process for each trajectory, which connects to the generator by itself.
"""

from typing import TypeAlias

import msgspec

from slipstream.wire.messages.bounds import (
    Body,
    ByName,
    Count,
    Figure,
    Name,
    Number,
    Reward,
    Several,
    Text,
)
from slipstream.wire.messages.trajectory import Json, Prompt

MAX_OBSERVATION_BYTES = 8 << 20
"""Limit of a message from an environment: a longer one ends its trajectory."""


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=str.lower):
    """Base of all messages."""


class LoadEnvironment(_Message, frozen=True):
    """First message to the process: the environment to import."""

    function: Text  # MODULE:NAME or FILE.py:NAME
    options: ByName[Json]
    memory_mb: Count  # limit of a trajectory
    max_processes: Count  # limit of a trajectory
    apart: bool = True  # keep trajectories from each other


class EnvironmentLoaded(_Message, frozen=True):
    """The environment is imported."""

    version: Text  # declared version, else hash of its file
    drives_itself: bool  # True: a function with a client of its own
    may_reward: bool = True
    gaps: Several[Text] = ()  # ways in which trajectories are not kept apart here
    is_sealed: bool = False  # True: the kernel ends all that a trajectory has started
    is_below: bool = False  # True: the loader is the only child of the started process


class EnvironmentNotLoaded(_Message, frozen=True):
    """The environment cannot be imported, for this reason."""

    message: Text


class Fork(_Message, frozen=True):
    """Start a trajectory's process, which connects to ``address`` and shows ``ticket``."""

    number: Count
    address: Text  # path of a Unix socket
    ticket: Name


class Forked(_Message, frozen=True):
    """The process of a trajectory runs, and connects."""

    number: Count
    pid: Count  # in the loader's namespace


class Keeping(_Message, frozen=True):
    """A process runs code of the policy for a trajectory (``broker/sandbox/keeper.py``)."""

    number: Count
    pid: Count  # in the loader's namespace


class ProcessEnded(_Message, frozen=True):
    """The process of a trajectory has ended."""

    number: Count
    code: Number  # exit code, or -N after signal N
    reason: Text = ""  # why it did not start


class Connected(_Message, frozen=True):
    """First message of a trajectory's process."""

    ticket: Name


class BeginTrajectory(_Message, frozen=True):
    """Reset the environment, or run the function."""

    prompt: Prompt
    url: Name = ""  # endpoint for a function that drives itself
    api_key: Name = ""


class Turned(_Message, frozen=True):
    """Messages of the environment; without any the trajectory is done."""

    messages: Several[ByName[Json]]
    tools: Several[ByName[Json]] = ()  # sent with the first messages
    reward: Reward | None = None  # reward of the last reply, or of all if it drives itself
    turn_rewards: Several[Reward] | None = None  # rewards of each reply, if it drives itself
    done: bool = False
    parts: ByName[Figure] = {}


class Replied(_Message, frozen=True):
    """A reply of the policy."""

    text: Body
    tool_calls: Several[ByName[Json]]  # tool calls of OpenAI's API
    finish_reason: Name
    num_tokens: Count
    thought: Body = ""
    num_unreadable: Count = 0  # unreadable calls, which remain in the text


class Unable(_Message, frozen=True):
    """The environment cannot continue, for this reason."""

    reason: Text


ToLoader: TypeAlias = LoadEnvironment | Fork
FromLoader: TypeAlias = EnvironmentLoaded | EnvironmentNotLoaded | Forked | Keeping | ProcessEnded
ToEnvironment: TypeAlias = BeginTrajectory | Replied
FromEnvironment: TypeAlias = Connected | Turned | Unable

to_loader: msgspec.msgpack.Decoder[ToLoader] = msgspec.msgpack.Decoder(ToLoader)
from_loader: msgspec.msgpack.Decoder[FromLoader] = msgspec.msgpack.Decoder(FromLoader)
to_environment: msgspec.msgpack.Decoder[ToEnvironment] = msgspec.msgpack.Decoder(ToEnvironment)
from_environment: msgspec.msgpack.Decoder[FromEnvironment] = msgspec.msgpack.Decoder(
    FromEnvironment
)

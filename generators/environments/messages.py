"""Messages between a generator, the process that has an environment loaded, and trajectories' own.

The first forks a process for each trajectory, which connects to the generator by itself.
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
"""Of a message from an environment: a longer one ends its trajectory."""


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=str.lower):
    """Base of all messages."""


class LoadEnvironment(_Message, frozen=True):
    """First message to the process: the environment to import."""

    function: Text  # MODULE:NAME or FILE.py:NAME
    options: ByName[Json]
    memory_mb: Count  # of a trajectory
    max_processes: Count  # the same
    apart: bool = True  # trajectories from each other


class EnvironmentLoaded(_Message, frozen=True):
    """It is there."""

    version: Text  # hash of its file, or as it declares
    drives_itself: bool  # a function with a client of its own
    may_reward: bool = True
    gaps: Several[Text] = ()  # what does not keep trajectories apart here
    is_sealed: bool = False  # the kernel ends what a trajectory has started with it
    is_below: bool = False  # in a PID namespace of its own, as the one child of what was started


class EnvironmentNotLoaded(_Message, frozen=True):
    """It is not, and why."""

    message: Text


class Fork(_Message, frozen=True):
    """Start a process for a trajectory, which connects to ``address`` and shows ``ticket``."""

    number: Count
    address: Text  # of a Unix socket
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
    why: Text = ""  # it did not start


class Connected(_Message, frozen=True):
    """First message of a trajectory's process."""

    ticket: Name


class BeginTrajectory(_Message, frozen=True):
    """Reset the environment, or run the function."""

    prompt: Prompt
    url: Name = ""  # of the endpoint, for a function that drives itself
    api_key: Name = ""


class Turned(_Message, frozen=True):
    """What the environment says; without messages it is done."""

    messages: Several[ByName[Json]]
    tools: Several[ByName[Json]] = ()  # with the first messages
    reward: Reward | None = None  # of the turn before; of all if it drives itself
    turn_rewards: Several[Reward] | None = None  # of each reply, if it drives itself
    done: bool = False
    parts: ByName[Figure] = {}


class Replied(_Message, frozen=True):
    """What the policy said."""

    text: Body
    tool_calls: Several[ByName[Json]]  # as of OpenAI's API
    finish_reason: Name
    num_tokens: Count
    thought: Body = ""
    num_unreadable: Count = 0  # calls that remain in the text


class Unable(_Message, frozen=True):
    """The environment cannot go on, and why."""

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

"""Messages between a generator, the process that has an environment loaded, and trajectories' own.

The first forks a process for each trajectory, which connects to the generator by itself.
"""

from typing import TypeAlias

import msgspec

from slipstream.wire.messages.trajectory import Json, Prompt

MAX_OBSERVATION_BYTES = 8 << 20
"""Of a message from an environment: a longer one ends its trajectory."""


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=str.lower):
    """Base of all messages."""


class LoadEnvironment(_Message, frozen=True):
    """First message to the process: the environment to import."""

    function: str  # MODULE:NAME or FILE.py:NAME
    options: dict[str, Json]
    apart: bool = True  # trajectories from each other


class EnvironmentLoaded(_Message, frozen=True):
    """It is there."""

    version: str  # hash of its file, or as it declares
    drives_itself: bool  # a function with a client of its own
    may_reward: bool = True
    gaps: tuple[str, ...] = ()  # what does not keep trajectories apart here


class LoadFailed(_Message, frozen=True):
    """It is not, and why."""

    message: str


class Fork(_Message, frozen=True):
    """Start a process for a trajectory, which connects to ``address`` and shows ``ticket``."""

    number: int
    address: str  # of a Unix socket
    ticket: str


class Forked(_Message, frozen=True):
    """The process of a trajectory runs, and connects."""

    number: int
    pid: int  # in the loader's namespace


class Keeping(_Message, frozen=True):
    """A process runs code of the policy for a trajectory (``broker/sandbox/keeper.py``)."""

    number: int
    pid: int  # in the loader's namespace


class Ended(_Message, frozen=True):
    """The process of a trajectory has ended."""

    number: int
    code: int  # exit code, or -N after signal N


class Connected(_Message, frozen=True):
    """First message of a trajectory's process."""

    ticket: str


class Begin(_Message, frozen=True):
    """Reset the environment, or run the function."""

    prompt: Prompt
    url: str = ""  # of the endpoint, for a function that drives itself
    api_key: str = ""


class Turned(_Message, frozen=True):
    """What the environment says; without messages it is done."""

    messages: tuple[dict[str, Json], ...]
    tools: tuple[dict[str, Json], ...] = ()  # with the first messages
    reward: float | None = None  # of the turn before; of all if it drives itself
    turn_rewards: tuple[float, ...] | None = None  # of each reply, if it drives itself
    done: bool = False
    parts: dict[str, float] = {}


class Replied(_Message, frozen=True):
    """What the policy said."""

    text: str
    tool_calls: tuple[dict[str, Json], ...]  # as of OpenAI's API
    finish_reason: str
    num_tokens: int


class Unable(_Message, frozen=True):
    """The environment cannot go on, and why."""

    reason: str


ToLoader: TypeAlias = LoadEnvironment | Fork
FromLoader: TypeAlias = EnvironmentLoaded | LoadFailed | Forked | Keeping | Ended
ToEnvironment: TypeAlias = Begin | Replied
FromEnvironment: TypeAlias = Connected | Turned | Unable

to_loader: msgspec.msgpack.Decoder[ToLoader] = msgspec.msgpack.Decoder(ToLoader)
from_loader: msgspec.msgpack.Decoder[FromLoader] = msgspec.msgpack.Decoder(FromLoader)
to_environment: msgspec.msgpack.Decoder[ToEnvironment] = msgspec.msgpack.Decoder(ToEnvironment)
from_environment: msgspec.msgpack.Decoder[FromEnvironment] = msgspec.msgpack.Decoder(
    FromEnvironment
)

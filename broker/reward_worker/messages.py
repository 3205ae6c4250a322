"""Messages between a reward worker and its children, over a Unix socket pair."""

from typing import TypeAlias

import msgspec

from slipstream.broker.rewards.outcomes import FunctionInfo, RewardOutcome
from slipstream.wire.messages.bounds import ByName, Count, Figure, Several, Text
from slipstream.wire.messages.trajectory import Json, Transcript


class NamedReward(msgspec.Struct, frozen=True, kw_only=True):
    """A reward function as the settings name it."""

    setting: Text  # reward or reward.sources.NAME
    function: Text
    options: ByName[Json] = {}


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=str.lower):
    """Base of all messages."""


class Load(_Message, frozen=True):
    """First message to a child: the functions to import."""

    rewards: Several[NamedReward]
    offered: ByName[Json]  # arguments for functions that name them
    timeout_s: Figure  # limit of one call


class ScoreCall(_Message, frozen=True):
    """Run one function on these answers."""

    call_id: Count
    function: Count  # place in Load.rewards
    transcripts: Several[Transcript]


class Loaded(_Message, frozen=True):
    """The functions are loaded, in the order of Load."""

    functions: Several[FunctionInfo]
    are_async: Several[bool]


class LoadFailed(_Message, frozen=True):
    """A function cannot be loaded, for this reason."""

    message: Text


class CallOutcomes(_Message, frozen=True):
    """The outcomes of a call, in the order of its transcripts."""

    call_id: Count
    outcomes: Several[RewardOutcome]
    failed: bool = False  # the call raised, and not Unavailable


ToChild: TypeAlias = Load | ScoreCall
FromChild: TypeAlias = Loaded | LoadFailed | CallOutcomes

to_child: msgspec.msgpack.Decoder[ToChild] = msgspec.msgpack.Decoder(ToChild)
from_child: msgspec.msgpack.Decoder[FromChild] = msgspec.msgpack.Decoder(FromChild)

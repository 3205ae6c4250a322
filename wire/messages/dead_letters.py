"""Work that failed after all attempts: kept for inspection and another try."""

from typing import Literal, TypeAlias, TypeGuard, get_args

import msgspec

from slipstream.wire.messages.bounds import Count, Name, Number, Several, Text
from slipstream.wire.messages.trajectory import ItemKind, Prompt

DeadReason: TypeAlias = Literal["reward_unavailable", "lease_exhausted", "poison", "unfinished"]


def is_dead(reason: str) -> TypeGuard[DeadReason]:
    """True if a group dropped for this reason becomes a dead letter."""
    return reason in get_args(DeadReason)


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt that failed."""

    sibling: Number = -1  # -1 is all that were missing
    by: Name = ""  # name of the worker
    reason: Text = ""
    function: Text = ""  # reward function
    version: Text = ""  # version of the function
    excerpt: Text = ""  # the beginning of the answer


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """A group that was dropped because no worker could answer or score it."""

    group_id: Count
    item: ItemKind
    position: Count  # position of the prompt in its source
    prompt: Prompt
    reason: DeadReason
    step: Count  # learner steps completed when it was dropped
    failures: Several[Failure]  # the last ones
    retry_of: Number = -1  # the group that it repeats

"""Work that failed after all attempts: kept for inspection and another try."""

from typing import Literal, TypeAlias, TypeGuard, get_args

import msgspec

from slipstream.wire.messages.trajectory import ItemKind, Prompt

DeadReason: TypeAlias = Literal["reward_unavailable", "lease_exhausted", "poison"]


def is_dead(reason: str) -> TypeGuard[DeadReason]:
    """True if a group dropped for this reason becomes a dead letter."""
    return reason in get_args(DeadReason)


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt that failed."""

    sibling: int = -1  # -1 is all that were missing
    by: str = ""  # name of the worker
    reason: str = ""
    function: str = ""  # that was to score it
    version: str = ""  # of the function
    excerpt: str = ""  # the beginning of the answer


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """A group that was dropped because no worker could answer or score it."""

    group_id: int
    item: ItemKind
    position: int  # of the prompt in its source
    prompt: Prompt
    reason: DeadReason
    step: int  # learner steps completed when it was dropped
    failures: tuple[Failure, ...]  # the last ones
    retry_of: int = -1  # the group that it repeats

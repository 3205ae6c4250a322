"""Bounds of what a peer sends, enforced where a message is decoded: numbers, texts, collections.

They hold for every run. What depends on a run's settings, as the tokens of a trajectory, the ledger
and the learner check. A field without a bound is named, with its reason, in
tests/unit/wire/messages/test_bounds.py.
"""

import sys
from collections.abc import Mapping
from math import isfinite
from typing import Annotated, TypeAlias, TypeVar

from msgspec import Meta

_Item = TypeVar("_Item")
MOST = 2**53  # beyond that a number of JSON is rounded
MAX_REWARD = 1e15
MOST_ITEMS = 1 << 20  # items of one collection
MOST_CHARACTERS = 1 << 16  # characters of a reason

Count: TypeAlias = Annotated[int, Meta(ge=0, le=MOST)]
"""A number of things, an id, a place or a step."""
Number: TypeAlias = Annotated[int, Meta(ge=-MOST, le=MOST)]
"""The same where -1 means none, or a difference."""
Figure: TypeAlias = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
"""A measurement, never infinite and always a number."""
Reward: TypeAlias = Annotated[float, Meta(ge=-MAX_REWARD, le=MAX_REWARD)]
"""A reward. Learners have it in float32, where squares of such are finite, too."""
Name: TypeAlias = Annotated[str, Meta(max_length=300)]
"""A name, an address, a digest or a key."""
Text: TypeAlias = Annotated[str, Meta(max_length=MOST_CHARACTERS)]
"""A reason or a path."""
Body: TypeAlias = Annotated[str, Meta(max_length=1 << 26)]
"""What a policy read or wrote; a message has a bound of its own that depends on its sender."""
Blob: TypeAlias = Annotated[bytes, Meta(max_length=1 << 28)]
Several: TypeAlias = Annotated[tuple[_Item, ...], Meta(max_length=MOST_ITEMS)]
ByName: TypeAlias = Annotated[dict[Name, _Item], Meta(max_length=MOST_ITEMS)]
ById: TypeAlias = Annotated[dict[Count, _Item], Meta(max_length=MOST_ITEMS)]
Listed: TypeAlias = Annotated[list[_Item], Meta(max_length=MOST_ITEMS)]


def finite(figures: Mapping[str, float]) -> dict[str, float]:
    """Return those of some figures that are numbers, for a field that takes no others."""
    return {name: value for name, value in figures.items() if isfinite(value)}


def shortened(text: str) -> str:
    """Return the beginning of a text of others that a ``Text`` holds."""
    return text[:MOST_CHARACTERS]


def why_no_reward(number: float, what: str = "the reward") -> str:
    """Return why a number is no reward; empty if it is one."""
    if abs(number) <= MAX_REWARD:
        return ""
    return f"{what} is {number:g}; it may be at most {MAX_REWARD:g}"

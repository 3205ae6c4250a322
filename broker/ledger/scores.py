"""Validates and bounds scores from a reward worker, which may be wrong or foreign."""

from collections.abc import Mapping
from itertools import islice

import msgspec

from slipstream.wire.messages.trajectory import (
    MAX_EXCERPT,
    MAX_PART_NAME,
    MAX_PARTS,
    MAX_REASON,
    Score,
)

_MOST = 1e15  # of a reward; squares of such are finite in float32
_UNCHANGED = 100  # characters of all texts; nearly all scores are short


def clamped(score: Score, num_turns: int = 1) -> Score:
    """Return a score with a finite reward or none, finite parts, and texts of a bounded length.

    A score with rewards of turns has one for each of the trajectory's ``num_turns``, or no reward.
    """
    if score.reward is not None and (invalid := _why_invalid(score, num_turns)):
        score = msgspec.structs.replace(
            score, reward=None, turn_rewards=(), unavailable=f"invalid: {invalid}"
        )
    if score.parts and not _are_plain(score.parts):
        kept = (
            (name[:MAX_PART_NAME], part) for name, part in score.parts.items() if _is_plain(part)
        )
        score = msgspec.structs.replace(score, parts=dict(islice(kept, MAX_PARTS)))
    names = len(score.function) + len(score.version)
    if names + len(score.unavailable) + len(score.excerpt) > _UNCHANGED:
        score = msgspec.structs.replace(
            score,
            unavailable=score.unavailable[:MAX_REASON],
            function=score.function[-MAX_REASON:],
            version=score.version[:MAX_PART_NAME],
            excerpt=score.excerpt[:MAX_EXCERPT],
        )
    return score


def _why_invalid(score: Score, num_turns: int) -> str:
    if score.reward is not None and not _is_plain(score.reward):
        return f"the reward is {score.reward}; it may be at most {_MOST:g}"
    if score.turn_rewards and len(score.turn_rewards) != num_turns:
        return (
            f"turn_rewards has {len(score.turn_rewards)} numbers, the trajectory {num_turns} turns"
        )
    for number, reward in enumerate(score.turn_rewards, start=1):
        if not _is_plain(reward):
            return f"the reward of turn {number} is {reward}; it may be at most {_MOST:g}"
    return ""


def _are_plain(parts: Mapping[str, float]) -> bool:
    short = len(parts) <= MAX_PARTS and max(map(len, parts)) <= MAX_PART_NAME
    return short and all(map(_is_plain, parts.values()))


def _is_plain(value: float) -> bool:
    return abs(value) <= _MOST

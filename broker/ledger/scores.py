"""Validates and bounds scores from a reward worker, which may be wrong or foreign."""

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
_UNCHANGED = 100  # characters; nearly all scores are short


def clamped(score: Score) -> Score:
    """Return a score with a finite reward or none, finite parts, and texts of a bounded length."""
    if score.reward is not None and not abs(score.reward) <= _MOST:
        unavailable = f"invalid: the reward is {score.reward}; it may be at most {_MOST:g}"
        score = msgspec.structs.replace(score, reward=None, unavailable=unavailable)
    parts = score.parts
    short = len(parts) <= MAX_PARTS and all(len(name) <= MAX_PART_NAME for name in parts)
    if not short or not all(map(_is_plain, parts.values())):
        kept = ((name[:MAX_PART_NAME], part) for name, part in parts.items() if _is_plain(part))
        score = msgspec.structs.replace(score, parts=dict(islice(kept, MAX_PARTS)))
    texts = (score.unavailable, score.function, score.version, score.excerpt)
    if any(len(text) > _UNCHANGED for text in texts):
        score = msgspec.structs.replace(
            score,
            unavailable=score.unavailable[:MAX_REASON],
            function=score.function[-MAX_REASON:],
            version=score.version[:MAX_PART_NAME],
            excerpt=score.excerpt[:MAX_EXCERPT],
        )
    return score


def _is_plain(value: float) -> bool:
    return abs(value) <= _MOST

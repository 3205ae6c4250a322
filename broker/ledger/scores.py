"""Validates and bounds scores from a reward worker, which may be wrong or foreign."""

import logging
from collections.abc import Iterable, Mapping
from itertools import islice

import msgspec

from slipstream.wire.messages.bounds import MAX_REWARD, why_no_reward
from slipstream.wire.messages.trajectory import (
    MAX_EXCERPT,
    MAX_PART_NAME,
    MAX_PARTS,
    MAX_REASON,
    Score,
)

_log = logging.getLogger(__name__)
MAX_PARTS_OF_RUN = 256  # each is a curve of every step, in files, on the page and in memory
OTHER_PARTS = "other"
_UNCHANGED = 100  # characters of all texts; nearly all scores are short


class PartNames:
    """Names of the parts of rewards that a run has had. Those past the most are one name."""

    def __init__(self, names: list[str], *, kept: str = "") -> None:
        """Begin with the names so far, to which more are added; ``kept`` always has a place."""
        self._names = names
        self._known = {*names, kept, OTHER_PARTS}
        self.num_others = 0  # parts of scores that lost their name

    def admit(self, names: Iterable[str]) -> None:
        """Add the names of a score that is recorded."""
        new = [name for name in names if name not in self._known]
        self._names += new
        self._known.update(new)

    def bounded(self, score: Score) -> Score:
        """Return a score whose parts have known names; the sum of all others is one part more."""
        new = score.parts.keys() - self._known
        if not new:
            return score
        room = max(0, MAX_PARTS_OF_RUN - len(self._names))
        if len(new) <= room:
            return score
        admitted = {*[name for name in score.parts if name in new][:room]}
        new -= admitted
        if not self.num_others:
            _log.warning(
                "rewards have had %d parts by name, as many as a run may have: others are summed "
                "up as %r, as is %r of group %d",
                MAX_PARTS_OF_RUN,
                OTHER_PARTS,
                min(new),
                score.group_id,
            )
        self.num_others += len(new)
        parts = {name: value for name, value in score.parts.items() if name not in new}
        others = parts.get(OTHER_PARTS, 0.0) + sum(score.parts[name] for name in new)
        parts[OTHER_PARTS] = max(-MAX_REWARD, min(MAX_REWARD, others))
        return msgspec.structs.replace(score, parts=parts)


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
    if score.reward is not None and (why := why_no_reward(score.reward)):
        return why
    if score.turn_rewards and len(score.turn_rewards) != num_turns:
        return (
            f"turn_rewards has {len(score.turn_rewards)} numbers, the trajectory {num_turns} turns"
        )
    for number, reward in enumerate(score.turn_rewards, start=1):
        if why := why_no_reward(reward, f"the reward of turn {number}"):
            return why
    return ""


def _are_plain(parts: Mapping[str, float]) -> bool:
    short = len(parts) <= MAX_PARTS and max(map(len, parts)) <= MAX_PART_NAME
    return short and all(map(_is_plain, parts.values()))


def _is_plain(value: float) -> bool:
    return abs(value) <= MAX_REWARD

"""Pure: turns a reward function's result or exception into a score that can be trusted."""

import math
import os
import sysconfig
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from traceback import walk_tb
from typing import Literal, SupportsFloat

import msgspec

from slipstream.broker.rewards.sdk import Takes, Unavailable
from slipstream.wire.messages.bounds import (
    ByName,
    Count,
    Figure,
    Reward,
    Several,
    Text,
    why_no_reward,
)
from slipstream.wire.messages.broker import ScoringItem
from slipstream.wire.messages.trajectory import (
    MAX_EXCERPT,
    MAX_PART_NAME,
    MAX_PARTS,
    MAX_REASON,
    Score,
    Transcript,
)

# Folders of Python's own modules, of installed packages and of this one.
_NOT_OWN = tuple(
    f"{folder}{os.sep}"
    for folder in (
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        Path(__file__).parents[2],
    )
)
_TURN_REWARDS = "turn_rewards"  # key in a mapping that a function returns
Fault = Literal["timeout", "memory", "cpu", "processes", "died", "broken"]


class InvalidResultsError(ValueError):
    """A function did not return one result per answer; the text is the whole reason."""


class FunctionInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Identity of a reward function; name and version are part of every score."""

    name: Text  # MODULE:NAME or FILE.py:NAME
    version: Text  # declared, else 12 hexadecimal digits of the SHA-256 of its file
    takes: Takes = "answer"


class RewardOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of one answer: a reward, or the reason for its absence."""

    reward: Reward | None = None
    unavailable: Text = ""
    parts: ByName[Figure] = {}
    turn_rewards: Several[Reward] = ()  # one for each turn, or none at all
    left_out: Count = 0  # parts past the first MAX_PARTS


def outcome_of(result: object, num_turns: int = 1) -> RewardOutcome:
    """Return the outcome of one result about an answer of so many turns.

    It is a finite number, or a mapping with a finite ``score``, or with ``turn_rewards``, whose sum
    is the score of one that has none.
    """
    parts: Mapping[object, object] = result if isinstance(result, Mapping) else {}
    turn_rewards: list[float] = []
    if _TURN_REWARDS in parts:
        given = _listed(parts[_TURN_REWARDS], num_turns + 1)
        turn_rewards = [number for value in given or () if (number := finite(value)) is not None]
        if given is None or len(turn_rewards) < len(given):
            shown = _shown(parts[_TURN_REWARDS])
            return unavailable(f"invalid: {_TURN_REWARDS} is {shown}, expected a list of numbers")
        if len(given) != num_turns:
            count = f"more than {num_turns}" if len(given) > num_turns else str(len(given))
            return unavailable(
                f"invalid: {_TURN_REWARDS} has {count} numbers, the answer {num_turns} turns"
            )
        for number, turn_reward in enumerate(turn_rewards, start=1):
            if why := why_no_reward(turn_reward, f"the reward of turn {number}"):
                return unavailable(f"invalid: {why}")
    score = sum(turn_rewards) if turn_rewards and "score" not in parts else parts.get("score")
    reward = finite(score if isinstance(result, Mapping) else result)
    if reward is None:
        return unavailable(f"invalid: returned {_shown(result)}")
    if why := why_no_reward(reward):
        return unavailable(f"invalid: {why}")
    numbers = {
        name: number
        for name, part in parts.items()
        if isinstance(name, str)
        and name != _TURN_REWARDS
        and 0 < len(name) <= MAX_PART_NAME
        and name.isprintable()  # a lone surrogate is not
        and (number := finite(part)) is not None
    }
    kept = dict(islice(numbers.items(), MAX_PARTS))
    return RewardOutcome(
        reward=reward,
        parts=kept,
        turn_rewards=tuple(turn_rewards),
        left_out=len(numbers) - len(kept),
    )


def outcomes_of(results: object, num_turns: Sequence[int]) -> list[RewardOutcome]:
    """Return the outcomes of the results of answers of so many turns each.

    Raises:
        InvalidResultsError: they are no list, or one of another length.
    """
    count = len(num_turns)
    values = _listed(results, count + 1)
    if values is None:
        raise InvalidResultsError(
            f"invalid: returned {_shown(results)}, expected a list of {count} results"
        )
    if len(values) > count:
        raise InvalidResultsError(
            f"invalid: returned more than {count} results for {count} answers"
        )
    if len(values) < count:
        raise InvalidResultsError(f"invalid: returned {len(values)} results for {count} answers")
    return [outcome_of(value, turns) for value, turns in zip(values, num_turns, strict=True)]


def _listed(values: object, most: int) -> list[object] | None:
    """Return the first values of a list, which may never end; None for anything else."""
    if isinstance(values, Mapping | str | bytes) or not hasattr(values, "__iter__"):
        return None
    return list(islice(values, most))


def all_or_none(outcomes: Sequence[RewardOutcome]) -> list[RewardOutcome]:
    """Return the outcomes of a group; if one is missing, none is trusted."""
    for number, outcome in enumerate(outcomes, start=1):
        if outcome.reward is None:
            reason = f"answer {number} of {len(outcomes)}: {outcome.unavailable}"
            return [unavailable(reason)] * len(outcomes)
    return list(outcomes)


def failure(error: BaseException) -> RewardOutcome:
    """Return the outcome of an exception of a reward function."""
    if isinstance(error, InvalidResultsError):
        return unavailable(_text_of(error))
    if isinstance(error, Unavailable):
        return unavailable(_text_of(error) or "the reward function gave no reason")
    place = _place_of(error)
    text = f"raised {type(error).__name__}: {_text_of(error)}"
    return unavailable(f"{text[: MAX_REASON - len(place)]}{place}")


def unavailable(reason: str) -> RewardOutcome:
    """Return that there is no reward, and why; never a reward of 0."""
    readable = reason.encode(errors="backslashreplace").decode()  # lone surrogates do not travel
    return RewardOutcome(unavailable=readable[:MAX_REASON])


def score_of(
    item: ScoringItem, transcript: Transcript, outcome: RewardOutcome, function: FunctionInfo
) -> Score:
    """Return the score of one answer as the broker gets it."""
    excerpt = transcript.response[:MAX_EXCERPT] if outcome.unavailable else ""
    return Score(
        group_id=item.group_id,
        sibling=item.sibling,
        lease_id=item.lease_id,
        reward=outcome.reward,
        unavailable=outcome.unavailable,
        parts=outcome.parts,
        turn_rewards=outcome.turn_rewards,
        function=function.name,
        version=function.version,
        excerpt=excerpt,
    )


def finite(value: object) -> float | None:
    """Return a number as a float; None for anything else, NaN, infinities and overflows.

    Scalars of numpy and torch are numbers, text and bytes are none.
    """
    if isinstance(value, str | bytes | bytearray) or not isinstance(value, SupportsFloat):
        return None
    try:
        number = float(value)
    except Exception:  # noqa: BLE001 a foreign __float__ may raise anything
        return None
    return number if math.isfinite(number) else None


def by_sibling(work: Sequence[tuple[ScoringItem, Transcript]]) -> list[list[int]]:
    """Return the positions of each group's answers, siblings in order, groups as they come."""
    groups: dict[int, list[int]] = {}
    for position, (item, _) in enumerate(work):
        groups.setdefault(item.group_id, []).append(position)
    return [sorted(group, key=lambda at: work[at][0].sibling) for group in groups.values()]


def _shown(value: object) -> str:
    try:
        return repr(value)[:MAX_REASON]
    except Exception:  # noqa: BLE001 a foreign __repr__ may raise anything
        return f"a {type(value).__name__}"


def _place_of(error: BaseException) -> str:
    """Return the line that raised, of the innermost file that no package brought, in brackets."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    for frame in reversed(frames):
        file = frame.f_code.co_filename
        if not file.startswith(_NOT_OWN) and not file.startswith("<"):
            return f" ({Path(file).name}, line {frame.f_lineno})"
    return ""


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 a foreign __str__ may raise anything
        return ""

r"""1.0 if the last number of the answer is the expected one, within a tolerance.

    [reward]
    function = "slipstream.broker.rewards.numeric:score"
    options = { relative = 0.01 }

Looked at is what is marked as the answer (``\boxed{}``, ``<answer>`` tags, after ``####``), or
else all of it. Numbers may have thousands separators, a fraction (``3/4``, ``\frac{3}{4}``), an
exponent, a currency sign or a percent sign.
"""

import re
from fractions import Fraction
from functools import lru_cache
from typing import Literal, NamedTuple, TypeAlias

from slipstream.broker.rewards.final_answer import after_thought, marked_answer
from slipstream.broker.rewards.sdk import Prompt, Transcript, reads, reward, truth_of

Percent: TypeAlias = Literal["either", "ignored", "hundredth"]
_MAX_CHARACTERS = 10_000
_MAX_DIGITS = 200
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
_NUMBER = re.compile(
    rf"(?P<sign>(?<![\w)\]}}])[-+])?\s?"
    rf"(?:\\[dt]?frac\s*{{\s*(?P<above>-?{_DIGITS})\s*}}\s*{{\s*(?P<below>{_DIGITS})\s*}}"
    rf"|(?P<top>{_DIGITS})\s?/\s?(?P<bottom>{_DIGITS})(?![\d.])"
    rf"|(?P<plain>{_DIGITS}(?:\.\d+)?|\.\d+)(?:[eE](?P<exponent>[-+]?\d{{1,3}})(?!\w))?)"
    r"(?P<percent>\s?\\?%)?"
)
_NOT_PART_OF_NUMBERS = re.compile(r"\\[,!;: ]|\\?\$|\N{EURO SIGN}|\N{POUND SIGN}")


class Number(NamedTuple):
    """A number as it was written."""

    value: Fraction
    is_percent: bool = False


def read_number(prompt: Prompt) -> Number:
    """Return the expected number of a row.

    Raises:
        ValueError: ``ground_truth`` holds none.
    """
    truth = truth_of(prompt)
    if isinstance(truth, bool) or not isinstance(truth, int | float | str):
        raise ValueError(  # noqa: TRY004 a value of a data file
            f"ground_truth must be a number or text with one, got {truth!r:.200}"
        )
    if (expected := _expected(str(truth))) is None:
        raise ValueError(f"ground_truth holds no number: {truth!r:.200}")
    return expected


@reads(read_number)
@reward(version="2")
def score(
    transcript: Transcript,
    *,
    relative: float = 0.0,
    absolute: float = 1e-6,
    percent: Percent = "either",
    require_mark: bool = False,
) -> dict[str, float]:
    """Compare the last number of the answer with ``ground_truth``.

    Args:
        transcript: ``prompt.ground_truth`` is a number, or text that holds one.
        relative: allowed error, as a share of the expected number.
        absolute: allowed error; the larger of both counts.
        percent: the value of ``50%`` where only one of both numbers has the sign: 50 or 0.5
            (``either``), 50 (``ignored``) or 0.5 (``hundredth``).
        require_mark: only a number that is marked as the answer counts.

    Raises:
        Unavailable: the row has no ``ground_truth``.
        ValueError: it holds no number.
    """
    expected = read_number(transcript.prompt)
    given = last_number(transcript.response, require_mark=require_mark)
    if given is None:
        return {"score": 0.0, "parsed": 0.0}
    allowed = max(Fraction(absolute), Fraction(relative) * abs(expected.value))
    right = any(
        abs(ours - theirs) <= allowed for ours, theirs in _readings(given, expected, percent)
    )
    return {"score": float(right), "parsed": 1.0}


def last_number(text: str, *, require_mark: bool = False) -> Number | None:
    """Return the last number in the marked answer, or else in all that follows the thought."""
    text = after_thought(text)
    marked = marked_answer(text)
    if marked is None and require_mark:
        return None
    searched = (text if marked is None else marked)[-_MAX_CHARACTERS:]
    searched = _NOT_PART_OF_NUMBERS.sub("", searched.replace("{,}", ","))
    searched = searched.replace("\N{MINUS SIGN}", "-")
    found: Number | None = None
    for match in _NUMBER.finditer(searched):
        found = _value(match) or found
    return found


def _value(match: re.Match[str]) -> Number | None:
    """Return the written value; None if it divides by 0 or is absurdly long."""
    if len(match[0]) > _MAX_DIGITS:
        return None
    parts = {name: text.replace(",", "") for name, text in match.groupdict("").items()}
    if parts["plain"]:
        value = Fraction(parts["plain"]) * Fraction(10) ** int(parts["exponent"] or 0)
    else:
        below = int(parts["below"] or parts["bottom"])
        if not below:
            return None
        value = Fraction(int(parts["above"] or parts["top"]), below)
    return Number(-value if parts["sign"] == "-" else value, bool(parts["percent"]))


@lru_cache(maxsize=4096)
def _expected(text: str) -> Number | None:
    return last_number(text)


def _readings(given: Number, expected: Number, percent: Percent) -> list[tuple[Fraction, Fraction]]:
    """Return the pairs of values; one pair must be close."""
    as_they_are = (given.value, expected.value)
    if given.is_percent == expected.is_percent or percent == "ignored":
        return [as_they_are]
    hundredth = (
        given.value / 100 if given.is_percent else given.value,
        expected.value / 100 if expected.is_percent else expected.value,
    )
    return [hundredth] if percent == "hundredth" else [as_they_are, hundredth]

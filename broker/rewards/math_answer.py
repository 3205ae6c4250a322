r"""1.0 if the answer is mathematically the expected one, by math-verify (LaTeX, sets, equations).

    [reward]
    function = "slipstream.broker.rewards.math_answer:score"

Needs ``pip install slipstream[rewards]``.
"""

import logging
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from functools import lru_cache
from types import FrameType
from typing import Any

from slipstream.broker.rewards.final_answer import after_thought, marked_answer
from slipstream.broker.rewards.sdk import Prompt, Transcript, reads, reward, truth_of

try:
    import math_verify
except ImportError as error:
    raise ImportError(
        "slipstream.broker.rewards.math_answer needs the package math-verify: "
        "pip install 'slipstream[rewards]'"
    ) from error

_POWER = re.compile(r"\^")
_TOO_BIG = re.compile(
    r"\d{4,}\s*[})]*\s*!|!\s*[})]*\s*!"  # factorials
    r"|\^[\s({]*-?\d{3,}[\s})]*[})][\s})]*\^[\s({]*-?\d{3,}"
    r"|\d{400,}"
)
_SYMBOL = r"0-9A-Za-z\u0370-\u03ff"  # not scripts without blanks between words
_LEFT, _RIGHT = rf"[{_SYMBOL})\]}}!]", rf"[+-]?(?:[{_SYMBOL}({{\[\\]|\.\d)"
_BOLD_WORD = re.compile(rf"\*\*([^*\s]+)\*\*(?!{_RIGHT})")
_PYTHON_POWER = re.compile(rf"(?<={_LEFT})\*\*(?={_RIGHT})|(?<={_LEFT} )\*\* (?={_RIGHT})")
_STARS = re.compile(r"\*{2,}")
_COMMAND = re.compile(r"\\[a-zA-Z]+")
_TEXT = re.compile(r"\\(?:text|math|mbox)[a-z]*\s*\{([^{}]*)\}")
_SIGN = re.compile(r"\\[^a-zA-Z]")
_WORD = re.compile(r"[^\W\d_]{3,}")
_NUMBER = r"[-\N{MINUS SIGN}]?\.?\d(?:[\d.,]*\d)?(?:\s*/\s*\d+)?"
_FORMULA = re.compile(r"[+*^_<>\\!({\[]|\d[A-Za-z](?![A-Za-z])|\b[A-Za-z]\s*-")
_NUMBER_IN_WORDS = re.compile(
    r"(?:.*(?:\b(?:is|are|was|were|be|has|have|had|gets?|got|needs?|makes?|made|takes?|took|costs?"
    r"|pays?|paid|spends?|spent|earns?|earned|sells?|sold|buys?|bought|equals?|about|approximately"
    rf"|exactly|only)|[=:]))?[\s$\N{{EURO SIGN}}\N{{POUND SIGN}}]*({_NUMBER})\D*",
    re.DOTALL | re.IGNORECASE,
)
_OTHER_NUMBER = re.compile(  # "half of it is 5", "5 million"
    r"\b(?:not?|never|at|if|except|than|minus|plus|negative|half|halves|twice|double|squared|cubed"
    r"|(?:square|cube) of|roots?|powers?|factorial|mod|pi|times\s+\w+|dozens?"
    r"|(?:hundred|thousand|[mbt]r?illion)(?:th)?s?|(?:four|fif|six|seven|eigh|nin|ten)ths?|thirds?"
    r"|quarters?|zero|two|three|four|five|six|seven|eight|nine|ten)\b|n['\u2019]t\b"
    r"|\d.*(?:\b(?:and|or|below|above|under|over|less|fewer|short)\b|\s[-\N{MINUS SIGN}]\s)",
    re.DOTALL | re.IGNORECASE,
)
_DELIMITED = re.compile(r"(?<!\\)(?:\$.*(?<!\\)\$|\\boxed\s*\{|\\\(|\\\[)", re.DOTALL)
_EXPONENT = re.compile(r"[+-]?\d{1,40}(?:\.\d{1,40})?[eE][+-]?\d{1,2}")
_TRUTH_S = 5.0  # CPU seconds to read a ground truth
_MAX_EXPONENT_DIGITS = 4
_BRACKETS = {"{": 1, "(": 1, "}": -1, ")": -1}


class _TooLong(BaseException):
    """The CPU time for one answer is over."""


def read_truths(prompt: Prompt) -> list[list[Any]]:
    """Return the ground truths of a row, each of them right, as math-verify reads them.

    Raises:
        ValueError: one holds no mathematics, or cannot be read in time.
    """
    truth = truth_of(prompt)
    given = truth if isinstance(truth, list | tuple) else [truth]
    if not all(isinstance(t, str | int | float) and t == t for t in given):  # not NaN
        raise ValueError(f"ground_truth holds what is neither text nor a number: {truth!r:.200}")
    try:
        with _time_limit(_TRUTH_S):
            truths = [_truth_readings(_written_out(value)) for value in given]
    except (_TooLong, RecursionError) as error:
        raise ValueError(f"ground_truth cannot be evaluated: {truth!r:.200}") from error
    if not truths or not all(truths):
        raise ValueError(
            f"ground_truth holds no mathematics, or a number in other words: {truth!r:.200}"
        )
    return [reading for readings in truths for reading in readings]


def _written_out(truth: str | float) -> str:
    """Return text, of a number without an exponent: math-verify reads a product with e."""
    text = repr(truth) if isinstance(truth, float) else str(truth)
    if _EXPONENT.fullmatch(text.strip()) is None:
        return text
    return format(Decimal(text.strip()), "f")


@reads(read_truths)
@reward(version="2")
def score(
    transcript: Transcript, *, limit_s: float = 5.0, max_characters: int = 2_000
) -> dict[str, float]:
    r"""Parse the answer and compare it with ``ground_truth``.

    An answer that cannot be evaluated in ``limit_s``, or is a tower of powers, is wrong. Where an
    evaluation does not let itself be stopped, reward.timeout_s ends it.

    Args:
        transcript: ``prompt.ground_truth`` is a number, LaTeX with or without ``$``, or a list
            with several right ones.
        limit_s: CPU seconds to parse and compare, so that a busy machine makes no right answer
            wrong; kept on the main thread, where the answers are scored.
        max_characters: a longer marked answer is wrong; so much of the end of one without a mark is
            looked at.

    Raises:
        Unavailable: the row has no ``ground_truth``.
        ValueError: it cannot be read.
    """
    truths = read_truths(transcript.prompt)
    text = after_thought(transcript.response)
    marked = marked_answer(text)
    is_long = marked is not None and len(marked) > max_characters
    unmarked = text[-max_characters:].replace(r"\$", " ")
    looked_at = normal_form(unmarked if marked is None else marked)
    parsed: list[list[Any]] = []
    timed_out = right = False
    if looked_at and not is_long and not is_too_big(looked_at):
        try:
            with _time_limit(limit_s):
                parsed = [_parse(looked_at)] if marked is None else _readings(looked_at)
                right = any(
                    math_verify.verify(truth, reading, timeout_seconds=None)
                    for truth in truths
                    for reading in parsed
                )
        except _TooLong:
            timed_out = True
        except RecursionError:
            parsed = []
    return {"score": float(right), "parsed": float(any(parsed)), "timed_out": float(timed_out)}


def _readings(marked: str) -> list[list[Any]]:
    """Return what a marked answer or a truth may mean: mathematics, or the number in some words.

    That is nothing where the words may make another number of it.
    """
    words = _SIGN.sub(" ", _TEXT.sub(r" \1 ", marked))
    is_text = _WORD.search(words) and not _FORMULA.search(words)
    if not is_text or len(re.findall(_NUMBER, words)) != 1:
        return [_marked_value(marked)]
    number = _NUMBER_IN_WORDS.fullmatch(words)
    if number is None or _OTHER_NUMBER.search(words):
        return []
    return [_marked_value(marked), _parse(number[1])]


def _marked_value(marked: str) -> list[Any]:
    """Return marked mathematics as math-verify reads it, with or without delimiters."""
    boxed = marked if _DELIMITED.search(marked) else f"\\boxed{{{marked}}}"
    found = _parse(boxed)
    if all(isinstance(value, str) for value in found):  # no value, as of 72. with its full stop
        found = _parse(marked) or found
    return found


def normal_form(text: str) -> str:
    """Return text with signs that math-verify reads."""
    return with_powers(text).replace("\\varnothing", "\\emptyset")


def with_powers(text: str) -> str:
    """Return text with ``^`` for every ``**`` between operands, and without those for bold."""
    text = _BOLD_WORD.sub(r" \1 ", text)
    return _STARS.sub(" ", _PYTHON_POWER.sub("^", text))


def is_too_big(text: str) -> bool:
    """True if a number in the text would take so long that no timer could stop it.

    The text comes from ``with_powers``. Such are factorials of 4 digits, powers of 5 digits, and
    powers of powers of numbers.
    """
    return bool(_TOO_BIG.search(text)) or any(
        _is_big_exponent(_operand(text, match.end())) for match in _POWER.finditer(text)
    )


def _is_big_exponent(exponent: str) -> bool:
    rest = _COMMAND.sub(" ", exponent)
    if any(character.isalpha() for character in rest):
        return False  # it stays a symbol; powers within are looked at by themselves
    digits = sum(character.isdigit() for character in rest)
    return digits > _MAX_EXPONENT_DIGITS or bool(digits and _POWER.search(rest)) or "!" in rest


def _operand(text: str, start: int) -> str:
    """Return the operand after a power sign: a bracket, or text up to a space."""
    depth = 0
    for at in range(start, len(text)):
        step = _BRACKETS.get(text[at], 0)
        depth += step
        if depth < 0 or (not depth and (text[at] in " $,\n" and text[start:at].strip())):
            return text[start:at]
        if not depth and step:
            power = _POWER.match(text, at + 1)
            return text[start : at + 1] if power is None else text[start:at] + power[0]
    return text[start:]


@lru_cache(maxsize=4096)
def _truth_readings(text: str) -> list[list[Any]]:
    """Return what a truth may mean, without a reading that does not even equal itself."""
    form = normal_form(marked_answer(text) or text)
    found = [] if is_too_big(form) else _readings(form)
    return [
        reading for reading in found if math_verify.verify(reading, reading, timeout_seconds=None)
    ]


def _parse(text: str) -> list[Any]:
    # Its own timers are off: there is one of ours for all, and the pool's.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    parsed: list[Any] = math_verify.parse(text, parsing_timeout=None)
    return parsed


@contextmanager
def _time_limit(limit_s: float) -> Iterator[None]:
    """Raise _TooLong when CPU time is up; on other threads than the main one there is no limit."""
    if threading.current_thread() is not threading.main_thread() or limit_s <= 0:
        yield
        return

    def ring(_signal: int, _frame: FrameType | None) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, limit_s, 0.5)  # again, where something caught it
    try:
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    finally:  # also where it rings in the line above
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)

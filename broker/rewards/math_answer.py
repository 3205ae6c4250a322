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
from functools import lru_cache
from types import FrameType
from typing import Any

from slipstream.broker.rewards.final_answer import after_thought, marked_answer
from slipstream.broker.rewards.sdk import Transcript, reward

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
_MAX_EXPONENT_DIGITS = 4
_BRACKETS = {"{": 1, "(": 1, "}": -1, ")": -1}


class _TooLong(BaseException):
    """The CPU time for one answer is over."""


@reward(version="1")
def score(
    transcript: Transcript, *, limit_s: float = 5.0, max_characters: int = 2_000
) -> dict[str, float]:
    r"""Parse the answer and compare it with ``ground_truth``.

    An answer that cannot be evaluated in ``limit_s``, or is a tower of powers, is wrong. Where an
    evaluation does not let itself be stopped, reward.timeout_s ends it.

    Args:
        transcript: ``prompt.ground_truth`` is a number, LaTeX with or without ``$``, or a list of
            such, of which any is right.
        limit_s: CPU seconds to parse and compare, so that a busy machine makes no right answer
            wrong; kept on the main thread, where the answers are scored.
        max_characters: so much of the end of the answer is looked at.

    Raises:
        ValueError: ``ground_truth`` cannot be read.
    """
    answer = evaluable(after_thought(transcript.response)[-max_characters:])
    truth = transcript.prompt.ground_truth
    given = truth if isinstance(truth, list | tuple) else [truth]
    truths = [_parsed_truth(str(one)) for one in given]  # each as math-verify reads it
    if not truths or not all(truths):
        raise ValueError(f"ground_truth holds no mathematics: {truth!r:.200}")
    if answer is None:
        return {"score": 0.0, "parsed": 0.0, "timed_out": 0.0}
    parsed: list[Any] = []
    try:
        with _time_limit(limit_s):
            parsed = _parse(answer)
            right = any(math_verify.verify(one, parsed, timeout_seconds=None) for one in truths)
    except _TooLong:
        return {"score": 0.0, "parsed": float(bool(parsed)), "timed_out": 1.0}
    except RecursionError:
        return {"score": 0.0, "parsed": 0.0, "timed_out": 0.0}
    return {"score": float(right), "parsed": float(bool(parsed)), "timed_out": 0.0}


def evaluable(answer: str) -> str | None:
    """Return the part of an answer to parse: all of it, or else its marked final answer.

    None is nothing: there is a number that is too big.
    """
    text = with_powers(answer)
    if not is_too_big(text):
        return text
    final = marked_answer(text)
    return None if final is None or is_too_big(final) else _marked(final)


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
def _parsed_truth(text: str) -> list[Any]:
    """Return a truth as math-verify reads it; nothing if it does not even equal itself."""
    parsed = _parse(_marked(with_powers(text)))
    return parsed if math_verify.verify(parsed, parsed, timeout_seconds=None) else []


def _marked(text: str) -> str:
    is_marked = "$" in text or "\\boxed{" in text or "\\(" in text or "\\[" in text
    return text if is_marked else f"\\boxed{{{text}}}"


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

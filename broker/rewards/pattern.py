r"""1.0 if the answer has a form: a regular expression, or thought and answer in their tags.

[reward]
function = "slipstream.broker.rewards.pattern:Pattern"
options = { pattern = 'Final answer: (?P<number>\d+)\s*$' }
"""

import re
from typing import Literal

from slipstream.broker.rewards.final_answer import ANSWER, ANSWER_ENDS
from slipstream.broker.rewards.sdk import Transcript, reward
from slipstream.wire.thoughts import THINK, THINK_ENDS


@reward(version="1")
class Pattern:
    r"""1.0 if a regular expression matches the answer, else 0.0.

    Each named group that took part in the match is a metric of 1.0, else of 0.0. Python's
    expressions can take exponential time, such as ``(a+)+$``: write none that nest repetitions;
    an answer that makes one run on is ended by reward.timeout_s and stays without a reward.
    """

    def __init__(
        self,
        *,
        pattern: str,
        mode: Literal["search", "fullmatch"] = "search",
        ignore_case: bool = False,
        dot_all: bool = True,
    ) -> None:
        """Compile.

        Args:
            pattern: Expression of the module re.
            mode: anywhere in the answer, or all of it.
            ignore_case: upper and lower case are the same.
            dot_all: a dot matches line breaks too.

        Raises:
            ValueError: the pattern is no regular expression, or the mode is unknown.
        """
        if mode not in {"search", "fullmatch"}:
            raise ValueError(f"mode must be search or fullmatch, got {mode!r}")
        flags = (re.IGNORECASE if ignore_case else 0) | (re.DOTALL if dot_all else 0)
        try:
            expression = re.compile(pattern, flags)
        except re.error as error:
            raise ValueError(f"pattern {pattern!r} is no regular expression: {error}") from error
        self._match = expression.search if mode == "search" else expression.fullmatch
        self._groups = tuple(expression.groupindex)

    def score(self, transcript: Transcript) -> dict[str, float]:
        """Match one answer."""
        match = self._match(transcript.response)
        groups = {
            name: float(match is not None and match[name] is not None) for name in self._groups
        }
        return groups | {"score": float(match is not None)}


@reward(version="1")
def think_answer(transcript: Transcript, *, opened: bool = False) -> float:
    """1.0 for ``<think>..</think><answer>..</answer>``, each tag once and nothing around them.

    White space is allowed between and around. Neither thought nor answer may be empty.

    Args:
        transcript: the answer.
        opened: the prompt ends with ``<think>``, so that the answer continues after it.
    """
    text = transcript.response
    if opened and THINK not in text:
        text = THINK + text
    if any(text.count(tag) != 1 for tag in (THINK, THINK_ENDS, ANSWER, ANSWER_ENDS)):
        return 0.0
    form = rf"\s*{THINK}(.*){THINK_ENDS}\s*{ANSWER}(.*){ANSWER_ENDS}\s*"
    match = re.fullmatch(form, text, re.DOTALL)
    return float(match is not None and all(part.strip() for part in match.groups()))

r"""Pure: finds the final answer in a model's text: ``\boxed{}``, tags, ``####``."""

import re

_BOXED = "\\boxed{"
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_HASHES = "####"
_THOUGHT_ENDS = "</think>"


def marked_answer(text: str) -> str | None:
    r"""Return the last marked answer; None if none is marked.

    ``\boxed{...}`` goes before ``<answer>...</answer>``, and that before the text after ``####`` on
    its line.

    Example: ``marked_answer("so \\boxed{\\frac{1}{2}}")`` is ``"\\frac{1}{2}"``.
    """
    start = text.rfind(_BOXED)
    depth = 0
    for at in range(start + len(_BOXED) - 1, len(text)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if not depth:
            return text[start + len(_BOXED) : at]
    tagged: list[str] = _TAGGED.findall(text)
    if tagged:
        return tagged[-1].strip()
    _, hashes, rest = text.rpartition(_HASHES)
    return rest.strip().partition("\n")[0] if hashes else None


def after_thought(text: str) -> str:
    """Return the text after the last ``</think>``; all of it where there is none."""
    return text.rpartition(_THOUGHT_ENDS)[2]

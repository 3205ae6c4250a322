"""Pure: tells thoughts in a text of the policy from the rest of it, by one rule for all."""

from typing import NamedTuple

THINK, THINK_ENDS = "<think>", "</think>"


class TextPart(NamedTuple):
    """A part of a text."""

    text: str  # includes the marks of a thought
    thought: str | None = None  # without the marks; None outside of a thought


def split_thoughts(
    text: str,
    begin: str = THINK,
    end: str = THINK_ENDS,
    *,
    is_inside: bool = False,
    is_shared: bool = False,
) -> list[TextPart]:
    """Return the parts of a text in order: together they are the text.

    A thought that is never closed reaches to the end, one that is closed more than once to the last
    mark before the next thought. Before a mark that closes and none that opens all is thought.

    Args:
        text: Text of the policy.
        begin: Opening mark of the format.
        end: Closing mark of the format.
        is_inside: True if the text begins in a thought, whether it opens it again or not.
        is_shared: True if ``end`` closes other parts too.
    """
    parts: list[TextPart] = []
    at = 0
    opens = text.find(begin)
    is_closed_first = not is_shared and text.rfind(end, 0, opens if opens >= 0 else len(text)) >= 0
    unopened = (is_inside or is_closed_first) and opens != 0
    while at < len(text):
        opens = at if unopened else text.find(begin, at)
        if opens != at:
            until = opens if opens >= 0 else len(text)
            parts.append(TextPart(text[at:until]))
            at = until
            continue
        start = at if unopened else at + len(begin)
        unopened = False
        stop = text.find(end, start)
        if stop >= 0 and not is_shared:
            again = text.find(begin, stop)
            stop = text.rfind(end, stop, again if again >= 0 else len(text))
        until = stop + len(end) if stop >= 0 else len(text)
        parts.append(TextPart(text[at:until], text[start : stop if stop >= 0 else until]))
        at = until
    return parts

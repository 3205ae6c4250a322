"""A recorded trajectory in parts: what the policy chose at a time, and the context between. Pure.

Shapes: T tokens of all branches, prompt first.
"""

import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from os.path import commonprefix

import msgspec

_MOST_TOOLS = 16  # named tools of one turn
_MOST_COMPARED = 64  # branches before one with which it may have tokens in common
_CALLS = re.compile(
    r'(?:<tool_call>|\[TOOL_CALLS\]\s*\[?|<\|python_tag\|>)\s*\{\s*"name"\s*:\s*"([^"\n]{1,100})"'
    r"|<tool_call>([\w.-]{1,100})(?=\s*<arg_key>|\s*</tool_call>)"
    r"|<function=([^>\s]{1,100})>"
    r"|<\|tool_call_begin\|>(?:functions\.)?([\w.-]{1,100})"
    "|<\uff5ctool\u2581sep\uff5c>([\\w.-]{1,100})"
)


class TrajectoryPart(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a trajectory that belong together."""

    first_token: int  # index into token_ids
    end: int  # index after the last one
    turn: int = 0  # its number, from 1; 0 is context
    branch: int = 0  # number of the branch that begins here, from 2; 0: none does
    num_shared: int = 0  # number of first tokens shared with an earlier branch
    shared_with: int = 0  # the number of that branch


class Excerpt(msgspec.Struct, frozen=True):
    """A text, or its beginning and its end."""

    head: str
    num_cut: int = 0  # characters between them that were left out
    tail: str = ""


def parts_of(
    token_ids: Sequence[int], turns: Sequence[tuple[int, int]], branches: Sequence[int]
) -> list[TrajectoryPart]:
    """Return what followed the first prompt, in order.

    Args:
        token_ids: [T].
        turns: (first token, tokens) of each, in order.
        branches: first tokens of the second and further branches.
    """
    bounds = [0, *branches, len(token_ids)]
    numbers = {first: number for number, first in enumerate(branches, start=2)}
    parts = []
    end = turns[0][0] if turns else len(token_ids)
    for number, (first, count) in enumerate(turns, start=1):
        if end < first:
            branch = numbers.get(end, 0)
            shared, with_ = _shared(token_ids, bounds, branch, first) if branch else (0, 0)
            parts.append(
                TrajectoryPart(
                    first_token=end, end=first, branch=branch, num_shared=shared, shared_with=with_
                )
            )
        end = first + count
        parts.append(TrajectoryPart(first_token=first, end=end, turn=number))
    return parts


def _shared(
    token_ids: Sequence[int], bounds: Sequence[int], branch: int, end: int
) -> tuple[int, int]:
    """Return how many tokens a branch has in common with an earlier one, and with which."""
    own = tuple(token_ids[bounds[branch - 1] : end])
    earlier = list(enumerate(pairwise(bounds[:branch]), start=1))[-_MOST_COMPARED:]
    return max(
        (len(commonprefix([own, tuple(token_ids[start:stop])])), number)  # noqa: RUF071 no paths
        for number, (start, stop) in earlier
    )


def versions_of(part: TrajectoryPart, runs: Sequence[tuple[int, str]]) -> list[str]:
    """Return the versions that chose tokens of a turn, of runs (first token, label) in order."""
    ends = [*(first for first, _ in runs[1:]), part.end]
    overlapping = (
        label
        for (first, label), end in zip(runs, ends, strict=True)
        if first < part.end and end > part.first_token
    )
    return list(dict.fromkeys(overlapping))


def called_tools(reply: str) -> dict[str, int]:
    """Return how often a reply calls which tools, as the usual chat templates write a call.

    For people only: what a run takes for a call is up to ``environment.tool_call_parser``.
    """
    found = Counter(next(filter(None, match.groups())) for match in _CALLS.finditer(reply))
    return dict(found.most_common(_MOST_TOOLS))


def excerpt(text: str, most: int) -> Excerpt:
    """Return a text of at most this many characters: three quarters of them its beginning."""
    if len(text) <= most:
        return Excerpt(text)
    tail = most // 4
    head = most - tail
    return Excerpt(text[:head], len(text) - most, text[len(text) - tail :])

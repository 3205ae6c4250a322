"""Custody of tokens: what was trained beside an engine's own record of what it sampled."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

Tokens = tuple[int, ...]


class Chosen(NamedTuple):
    """A token as an engine chose it."""

    token_id: int
    step: int  # of the policy
    logprob: float = 0.0  # as float32 has it; 0.0 where it is not compared


Reply = tuple[Chosen, ...]
Sampled = Counter[tuple[Tokens, Reply]]
"""Requests that engines finished: prompts and replies."""


def replies_after(
    chosen: Sequence[Chosen], turns: Iterable[tuple[int, int]], branches: Sequence[int]
) -> Iterator[tuple[Tokens, Reply]]:
    """Yield what each turn was chosen after, and its tokens.

    Args:
        chosen: all tokens of a trajectory, context among them.
        turns: first token and number of tokens of each turn.
        branches: first tokens of the second and further branches.
    """
    for first, count in turns:
        branch = max(start for start in (0, *branches) if start <= first)
        yield ids_of(chosen[branch:first]), tuple(chosen[first : first + count])


def ids_of(chosen: Iterable[Chosen]) -> Tokens:
    """Return the ids alone."""
    return tuple(token.token_id for token in chosen)


def take(sampled: Sampled, prompt: Tokens, reply: Reply) -> bool:
    """True if a turn is one reply, or several of which each goes on after the one before.

    These are taken from the record: nothing is trained twice.
    """
    for n in range(len(reply), 0, -1):
        left = reply[n:]
        if sampled[prompt, reply[:n]] <= 0:
            continue
        sampled[prompt, reply[:n]] -= 1
        if not left or take(sampled, prompt + ids_of(reply[:n]), left):
            return True
        sampled[prompt, reply[:n]] += 1
    return False

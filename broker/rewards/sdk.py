"""Interface for custom rewards.

    from slipstream.broker.rewards.sdk import Transcript, Unavailable, reward

    @reward(version="2")
    async def polite(transcript: Transcript, *, word: str = "please") -> float:
        return float(word in transcript.response)

A reward is a function or a class, sync or async. Without the decorator a function has the
signature of verl, ``(data_source, solution_str, ground_truth, extra_info, **options)``.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias, TypeVar

from slipstream.wire.messages.trajectory import Json, Prompt, Transcript

__all__ = ["Prompt", "RewardResult", "Takes", "Transcript", "Unavailable", "reward"]

Takes = Literal["answer", "batch", "group"]
RewardResult: TypeAlias = float | int | bool | Mapping[str, float | Sequence[float]]
Reader: TypeAlias = Callable[[Prompt], object]
DECLARED = "__slipstream_reward__"  # attribute of a decorated function or class
READER = "reader"  # the same
F = TypeVar("F", bound=Callable[..., object])


class Unavailable(Exception):  # noqa: N818 it is a result, not a fault
    """Raised by a reward that cannot score now, with the reason: it is tried again elsewhere."""


def reward(*, takes: Takes = "answer", version: str = "") -> Callable[[F], F]:
    """Declare a function, or a class with a method ``score``, to be a reward.

    Args:
        takes: ``answer``: called with one Transcript, returns one result. ``batch``: called with
            a list of Transcripts, of any groups, returns a list of as many results. ``group``: the
            same with all siblings of one group, in order.
        version: part of every score; by default a class's own attribute ``version``, else a hash
            of the file that it is in.

    A result is a number, or a mapping whose ``score`` is the reward and whose other numbers become
    metrics. Its ``turn_rewards``, if there are any, are one number for each of
    ``Transcript.turns``; without a ``score`` the reward is their sum. Options of
    ``[reward.options]`` are keyword arguments of the function, or of the class.
    """

    def declare(target: F) -> F:
        setattr(target, DECLARED, (takes, version))
        return target

    return declare


def reads(reader: Reader) -> Callable[[F], F]:
    """Declare how a function that ships reads a row, for checks before a run.

    A class that ships has a class method ``reader(**options)`` that returns what does.

    Args:
        reader: raises an exception, with the reason, for a row whose answers cannot be scored.
    """

    def declare(target: F) -> F:
        setattr(target, READER, reader)
        return target

    return declare


def truth_of(prompt: Prompt) -> Json:
    """Return the ground truth of a row.

    Raises:
        Unavailable: it has none.
    """
    if prompt.ground_truth is None:
        raise Unavailable("the row has no ground_truth (data.ground_truth_column)")
    return prompt.ground_truth

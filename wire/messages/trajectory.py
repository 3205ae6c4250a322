"""Trajectories as generators send them, the broker keeps them and the learner reads them.

A trajectory travels in three parts. The *header* is all that planning and bookkeeping need;
the *payload* holds the arrays and is opaque to the broker; the *response* is text. With the prompt
that the broker issued it makes the *transcript* that a reward function reads.

A *turn* is what the policy chose at one time: the response, or one of several replies with context
between them. Where that context was rewritten, the trajectory has several *branches*, laid end to
end: each begins with all that the policy saw there, and no chosen token counts in two of them.

Shapes: T tokens of all branches, prompt first.
"""

from bisect import bisect_right
from itertools import pairwise
from math import inf
from typing import Any, Literal, TypeAlias

import msgspec

from slipstream.wire.messages.arrays import COUNTS, PackedArray
from slipstream.wire.messages.bounds import Body, ByName, Count, Figure, Name, Number, Several, Text
from slipstream.wire.messages.images import Image, ImageSpan
from slipstream.wire.messages.versions import PolicyVersion

Json: TypeAlias = Any  # null, bool, number, text, list or object
FinishReason = Literal["stop", "length"]
ItemKind = Literal["train", "eval"]
TrajectoryKey = tuple[int, int]  # group_id, sibling
MAX_TOKENS = 2**31 - 1  # tokens of a trajectory


class VersionRun(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tokens from ``first_token`` up to the next run were chosen by ``version``."""

    first_token: Count  # index into token_ids
    version: PolicyVersion


class Turn(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tokens that the policy chose at one time."""

    first_token: Count  # index into token_ids
    num_tokens: Count

    @property
    def end(self) -> int:
        """Index after its last token."""
        return self.first_token + self.num_tokens


class TrajectoryHeader(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Metadata of a trajectory for the broker and the learner's planner."""

    group_id: Count
    sibling: Count  # 0 .. group_size - 1
    lease_id: Number  # the lease under which it was generated
    num_prompt_tokens: Count
    num_tokens: Count  # T
    version_runs: Several[VersionRun]  # runs reported by the engine, by first token
    temperature: Figure  # temperature of the sampled distribution; 0.0 is greedy
    finish_reason: FinishReason
    min_response_tokens: Count = 0  # before that many, no token of end_token_ids could be chosen
    end_token_ids: Several[Count] = ()
    turns: Several[Turn] = ()  # in order; none: one turn, the response
    branches: Several[Count] = ()  # first tokens of the second and further branches

    def __post_init__(self) -> None:
        if not 0 < self.num_prompt_tokens < self.num_tokens <= MAX_TOKENS:
            raise ValueError(
                f"a trajectory needs prompt and response tokens, at most {MAX_TOKENS} of both, "
                f"got {self.num_prompt_tokens} prompt tokens of {self.num_tokens}"
            )
        if not 0 <= self.temperature < inf:
            raise ValueError(f"temperature must be a number >= 0, got {self.temperature}")
        if self.turns or self.branches:
            self._check_turns()
        starts = [run.first_token for run in self.version_runs]
        if starts == [self.num_prompt_tokens]:
            return  # one version chose all of them
        is_first = starts[:1] == [self.num_prompt_tokens]
        if not is_first or starts != sorted(set(starts)) or not self._are_chosen(starts):
            raise ValueError(
                f"version_runs start at {starts}; the response is "
                f"{', '.join(f'[{turn.first_token}, {turn.end})' for turn in self.chosen)}"
            )

    def _are_chosen(self, rising: list[int]) -> bool:
        """Return whether the policy chose the tokens at these places, in rising order."""
        if not self.turns:
            return rising[-1] < self.num_tokens
        firsts = [turn.first_token for turn in self.turns]
        return all(at < self.turns[bisect_right(firsts, at) - 1].end for at in rising)

    def _check_turns(self) -> None:
        """See that context precedes each turn, and that every branch ends with one."""
        turns = self.turns
        ends = [turn.end for turn in turns]
        are_turns = (
            [turn.first_token for turn in turns[:1]] == [self.num_prompt_tokens]
            and ends[-1:] == [self.num_tokens]
            and all(turn.num_tokens > 0 for turn in turns)
            and all(turn.end < other.first_token for turn, other in pairwise(turns))
        )
        if not are_turns:
            raise ValueError(
                f"turns are {[(turn.first_token, turn.end) for turn in turns]}: expected context "
                f"before each, of {self.num_prompt_tokens} tokens before the first, and the last "
                f"to end at {self.num_tokens}"
            )
        branches = list(self.branches)
        if branches != sorted(set(branches)) or not set(branches) <= set(ends[:-1]):
            raise ValueError(f"branches start at {branches}, turns before the last end at {ends}")

    @property
    def chosen(self) -> tuple[Turn, ...]:
        """The turns; the response of a trajectory of one turn."""
        return self.turns or (
            Turn(self.num_prompt_tokens, self.num_tokens - self.num_prompt_tokens),
        )

    @property
    def bounds(self) -> tuple[int, ...]:
        """Where branches begin, and T."""
        return (0, *self.branches, self.num_tokens)

    @property
    def oldest_version(self) -> PolicyVersion:
        """The version that decides this trajectory's staleness."""
        return min(run.version for run in self.version_runs)

    @property
    def num_response_tokens(self) -> int:
        """Number of tokens that the policy chose."""
        if not self.turns:
            return self.num_tokens - self.num_prompt_tokens
        return sum(turn.num_tokens for turn in self.turns)

    def tokens_by_version(self) -> list[tuple[PolicyVersion, int]]:
        """Return (version, number of tokens chosen by it) per run."""
        starts = [run.first_token for run in self.version_runs]
        spans = zip(self.version_runs, starts, [*starts[1:], self.num_tokens], strict=True)
        if not self.turns:
            return [(run.version, end - start) for run, start, end in spans]
        return [
            (
                run.version,
                sum(
                    max(0, min(turn.end, end) - max(turn.first_token, start)) for turn in self.turns
                ),
            )
            for run, start, end in spans
        ]


class Decisions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Decisions of an engine about more than tokens, for the learner to repeat; any may be absent.

    Shapes: R tokens that the policy chose, K tokens kept for all of them, L layers with experts, of
    which E work on a token. Numbers are of the narrowest of uint8, uint16 and int32 that holds
    them.
    """

    kept_counts: PackedArray | None = None  # [R], how many tokens each was chosen from
    kept_ids: PackedArray | None = None  # [K], those tokens, of one response token after the other
    experts: PackedArray | None = None  # [T - number of branches, L, E]
    """The engine computes nothing of the last token of a branch."""

    def __post_init__(self) -> None:
        if (self.kept_counts is None) != (self.kept_ids is None):
            raise ValueError("kept_counts and kept_ids are there together or not at all")
        for name, axes in {"kept_counts": 1, "kept_ids": 1, "experts": 3}.items():
            array: PackedArray | None = getattr(self, name)
            if array is not None and (len(array.shape) != axes or array.dtype not in COUNTS):
                raise ValueError(
                    f"{name} is {array.dtype} {array.shape}, expected {' or '.join(COUNTS)} with "
                    f"{axes} axes"
                )

    @property
    def num_bytes(self) -> int:
        """Size of the arrays."""
        arrays = (self.kept_counts, self.kept_ids, self.experts)
        return sum(array.data.nbytes for array in arrays if array is not None)


class TrajectoryPayload(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The arrays of one trajectory."""

    token_ids: PackedArray  # [T] int32, prompt then response
    loss_mask: PackedArray  # [T] bool, True where the policy chose the token
    behavior_logprobs: PackedArray  # [T] float32, 0.0 where loss_mask is False
    decisions: Decisions | None = None  # None: all tokens and experts are the learner's to choose
    images: Several[ImageSpan] = ()  # in order; no token of theirs was chosen by the policy

    def __post_init__(self) -> None:
        want = self.token_ids.shape
        dtypes = {"token_ids": "int32", "loss_mask": "bool", "behavior_logprobs": "float32"}
        for name, dtype in dtypes.items():
            array: PackedArray = getattr(self, name)
            if array.shape != want or len(want) != 1 or array.dtype != dtype:
                raise ValueError(
                    f"{name} is {array.dtype} {array.shape}, expected {dtype} {want} with 1 axis"
                )
        if self.decisions is not None:
            self._check(self.decisions)
        self._check_images()

    def _check(self, decisions: Decisions) -> None:
        """See that decisions are about these tokens."""
        counts, experts = decisions.kept_counts, decisions.experts
        chosen = self.loss_mask.data.tobytes().count(1)
        if counts is not None and counts.shape != (chosen,):
            raise ValueError(f"kept_counts is {counts.shape}, the policy chose {chosen} tokens")
        most = self.token_ids.shape[0] - 1
        if experts is not None and experts.shape[0] > most:
            raise ValueError(f"experts is {experts.shape}, the engine computed {most} at most")

    def _check_images(self) -> None:
        """See that images have tokens, one after the other, outside the loss mask."""
        end, mask = 0, self.loss_mask.data
        for span in self.images:
            if span.first_token < end or not span.num_tokens or span.end > len(mask):
                raise ValueError(
                    f"an image has tokens [{span.first_token}, {span.end}) after {end} of "
                    f"{len(mask)}"
                )
            end = span.end
            if any(mask[span.first_token : end]):
                raise ValueError(f"the policy chose tokens of [{span.first_token}, {end})")


class ContentPart(msgspec.Struct, frozen=True, omit_defaults=True):
    """A part of a turn: text or an image."""

    text: Body = ""
    image: Image | None = None

    def __post_init__(self) -> None:
        if bool(self.text) is (self.image is not None):
            raise ValueError("a part of a turn is text or an image")


class ChatMessage(msgspec.Struct, frozen=True):
    """One turn of a conversation."""

    role: Name
    content: Body | Several[ContentPart]  # parts only where one is an image

    @property
    def images(self) -> tuple[Image, ...]:
        """Images of the turn, in order."""
        if isinstance(self.content, str):
            return ()
        return tuple(part.image for part in self.content if part.image is not None)

    @property
    def text(self) -> str:
        """The turn as text for people."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.image.text if part.image else part.text for part in self.content)


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """One problem: the input of the policy, and the data for its reward function."""

    prompt: Body | Several[ChatMessage]  # text as it is, or turns for the chat template
    ground_truth: Json = None  # None: the row has none
    data_source: Text = "default"
    ability: Text = ""
    extra_info: dict[str, Json] = {}
    row: Number = -1  # in its file or data set, from 0; -1 is unknown

    @property
    def text(self) -> str:
        """The text for a person to read."""
        if isinstance(self.prompt, str):
            return self.prompt
        return "\n".join(f"{turn.role}: {turn.text}" for turn in self.prompt)

    @property
    def images(self) -> tuple[Image, ...]:
        """Images in order; one that is shown twice comes twice."""
        if isinstance(self.prompt, str):
            return ()
        return tuple(image for turn in self.prompt for image in turn.images)


class Transcript(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Input of a reward function."""

    prompt: Prompt
    response: Body
    num_response_tokens: Count
    finish_reason: FinishReason
    replies: Several[Body] = ()  # texts of several turns, in the order of the header

    @property
    def turns(self) -> tuple[str, ...]:
        """The texts of the policy by turn; with one turn, the response."""
        return self.replies or (self.response,)


def transcript_of(
    header: TrajectoryHeader, prompt: Prompt, response: str, replies: tuple[str, ...] = ()
) -> Transcript:
    """Return a trajectory's transcript for a reward function; replies are the texts of its turns.

    Raises:
        ValueError: there are not as many replies as turns.
    """
    if len(replies) != len(header.turns):
        raise ValueError(f"{len(replies)} replies came with {len(header.turns)} turns")
    return Transcript(
        prompt=prompt,
        response=response,
        num_response_tokens=header.num_response_tokens,
        finish_reason=header.finish_reason,
        replies=replies,
    )


MAX_PARTS = 64  # metrics of one reward
MAX_PART_NAME = 100  # characters
MAX_REASON = 500  # characters of why there is no reward
MAX_EXCERPT = 500  # characters of the answer that has none
NO_SCORING_LEASE = -1  # lease id of a score without a lease


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of scoring one trajectory: a reward, or the reason for its absence."""

    group_id: Count
    sibling: Count
    lease_id: Number
    reward: float | None = None
    unavailable: Text = ""  # why there is no reward; never a reward of 0
    parts: ByName[Figure] = {}  # named parts of the reward, for metrics
    turn_rewards: Several[float] = ()
    """Of each of the header's ``chosen`` turns, in their order; none: they are not known."""
    function: Text = ""  # MODULE:NAME or FILE.py:NAME of the reward function
    version: Text = ""  # version of the reward function: declared, else a hash of its file
    excerpt: Text = ""  # start of an answer that got no reward, for inspection

    def __post_init__(self) -> None:
        if (self.reward is None) == (not self.unavailable):
            raise ValueError(
                f"a score is a reward or unavailable, got reward={self.reward} "
                f"unavailable={self.unavailable!r}"
            )
        if self.turn_rewards and self.reward is None:
            raise ValueError(f"no reward, and {len(self.turn_rewards)} of turns")

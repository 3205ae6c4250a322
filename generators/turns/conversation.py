"""Tokens that a policy was given and chose in one trajectory.

Calls of the engine are recorded as they were made: prompt tokens and the response to them. A call
whose prompt begins with all tokens of a branch continues that branch; any other call begins a new
branch. So no token is rendered or tokenized twice, whatever happened to the text between two
calls, and each chosen token is in the loss once.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from slipstream.generators.engine import Completion
from slipstream.wire.messages.trajectory import FinishReason, Turn, VersionRun
from slipstream.wire.messages.versions import PolicyVersion

Experts: TypeAlias = NDArray[np.int32]  # [tokens, layers, experts of a token]


class TrajectoryLimitError(ValueError):
    """A trajectory would have more turns or tokens than it may."""


class _Call(NamedTuple):
    """A reply within a branch."""

    number: int  # place among the trajectory's calls, in the order of time
    num_before: int  # tokens of the branch before its prompt
    first_token: int  # first token of the reply
    completion: Completion
    num_parts: int  # arrays of experts that it added to the branch


class _BranchTurn(NamedTuple):
    """A turn of a branch, and the calls that it consists of."""

    turn: Turn
    calls: tuple[_Call, ...]


class _Branch:
    """Tokens that attend to each other, [n], and the calls that produced them."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.calls: list[_Call] = []
        self.experts: list[Experts] = []  # rows of its first n - 1 tokens, as first recorded

    def continues(self, prompt_ids: Sequence[int]) -> bool:
        """True if a prompt begins with all of this branch."""
        count = len(self.token_ids)
        return count <= len(prompt_ids) and list(prompt_ids[:count]) == self.token_ids

    def add(
        self,
        number: int,
        prompt_ids: Sequence[int],
        completion: Completion,
        experts_before: Sequence[Experts],
    ) -> None:
        before = len(self.token_ids)
        new = list[Experts]()
        if completion.experts is not None:
            num_known = sum(map(len, self.experts))
            new = _without_first(num_known, [*experts_before, completion.experts])
        self.calls.append(_Call(number, before, len(prompt_ids), completion, len(new)))
        self.token_ids += [*prompt_ids[before:], *completion.token_ids]
        self.experts += new

    def withdraw_last(self) -> None:
        call = self.calls.pop()
        del self.token_ids[call.num_before :]
        del self.experts[len(self.experts) - call.num_parts :]

    @property
    def turns(self) -> list[_BranchTurn]:
        turns: list[_BranchTurn] = []
        for call in self.calls:
            first, count = call.first_token, len(call.completion.token_ids)
            calls: tuple[_Call, ...] = (call,)
            if turns and turns[-1].turn.end == first:  # continues the response before
                before = turns.pop()
                first, count = before.turn.first_token, before.turn.num_tokens + count
                calls = (*before.calls, call)
            turns.append(_BranchTurn(Turn(first, count), calls))
        return turns

    @property
    def logprobs(self) -> list[float]:
        logprobs = [0.0] * len(self.token_ids)
        for call in self.calls:
            end = call.first_token + len(call.completion.token_ids)
            logprobs[call.first_token : end] = call.completion.logprobs
        return logprobs

    @property
    def version_runs(self) -> list[VersionRun]:
        runs: list[VersionRun] = []
        for call in self.calls:
            for start, version in call.completion.version_starts:
                if not runs or runs[-1].version != version:
                    runs.append(VersionRun(call.first_token + start, version))
        return runs

    @property
    def kept(self) -> list[list[int]]:
        return [ids for call in self.calls for ids in call.completion.kept or ()]


def _without_first(count: int, parts: Sequence[Experts]) -> list[Experts]:
    """Return the rows of arrays after the first ``count``; nothing is copied."""
    rest: list[Experts] = []
    for part in parts:
        if count < len(part):
            rest.append(part[count:])
        count = max(0, count - len(part))
    return rest


class Conversation:
    """The turns of one trajectory."""

    def __init__(self, *, max_turns: int, max_tokens: int) -> None:
        """Begin without a token.

        Args:
            max_turns: Most replies in all branches.
            max_tokens: Most tokens of all branches together, context included: the tokens that the
                learner will compute.
        """
        self.max_turns = max_turns
        self.max_tokens = max_tokens
        self._branches: list[_Branch] = []
        self._claimed: list[_Branch | None] = []  # branches of pending replies
        self._num_pending = 0  # replies that are being generated
        self._pending_tokens = 0  # limit of their tokens and of new tokens in their prompts
        self._num_calls = 0

    @property
    def num_turns(self) -> int:
        """Replies so far."""
        return sum(len(branch.calls) for branch in self._branches)

    @property
    def is_full(self) -> bool:
        """True if it has its most turns, pending replies included."""
        return self.num_turns + self._num_pending >= self.max_turns

    @property
    def num_tokens(self) -> int:
        """Tokens so far, of all branches."""
        return sum(len(branch.token_ids) for branch in self._branches)

    @contextmanager
    def room(self, prompt_ids: Sequence[int], most: int) -> Iterator[int]:
        """Yield how many tokens a reply to this prompt may have, ``most`` at most.

        They are reserved until the end of the context: several calls may be under way.

        Raises:
            TrajectoryLimitError: there is no room for a token.
        """
        branch, new, room = self._room(prompt_ids)
        granted = min(room, most)
        self._claimed.append(branch)
        self._num_pending += 1
        self._pending_tokens += new + granted
        try:
            yield granted
        finally:
            self._claimed.remove(branch)
            self._num_pending -= 1
            self._pending_tokens -= new + granted

    def _room(self, prompt_ids: Sequence[int]) -> tuple["_Branch | None", int, int]:
        """Return the branch of a prompt, its number of new tokens, and the room for a reply."""
        branch = self._continued(prompt_ids)
        if branch is not None and branch in self._claimed:
            branch = None  # another reply continues it: this one begins a branch
        if self.is_full:
            raise TrajectoryLimitError(
                f"a trajectory has {self.max_turns} turns at most (environment.max_turns)"
            )
        new = len(prompt_ids) - (len(branch.token_ids) if branch is not None else 0)
        room = self.max_tokens - self.num_tokens - self._pending_tokens - new
        if room < 1:
            raise TrajectoryLimitError(
                f"a prompt of {len(prompt_ids)} tokens, {new} of them new, after "
                f"{self.num_tokens} tokens: a trajectory has {self.max_tokens} at most "
                "(environment.max_tokens)"
            )
        return branch, new, room

    def known_experts(self, prompt_ids: Sequence[int]) -> tuple[Experts, ...]:
        """Return the experts that a reply to this prompt need not record again.

        They are of the first tokens of the branch that it would continue, one row per token. Call
        this before ``room``.
        """
        branch = self._continued(prompt_ids)
        return () if branch is None or branch in self._claimed else tuple(branch.experts)

    def add(
        self,
        prompt_ids: Sequence[int],
        completion: Completion,
        experts_before: Sequence[Experts] = (),
    ) -> None:
        """Record a response to a prompt of these tokens.

        Args:
            prompt_ids: Tokens of the prompt.
            completion: Response; its experts follow those before.
            experts_before: Experts known when it was requested. Its branch may have lost some of
                them meanwhile: a reply was withdrawn, or the branch belongs to another reply.
        """
        branch = self._continued(prompt_ids)
        if branch is None or branch in self._claimed:  # reserved for a pending reply
            branch = _Branch()
            self._branches.append(branch)
        branch.add(self._num_calls, prompt_ids, completion, experts_before)
        self._num_calls += 1

    def withdraw(self, completion: Completion) -> bool:
        """Take back an undelivered response; return False if another one continues it already."""
        before = self.num_turns
        for branch in self._branches:
            if branch.calls[-1].completion is completion:
                branch.withdraw_last()
        self._branches = [branch for branch in self._branches if branch.calls]
        return self.num_turns < before

    def _continued(self, prompt_ids: Sequence[int]) -> _Branch | None:
        """Return the branch that a prompt continues: the longest, then the newest."""
        known = [branch for branch in self._branches if branch.continues(prompt_ids)]
        return max(reversed(known), key=lambda branch: len(branch.token_ids), default=None)

    # ---- the whole trajectory --------------------------------------------------

    @property
    def branches(self) -> tuple[int, ...]:
        """First tokens of the second and further branches, laid end to end."""
        starts = np.cumsum([len(branch.token_ids) for branch in self._branches[:-1]])
        return tuple(int(start) for start in starts)

    @property
    def turns(self) -> tuple[Turn, ...]:
        """Places of the chosen tokens."""
        return tuple(
            Turn(start + part.turn.first_token, part.turn.num_tokens)
            for start, branch in self._placed()
            for part in branch.turns
        )

    def by_turn(self, values: Sequence[float]) -> tuple[float, ...]:
        """Return the sum over each turn, in the order of ``turns``, of values of replies.

        Args:
            values: Values of all replies that were not withdrawn, in the order of time.
        """
        calls = [call for branch in self._branches for call in branch.calls]
        numbers = sorted(call.number for call in calls)
        by_number = dict(zip(numbers, values, strict=True))
        return tuple(
            sum(by_number[call.number] for call in part.calls)
            for branch in self._branches
            for part in branch.turns
        )

    @property
    def version_runs(self) -> tuple[VersionRun, ...]:
        """Versions that chose them; a branch begins a run."""
        return tuple(
            VersionRun(start + run.first_token, run.version)
            for start, branch in self._placed()
            for run in branch.version_runs
        )

    @property
    def newest_version(self) -> PolicyVersion:
        """The newest version that chose a token."""
        return max(run.version for branch in self._branches for run in branch.version_runs)

    @property
    def finish_reason(self) -> FinishReason:
        """Why the newest branch's last reply ended."""
        return self._branches[-1].calls[-1].completion.finish_reason

    @property
    def token_ids(self) -> list[int]:
        """[T]."""
        return [token for branch in self._branches for token in branch.token_ids]

    @property
    def logprobs(self) -> list[float]:
        """[T], 0.0 for context."""
        return [logprob for branch in self._branches for logprob in branch.logprobs]

    @property
    def kept(self) -> list[list[int]] | None:
        """Tokens that each chosen token was sampled from; None if they are not known."""
        kept = [ids for branch in self._branches for ids in branch.kept]
        return kept if len(kept) == sum(turn.num_tokens for turn in self.turns) else None

    @property
    def experts(self) -> Experts | None:
        """[T - number of branches, layers, experts]; None if they are not known."""
        rows = [part for branch in self._branches for part in branch.experts]
        if not rows or sum(map(len, rows)) != self.num_tokens - len(self._branches):
            return None
        return np.concatenate(rows)

    def _placed(self) -> list[tuple[int, _Branch]]:
        return list(zip((0, *self.branches), self._branches, strict=False))

"""What a policy was given and chose in one trajectory, to the token.

Calls of the engine are recorded as they were made: prompt tokens and the response to them. A call
whose prompt begins with everything that a branch has continues that branch; any other one begins
a branch of its own. So no token is rendered or tokenized twice, whatever happened to the text
between two calls, and each chosen token is in the loss once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from slipstream.generators.engine import Completion
from slipstream.wire.messages.trajectory import FinishReason, Turn, VersionRun
from slipstream.wire.messages.versions import PolicyVersion


class TrajectoryLimitError(ValueError):
    """A trajectory would have more turns or tokens than it may."""


@dataclass(slots=True)
class _Branch:
    """Tokens that attend to each other, [n], and which of them the policy chose."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # 0.0 for context
    turns: list[Turn] = field(default_factory=list)
    versions: list[VersionRun] = field(default_factory=list)
    kept: list[list[int]] = field(default_factory=list)  # of each chosen token
    experts: list[NDArray[np.int32]] = field(default_factory=list)  # n - 1 rows in all

    @property
    def num_expert_rows(self) -> int:
        return sum(map(len, self.experts))

    def continues(self, prompt_ids: Sequence[int]) -> bool:
        """True if a prompt begins with all of this branch."""
        count = len(self.token_ids)
        return count <= len(prompt_ids) and list(prompt_ids[:count]) == self.token_ids

    def add(self, prompt_ids: Sequence[int], completion: Completion) -> None:
        context = prompt_ids[len(self.token_ids) :]
        self.token_ids += context
        self.logprobs += [0.0] * len(context)
        first, count = len(self.token_ids), len(completion.token_ids)
        if self.turns and self.turns[-1].end == first:  # a response that goes on
            before = self.turns.pop()
            self.turns.append(Turn(before.first_token, before.num_tokens + count))
        else:
            self.turns.append(Turn(first, count))
        self.token_ids += completion.token_ids
        self.logprobs += completion.logprobs
        for start, version in completion.version_starts:
            if not self.versions or self.versions[-1].version != version:
                self.versions.append(VersionRun(first + start, version))
        self.kept += completion.kept or []
        if completion.experts is not None:
            self.experts.append(completion.experts[self.num_expert_rows :])


class Conversation:
    """The turns of one trajectory."""

    def __init__(self, *, max_turns: int, max_tokens: int) -> None:
        """Begin without a token.

        Args:
            max_turns: replies in all branches.
            max_tokens: of all branches together, context included: what the learner will compute.
        """
        self._max_turns = max_turns
        self._max_tokens = max_tokens
        self._branches: list[_Branch] = []
        self.finish_reason: FinishReason = "stop"  # of the newest reply

    @property
    def num_turns(self) -> int:
        """Replies so far."""
        return sum(len(branch.turns) for branch in self._branches)

    @property
    def num_tokens(self) -> int:
        """Tokens so far, of all branches."""
        return sum(len(branch.token_ids) for branch in self._branches)

    def room(self, prompt_ids: Sequence[int]) -> int:
        """Return how many tokens a reply to this prompt may have.

        Raises:
            TrajectoryLimitError: none.
        """
        branch = self._continued(prompt_ids)
        if self.num_turns >= self._max_turns:
            raise TrajectoryLimitError(
                f"a trajectory has {self._max_turns} turns at most (environment.max_turns)"
            )
        new = len(prompt_ids) - (len(branch.token_ids) if branch is not None else 0)
        room = self._max_tokens - self.num_tokens - new
        if room < 1:
            raise TrajectoryLimitError(
                f"a prompt of {len(prompt_ids)} tokens, {new} of them new, after "
                f"{self.num_tokens} tokens: a trajectory has {self._max_tokens} at most "
                "(environment.max_tokens)"
            )
        return room

    def add(self, prompt_ids: Sequence[int], completion: Completion) -> None:
        """Record a response to a prompt of these tokens."""
        branch = self._continued(prompt_ids)
        if branch is None:
            branch = _Branch()
            self._branches.append(branch)
        branch.add(prompt_ids, completion)
        self.finish_reason = completion.finish_reason

    def _continued(self, prompt_ids: Sequence[int]) -> _Branch | None:
        """Return the branch that a prompt continues; of several the longest, then the newest."""
        found = [branch for branch in self._branches if branch.continues(prompt_ids)]
        return max(reversed(found), key=lambda one: len(one.token_ids), default=None)

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
            Turn(start + turn.first_token, turn.num_tokens)
            for start, branch in self._placed()
            for turn in branch.turns
        )

    @property
    def version_runs(self) -> tuple[VersionRun, ...]:
        """Which versions chose them; a branch begins a run."""
        return tuple(
            VersionRun(start + run.first_token, run.version)
            for start, branch in self._placed()
            for run in branch.versions
        )

    @property
    def newest_version(self) -> PolicyVersion:
        """The newest version that chose a token."""
        return max(run.version for branch in self._branches for run in branch.versions)

    @property
    def token_ids(self) -> list[int]:
        """[T]."""
        return [one for branch in self._branches for one in branch.token_ids]

    @property
    def logprobs(self) -> list[float]:
        """[T], 0.0 for context."""
        return [one for branch in self._branches for one in branch.logprobs]

    @property
    def kept(self) -> list[list[int]] | None:
        """Of each chosen token, those that it was sampled from; None where they are not known."""
        kept = [one for branch in self._branches for one in branch.kept]
        return kept if len(kept) == sum(turn.num_tokens for turn in self.turns) else None

    @property
    def experts(self) -> NDArray[np.int32] | None:
        """[T - number of branches, layers, experts]; None where they are not known."""
        rows = [one for branch in self._branches for one in branch.experts]
        if not rows or sum(map(len, rows)) != self.num_tokens - len(self._branches):
            return None
        return np.concatenate(rows)

    def _placed(self) -> list[tuple[int, _Branch]]:
        return list(zip((0, *self.branches), self._branches, strict=False))

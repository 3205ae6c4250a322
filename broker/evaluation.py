"""Evaluation rounds: held-out problems, answered by the policy of one step or a newer one."""

from dataclasses import dataclass, field

from wire.status import EvalPoint
from wire.versions import PolicyVersion


@dataclass(slots=True)
class EvalRound:
    """One pass over the held-out problems."""

    step: int  # only generators that adopted this step or a newer one may answer
    num_problems: int
    next_problem: int = 0  # position of the next one to issue
    rewards: list[float] = field(default_factory=list)
    versions: set[PolicyVersion] = field(default_factory=set)
    num_dropped: int = 0

    @property
    def unissued(self) -> int:
        """Return how many problems nobody has leased yet."""
        return self.num_problems - self.next_problem

    @property
    def complete(self) -> bool:
        """Tell whether every problem was answered or dropped."""
        return len(self.rewards) + self.num_dropped == self.num_problems

    def point(self) -> EvalPoint:
        """Return the outcome; dropped problems are not counted as wrong answers."""
        answers = len(self.rewards)
        return EvalPoint(
            step=self.step,
            exact_match=sum(self.rewards) / answers if answers else 0.0,
            num_answers=answers,
            num_dropped=self.num_dropped,
            versions=tuple(sorted(self.versions)),
        )


@dataclass(frozen=True, slots=True)
class EvalPlan:
    """When to evaluate."""

    num_problems: int
    total_steps: int
    every_steps: int = 0
    before_train: bool = True
    at_end: bool = True

    def is_due(self, step: int) -> bool:
        """Tell whether a round belongs to the policy after ``step`` learner steps."""
        if self.num_problems == 0:
            return False
        if step == 0:
            return self.before_train
        if step == self.total_steps:
            return self.at_end
        return self.every_steps > 0 and step % self.every_steps == 0

"""Evaluation rounds: held-out problems, answered by the policy of one step or a newer one."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import comb

import msgspec

from slipstream.wire.messages.status import EvalFigures, EvalPoint
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.settings.eval_metric import metric_of, pass_counts
from slipstream.wire.settings.sections import EvalSection


class EvalAnswer(msgspec.Struct, frozen=True):
    """One answer as far as figures go."""

    reward: float
    num_response_tokens: int
    truncated: bool


class EvalRound(msgspec.Struct):
    """One pass over the held-out problems."""

    step: int  # only generators that adopted this step or a newer one may answer
    num_problems: int
    next_problem: int = 0  # position of the next one to issue
    answers: dict[int, list[EvalAnswer]] = msgspec.field(default_factory=dict)  # answers by problem
    versions: set[PolicyVersion] = msgspec.field(default_factory=set)
    dropped: set[int] = msgspec.field(default_factory=set)

    @property
    def unissued(self) -> int:
        """Number of problems not leased yet."""
        return self.num_problems - self.next_problem

    @property
    def complete(self) -> bool:
        """True once every problem is answered or dropped."""
        return len(self.answers) + len(self.dropped) == self.num_problems


@dataclass(frozen=True, slots=True)
class EvalPlan:
    """Schedule and problems of evaluations, and the consequences of their outcome."""

    sources: Sequence[str] = ()  # data source of each problem
    section: EvalSection = field(default_factory=EvalSection)

    @property
    def num_problems(self) -> int:
        """Number of problems in a round."""
        return len(self.sources)

    def is_due(self, step: int, *, last_step: int) -> bool:
        """True if a round belongs to the policy after ``step`` learner steps."""
        if not self.sources:
            return False
        if step == last_step and step > 0:
            return self.section.at_end
        return self.section.is_due(step)

    def point(self, eval_round: EvalRound) -> EvalPoint:
        """Return the outcome of a round; dropped problems are not counted as wrong answers."""
        by_source: dict[str, list[int]] = {}
        for problem, source in enumerate(self.sources):
            by_source.setdefault(source, []).append(problem)
        return EvalPoint(
            step=eval_round.step,
            overall=self._figures(eval_round, range(self.num_problems)),
            by_source={
                source: self._figures(eval_round, problems)
                for source, problems in sorted(by_source.items())
            },
            versions=tuple(sorted(eval_round.versions)),
        )

    def _figures(self, eval_round: EvalRound, problems: Iterable[int]) -> EvalFigures:
        chosen = list(problems)
        answered = [eval_round.answers[p] for p in chosen if p in eval_round.answers]
        answers = [answer for group in answered for answer in group]
        count, samples = len(answers), self.section.samples
        metrics: dict[str, float] = {}
        if count:
            metrics[f"mean@{samples}"] = sum(a.reward for a in answers) / count
            for k in pass_counts(samples):
                chances = [pass_at_k(group, k, self.section.correct_reward) for group in answered]
                metrics[f"pass@{k}"] = sum(chances) / len(chances)
            metrics["response_tokens"] = sum(a.num_response_tokens for a in answers) / count
            metrics["truncated"] = sum(a.truncated for a in answers) / count
        return EvalFigures(
            num_problems=len(chosen),
            num_answers=count,
            num_dropped=sum(p in eval_round.dropped for p in chosen),
            metrics=metrics,
        )

    def verdict(self, points: Sequence[EvalPoint]) -> str:
        """Return why the run should end after these rounds, or an empty text."""
        section = self.section
        scores = [(p.step, metric_of(p, section.metric)) for p in points]
        known = [(step, score) for step, score in scores if score is not None]
        if not known:
            return ""
        step, newest = known[-1]
        if section.target is not None and newest >= section.target:
            return f"eval.target: {section.metric} is {newest:.3f} at step {step}"
        if section.patience and rounds_without_gain(known, section.min_gain) >= section.patience:
            best_step, best = max(known, key=lambda pair: (pair[1], -pair[0]))
            return (
                f"eval.patience: {section.patience} evaluations brought no gain over "
                f"{section.metric} = {best:.3f} at step {best_step}"
            )
        return ""


def pass_at_k(answers: Sequence[EvalAnswer], k: int, correct_reward: float) -> float:
    """Return the chance that k of the n answers, drawn without replacement, hold a right one.

    1 - C(n - c, k) / C(n, k) with c right answers (Chen et al. 2021, arXiv 2107.03374, eq. 1).
    """
    right = sum(answer.reward >= correct_reward for answer in answers)
    return 1.0 - comb(len(answers) - right, k) / comb(len(answers), k)


def rounds_without_gain(scores: Sequence[tuple[int, float]], min_gain: float) -> int:
    """Return the number of newest rounds that gained no more than ``min_gain`` over the best."""
    best: float | None = None
    barren = 0
    for _, score in scores:
        if best is None or score > best + min_gain:
            best, barren = score, 0
        else:
            barren += 1
    return barren

"""Pure: the records of a simulated run."""

from collections import Counter
from dataclasses import dataclass
from statistics import fmean

from slipstream.deploy.predict.simulate.lengths import percentile


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One learner step."""

    step: int  # learner step after this one's commit
    asked_s: float  # when the learner began to wait for its batch
    began_s: float
    committed_s: float
    num_tokens: int  # trained, prompts included
    num_generated: int  # trained tokens that the policy chose
    staleness: dict[int, int]  # in steps -> tokens
    in_flight: int  # groups at the commit
    bound: int  # in force
    engines_busy: float  # share of the engines' time since the last step spent decoding

    @property
    def waited_s(self) -> float:
        """Seconds without a batch."""
        return self.began_s - self.asked_s

    @property
    def trained_s(self) -> float:
        """Seconds of training and of the publish's stall."""
        return self.committed_s - self.began_s

    @property
    def mean_staleness(self) -> float:
        """Mean by token, in learner steps."""
        tokens = sum(self.staleness.values())
        return sum(s * n for s, n in self.staleness.items()) / tokens if tokens else 0.0


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """A run that has ended."""

    steps: tuple[StepRecord, ...]
    issued: int
    trained: int
    dropped: dict[str, int]
    in_flight: int
    unaccounted: int
    num_refused: int  # answers that came too late
    restarted_trajectories: int
    num_generated: float  # tokens, by all engines
    num_retractions: int  # sequences that a full cache retracted
    engine_busy_s: float  # sum over all engines
    engine_seconds: float  # total lifetime of engines
    group_s: tuple[float, ...]  # from a group's lease to its last answer, sorted; a sample

    @property
    def seconds(self) -> float:
        """Virtual time of the last commit."""
        return self.steps[-1].committed_s

    def mean_step_s(self, skip: int = 0) -> float:
        """Return seconds per step, from the commit of step ``skip`` on."""
        first = self.steps[skip - 1].committed_s if skip else 0.0
        return (self.seconds - first) / (len(self.steps) - skip)

    def mean_staleness(self, skip: int = 0) -> float:
        """Return the mean over steps of the tokens' mean staleness."""
        return fmean(record.mean_staleness for record in self.steps[skip:])

    def p95_staleness(self, skip: int = 0) -> int:
        """Return the staleness that 95% of the tokens do not exceed."""
        tokens = Counter[int]()
        for record in self.steps[skip:]:
            tokens.update(record.staleness)
        left = 0.95 * tokens.total()
        for staleness in sorted(tokens):
            left -= tokens[staleness]
            if left <= 0:
                return staleness
        return max(tokens, default=0)

    def max_staleness(self) -> int:
        """Return the largest staleness of any trained token."""
        return max(max(record.staleness, default=0) for record in self.steps)

    def waited_share(self, skip: int = 0) -> float:
        """Return the share of the learner's time spent waiting for batches."""
        steps = self.steps[skip:]
        waited = sum(record.waited_s for record in steps)
        return waited / (waited + sum(record.trained_s for record in steps))

    def group_seconds(self, share: float) -> float:
        """Return a percentile of the time to a group's last answer."""
        return percentile(self.group_s, share) if self.group_s else 0.0

"""Mean staleness in closed form beside the simulator's, for the published set-ups.

Their engines are the slower side. Concurrency, batch and rho are theirs; samples of a group are
not published (4 here) and lengths follow from their tail. Theirs was measured on groups' first
tokens of real runs, ours on all tokens of simulated ones.
"""

import random
from statistics import fmean, pstdev
from typing import NamedTuple

from benchmarks.scale.staleness_law import oldest_staleness, token_staleness
from slipstream.deploy.predict.laws.engine_law import EngineLaw
from slipstream.deploy.predict.laws.learner_law import LearnerLaw, PublishLaw
from slipstream.deploy.predict.simulate.lengths import LogNormal
from slipstream.deploy.predict.simulate.scenario import Scenario
from slipstream.deploy.predict.simulate.world import simulate

_GROUP = 4
_TOKEN_S = 0.01
_LENGTHS = LogNormal(mean=1000.0, spread=0.4, longest=100_000, alike=0.0)
_SKIPPED, _STEPS = 8, 38


class SetUp(NamedTuple):
    """A published run."""

    concurrency: int  # samples
    batch: int  # samples
    rho: float
    tail: float
    measured: float  # mean staleness


PUBLISHED = (
    SetUp(120, 240, 0.63, 1.42, 1.26),
    SetUp(240, 120, 0.92, 1.43, 3.59),
    SetUp(240, 120, 0.86, 1.42, 3.40),
    SetUp(120, 120, 0.67, 1.42, 1.92),
)


class Compared(NamedTuple):
    """Mean staleness of a set-up, in learner steps."""

    set_up: SetUp
    oldest: float  # closed form, groups' first tokens
    tokens: float  # closed form, all tokens
    simulated: float  # all tokens

    @property
    def error(self) -> float:
        """Simulated over the closed form, less one."""
        return self.simulated / self.tokens - 1.0


def compared(set_up: SetUp) -> Compared:
    """Simulate a set-up."""
    rng = random.Random(0)  # noqa: S311 no secret
    groups = [_LENGTHS.draw(rng, _GROUP) for _ in range(20_000)]
    lengths = [length for group in groups for length in group]
    mean = fmean(lengths)
    tail, spread = fmean(map(max, groups)) / mean, pstdev(lengths) / mean
    # Lanes are given to whole groups: some of a group's are free while they wait for the others.
    lanes = set_up.concurrency + (_GROUP - 1) // 2
    period_s = set_up.batch * mean * _TOKEN_S / set_up.concurrency
    outcome = simulate(
        Scenario(
            steps=_STEPS,
            groups_per_step=set_up.batch // _GROUP,
            group_size=_GROUP,
            max_staleness_steps=12,
            engines=1,
            max_sequences=lanes,
            engine=EngineLaw(base_s=_TOKEN_S),
            learner=LearnerLaw(step_s=set_up.rho * period_s),
            publish=PublishLaw(recomputes=False),
            lengths=_LENGTHS,
        )
    )
    given = set_up.concurrency, set_up.batch, set_up.rho, tail
    return Compared(
        set_up,
        oldest_staleness(*given),
        token_staleness(*given, spread),
        outcome.mean_staleness(_SKIPPED),
    )


def markdown() -> str:
    """Return the table of docs/scale.md."""
    lines = [
        "| C | B | rho | Published, measured | Closed form, first tokens | Closed form, all tokens "
        "| Simulated, all tokens | Error |",
        "|" + "---:|" * 8,
    ]
    for one in map(compared, PUBLISHED):
        given = one.set_up
        lines.append(
            f"| {given.concurrency} | {given.batch} | {given.rho} | {given.measured} "
            f"| {one.oldest:.2f} | {one.tokens:.2f} | {one.simulated:.2f} "
            f"| {100 * one.error:+.0f}% |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown())

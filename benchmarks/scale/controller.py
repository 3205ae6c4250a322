"""The staleness controller after a step of its surroundings, simulated: bars of what it holds."""

from dataclasses import replace
from itertools import pairwise

from benchmarks.bars import Bars
from slipstream.broker.ledger.throttle import StalenessTarget
from slipstream.deploy.predict.laws.engine_law import EngineLaw
from slipstream.deploy.predict.laws.learner_law import LearnerLaw, PublishLaw
from slipstream.deploy.predict.simulate.lengths import LogNormal
from slipstream.deploy.predict.simulate.scenario import Change, Scenario
from slipstream.deploy.predict.simulate.world import simulate

TARGET, BOUND, STEPS, LATE = 2, 6, 250, 60
_RUN = Scenario(
    steps=STEPS,
    groups_per_step=16,
    group_size=4,
    max_staleness_steps=BOUND,
    engines=8,
    max_sequences=32,
    engine=EngineLaw(base_s=0.01, context_s=1e-7),
    learner=LearnerLaw(step_s=2.5),
    publish=PublishLaw(stall_s=0.1, transfer_s=0.2, pause_s=0.1),
    lengths=LogNormal(mean=300, spread=0.8, longest=2048),
    seed=3,
)
_CHANGES = {
    "a learner four times as slow": Change(at_s=200.0, learner_factor=4.0),
    "five of eight engines lost": Change(at_s=200.0, lost_engines=5),
    "answers three times as long": Change(at_s=200.0, length_factor=3.0),
}


def controller_bars(bars: Bars) -> None:
    """Print each response, and bars of the worst."""
    shares, swings = [], []
    for name, change in _CHANGES.items():
        run = replace(_RUN, changes=(change,))
        free = simulate(run)
        held = simulate(replace(run, target=StalenessTarget(p95_lag=TARGET)))
        late = held.steps[-LATE:]
        beyond = sum(n for one in late for lag, n in one.staleness.items() if lag > TARGET)
        shares.append(100 * beyond / sum(n for one in late for n in one.staleness.values()))
        levels = [one.bound for one in held.steps[100:]]
        swings.append(sum(before != after for before, after in pairwise(levels)))
        print(
            f"{name}: p95 {held.p95_staleness(STEPS - LATE)} (without a target "
            f"{free.p95_staleness(STEPS - LATE)}), {shares[-1]:.1f}% of the tokens beyond "
            f"{TARGET}, {swings[-1]} changes of the bound in {STEPS - 100} steps, "
            f"{held.mean_step_s(STEPS - LATE) / free.mean_step_s(STEPS - LATE):.2f} of the time"
        )
    bars.at_most("scale_target_tokens_beyond", max(shares), "% of the tokens", needs=5)
    bars.at_most("scale_target_changes", max(swings), f"in {STEPS - 100} steps", needs=20)

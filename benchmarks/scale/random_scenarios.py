"""Pure: small scenarios at random, in which whatever may go wrong does."""

import random
from dataclasses import replace

from slipstream.broker.ledger.throttle import StalenessTarget
from slipstream.deploy.predict.laws.engine_law import EngineLaw
from slipstream.deploy.predict.laws.learner_law import LearnerLaw, PublishLaw
from slipstream.deploy.predict.simulate.lengths import Fixed, Lengths, LogNormal
from slipstream.deploy.predict.simulate.scenario import Change, Faults, Scenario


def random_scenario(seed: int) -> Scenario:
    """Return a run of a few steps; the same for the same seed."""
    rng = random.Random(seed)  # noqa: S311 no secret
    group_size, groups, bound = rng.randint(1, 4), rng.randint(1, 5), rng.randint(0, 5)
    law = EngineLaw(
        base_s=rng.choice([0.0, 0.01]),
        weights_s=rng.uniform(0.001, 0.05),
        sequence_s=rng.uniform(0.0, 0.01),
        context_s=rng.choice([0.0, 1e-5]),
        prefill_s=rng.choice([0.0, 1e-3]),
    )
    longest = rng.choice([4, 64, 400])
    lengths: Lengths = Fixed(longest)
    if rng.random() < 0.8:
        lengths = LogNormal(mean=longest / 2, spread=rng.uniform(0.1, 2.0), longest=longest)
    allowed = groups * (bound + 1)
    fails = rng.random() < 0.3
    others = random.Random(f"{seed} cache")  # noqa: S311 drawn apart: a seed stays what it was
    if not fails and others.random() < 0.3:  # what is retracted and fails may never end
        law = replace(law, max_cached_tokens=longest * others.uniform(0.5, 6.0))
    # Engines that fail many times in the time of an answer never answer, and a run never ends.
    least_mtbf_s = 0.5 * longest * law.step_s(8, 8.0 * longest)
    target = None
    if bound and rng.random() < 0.4:
        target = rng.choice(
            [StalenessTarget(p95_lag=rng.randrange(bound)), StalenessTarget(mismatch_kl=0.01)]
        )
    return Scenario(
        steps=rng.randint(1, 12),
        groups_per_step=groups,
        group_size=group_size,
        max_staleness_steps=bound,
        engines=rng.randint(1, 5),
        max_sequences=rng.randint(group_size, 20),
        engine=law,
        learner=LearnerLaw(step_s=rng.uniform(0.0, 5.0), token_s=rng.choice([0.0, 1e-3])),
        publish=PublishLaw(
            stall_s=rng.choice([0.0, 0.2]),
            transfer_s=rng.uniform(0.0, 4.0),
            pause_s=rng.choice([0.0, 0.5]),
            recomputes=rng.random() < 0.5,
            drains=rng.random() < 0.2,
        ),
        lengths=lengths,
        prompt_tokens=rng.randint(1, 50),
        max_in_flight=rng.choice([None, rng.randint(groups, allowed)]),
        staleness_mode=rng.choice(["wait", "wait", "drop"]),
        prefetch=rng.random() < 0.8,
        publish_every=rng.randint(1, bound + 1) if rng.random() < 0.2 and not target else 1,
        score_s=rng.choice([0.0, 1.0]),
        useless_share=rng.choice([0.0, 0.0, 0.5]) if group_size > 1 else 0.0,
        target=target,
        kl_per_lag=0.01,
        faults=Faults(
            engine_mtbf_s=max(rng.uniform(1.0, 60.0), least_mtbf_s) if fails else 0.0,
            restart_s=rng.uniform(0.1, 5.0),
            lease_s=rng.uniform(0.1, 5.0),
            slow_share=rng.choice([0.0, 0.5]),
            max_attempts=rng.choice([3, 50]),
        ),
        changes=(Change(at_s=rng.uniform(0, 10), learner_factor=3.0, length_factor=0.5),)
        if rng.random() < 0.3
        else (),
        seed=seed,
    )

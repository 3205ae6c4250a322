"""What a simulated run would have recorded of itself: its truth is known."""

import random
from collections import Counter
from functools import cache

from slipstream.broker.ledger.survivorship import bucket_of, upper_tokens
from slipstream.deploy.predict.advise.record import Record
from slipstream.deploy.predict.laws.engine_law import EngineLaw
from slipstream.deploy.predict.laws.learner_law import LearnerLaw, PublishLaw
from slipstream.deploy.predict.simulate.lengths import LogNormal
from slipstream.deploy.predict.simulate.scenario import Scenario
from slipstream.deploy.predict.simulate.world import simulate
from slipstream.wire.messages.status import Pace

LAW = EngineLaw(base_s=0.02, sequence_s=0.001)


def a_scenario(**changes: object) -> Scenario:
    """Return a run that waits for its two engines."""
    return Scenario(
        **{
            "steps": 60,
            "groups_per_step": 16,
            "group_size": 8,
            "max_staleness_steps": 2,
            "engines": 2,
            "max_sequences": 64,
            "engine": LAW,
            "learner": LearnerLaw(step_s=1.0, token_s=1e-4),
            "publish": PublishLaw(stall_s=0.2, transfer_s=0.5, pause_s=0.1),
            "lengths": LogNormal(mean=200, spread=0.8, longest=1024),
            "prompt_tokens": 40,
            "seed": 3,
            **changes,
        }  # type: ignore[arg-type]
    )


def pace_of(law: EngineLaw, sequences: tuple[float, ...], tokens: float = 1_000.0) -> Pace:
    """Return the sums of answers that had so many beside them."""
    seconds = [tokens * law.step_s(round(n), 0.0) for n in sequences]
    return Pace(
        tokens=tokens * len(sequences),
        sequences=tokens * sum(sequences),
        squares=tokens * sum(n * n for n in sequences),
        seconds=sum(seconds),
        sequence_seconds=sum(s * n for s, n in zip(seconds, sequences, strict=True)),
    )


@cache
def recorded(scenario: Scenario, sequences: tuple[float, ...] = (40, 50, 60)) -> Record:
    """Return what a simulated run would have recorded; engines computed so many at a time."""
    outcome = simulate(scenario)
    steps = outcome.steps[scenario.max_staleness_steps + 2 :]
    rng = random.Random(1)
    drawn = [length for _ in range(500) for length in scenario.lengths.draw(rng, 8)]
    lengths = Counter(str(upper_tokens(bucket_of(length))) for length in drawn)
    answers = len(steps) * scenario.groups_per_step * scenario.group_size
    return Record(
        run="recorded",
        count=scenario.engines,
        groups_per_step=scenario.groups_per_step,
        group_size=scenario.group_size,
        max_staleness_steps=scenario.max_staleness_steps,
        max_in_flight=scenario.max_in_flight,
        staleness_mode=scenario.staleness_mode,
        siblings_together=scenario.siblings_together,
        prefetch=scenario.prefetch,
        engines=scenario.engines,
        max_sequences=scenario.max_sequences,
        wait_s=[one.waited_s for one in steps],
        active_s=[one.trained_s for one in steps],
        tokens=[float(one.num_tokens) for one in steps],
        prompt_tokens=float(scenario.prompt_tokens),
        mean_tokens=sum(one.num_generated for one in steps) / answers,
        lengths=dict(lengths),
        pace=pace_of(scenario.engine, sequences),
        stall_s=scenario.publish.stall_s,
        transfer_s=scenario.publish.transfer_s,
        pause_s=scenario.publish.pause_s,
        score_s=scenario.score_s,
        useless_share=scenario.useless_share,
    )

"""Schedules of a hypothesis state machine: always the same ones, or new ones each time.

`make test-slow` draws new ones for SCHEDULES_S seconds of CPU per machine and prints the seed of
each round before it begins; with that number in SCHEDULES_SEED the same schedules come first. One
that broke a promise is kept as it was shrunk, and played in every run of the tests.
"""

import os
import secrets
import time
from collections.abc import Iterable, Mapping
from typing import Any

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

CPU_S = 240.0
PER_ROUND = 25  # schedules


def profile(max_examples: int, steps: int, *, is_fixed: bool) -> settings:
    """Settings for so many schedules of at most so many steps."""
    return settings(
        max_examples=max_examples,
        stateful_step_count=steps,
        derandomize=is_fixed,
        deadline=None,
        database=None,
        print_blob=False,
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )


def play(machine: RuleBasedStateMachine, schedule: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
    """Apply these rules in turn, and check the invariants after each."""
    try:
        for rule, arguments in schedule:
            getattr(machine, rule)(**arguments)
            for invariant in machine.invariants:
                invariant.function(machine)
    finally:
        machine.teardown()


def draw_schedules(machine: type[RuleBasedStateMachine], *, steps: int) -> None:
    """Run new schedules until the time is up; one that breaks a promise names its round's seed."""
    known = os.environ.get("SCHEDULES_SEED")  # noqa: TID251 to repeat what failed
    limit_s = float(os.environ.get("SCHEDULES_S", CPU_S))  # noqa: TID251
    number = int(known) if known else secrets.randbits(32)
    started_s = time.process_time()
    num_rounds = 0
    while not num_rounds or time.process_time() - started_s < limit_s:
        print(f"{machine.__name__}: round {num_rounds + 1}, SCHEDULES_SEED={number}", flush=True)  # noqa: T201
        drawn = seed(number)(type(machine.__name__, (machine,), {}))
        try:
            run_state_machine_as_test(drawn, settings=profile(PER_ROUND, steps, is_fixed=False))
        except BaseException as error:
            error.add_note(f"repeat with SCHEDULES_SEED={number} ({machine.__name__})")
            raise
        num_rounds += 1
        number += 1
    print(  # noqa: T201
        f"{machine.__name__}: {num_rounds * PER_ROUND} schedules of at most {steps} steps in "
        f"{time.process_time() - started_s:.0f} s of CPU"
    )

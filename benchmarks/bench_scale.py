"""Scale: published runs predicted by the simulator, its account, and the planner, as bars.

The simulator (deploy/predict/simulate) runs the ledger of production in virtual time; what is
published is in benchmarks/scale/published with its sources. Nothing here is a measurement of GPUs.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.bars import Bars
from benchmarks.scale.advisor import advisor_bars
from benchmarks.scale.calibration import Predicted, fit, systems
from benchmarks.scale.controller import controller_bars
from benchmarks.scale.planner import planner_bars
from benchmarks.scale.predictions import (
    all_predictions,
    losing,
    markdown,
    median_and_worst,
    plain,
    svg,
)
from benchmarks.scale.random_scenarios import random_scenario
from slipstream.deploy.predict.laws.engine_law import EngineLaw
from slipstream.deploy.predict.laws.learner_law import LearnerLaw, PublishLaw
from slipstream.deploy.predict.simulate.lengths import LogNormal
from slipstream.deploy.predict.simulate.scenario import Scenario
from slipstream.deploy.predict.simulate.world import simulate

_SCHEDULES = 100_000
_SAID_EVERY = 10_000
_EXAMPLES = """examples:
  python -m benchmarks.bench_scale                       # all bars, about 15 minutes
  python -m benchmarks.bench_scale --only published      # the table and its bars
  python -m benchmarks.bench_scale --only schedules --schedules 2000
  python -m benchmarks.bench_scale --only large          # 10,000 engines, 10^6 groups
  python -m benchmarks.bench_scale --fit verl_fully_async
  python -m benchmarks.bench_scale --markdown            # the tables of docs/scale.md
  python -m benchmarks.bench_scale --svg docs/images/scale.svg"""


def published(bars: Bars) -> None:
    """Print all published rows beside the model's, and bars of their errors."""
    told = all_predictions()
    print(plain(told), flush=True)
    middle, worst = median_and_worst(told)
    bars.at_most("scale_median_error", middle, "%", needs=10)
    bars.at_most("scale_worst_error", worst, "%", needs=20)
    found = losing(told)
    for one, loses in found:
        print(f"{one.row.name}: published as slower, {'so is' if loses else 'NOT'} the model's")
    number = sum(loses for _, loses in found)
    bars.at_least("scale_losing_cases", number, f"of {len(found)}", needs=len(found))


def schedules(bars: Bars, number: int) -> None:
    """Run random scenarios; a bar of those whose account or bound fails."""
    began = time.perf_counter()
    failed = 0
    for seed in range(number):
        failed += not holds(seed)
        if (seed + 1) % _SAID_EVERY == 0:
            print(f"{seed + 1:,} of {number:,}, {failed} failed", flush=True)
    print(f"{number:,} random schedules in {time.perf_counter() - began:.0f} s")
    bars.at_least("scale_random_schedules", number - failed, f"of {number}", needs=number)


def holds(seed: int) -> bool:
    """Return whether a random run's account closes and no token passes its bound."""
    scenario = random_scenario(seed)
    outcome = simulate(scenario)
    left = outcome.trained + sum(outcome.dropped.values()) + outcome.in_flight
    return (
        outcome.unaccounted == 0
        and outcome.issued == left
        and outcome.max_staleness() <= scenario.max_staleness_steps
    )


def large_scenario(engines: int, groups_per_step: int, steps: int) -> Scenario:
    """Return a run of many engines."""
    return Scenario(
        steps=steps,
        groups_per_step=groups_per_step,
        group_size=4,
        max_staleness_steps=2,
        engines=engines,
        max_sequences=64,
        engine=EngineLaw(base_s=0.005, weights_s=0.005, sequence_s=3e-5, context_s=2.5e-8),
        learner=LearnerLaw(step_s=20.0),
        publish=PublishLaw(stall_s=0.5, transfer_s=3.0, pause_s=0.5),
        lengths=LogNormal(mean=1000, spread=0.8, longest=8192),
    )


def large() -> None:
    """Print what 10,000 engines and 10^6 groups take."""
    scenario = large_scenario(10_000, 20_000, 50)
    began = time.perf_counter()
    outcome = simulate(scenario)
    print(
        f"{scenario.engines:,} engines, {outcome.trained:,} groups of {scenario.group_size}: "
        f"{time.perf_counter() - began:.0f} s, unaccounted {outcome.unaccounted}",
        flush=True,
    )


def fitted(name: str) -> Iterator[str]:
    """Return a system's parameters as its file has them."""
    yield "[fitted]"
    for key, value in fit(systems()[name], lambda line: print(line, flush=True)).items():
        quoted = f'"{key}"' if not key.isidentifier() else key
        yield f"{quoted} = {value:.4g}"


def picture(file: Path, told: list[Predicted]) -> None:
    """Write the plot of docs/scale.md."""
    file.write_text(svg(told), "utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", choices=("published", "schedules", "planner", "advisor", "controller", "large")
    )
    parser.add_argument("--schedules", type=int, default=_SCHEDULES, metavar="N")
    parser.add_argument("--large", action="store_true", help="10,000 engines and 10^6 groups too")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--fit", metavar="SYSTEM", choices=sorted(systems()))
    output.add_argument("--markdown", action="store_true", help="as it is in docs/scale.md")
    output.add_argument("--svg", type=Path, metavar="FILE", help="write the picture instead")
    arguments = parser.parse_args()
    if arguments.fit:
        print("\n".join(fitted(arguments.fit)))
        return 0
    if arguments.markdown:
        sys.stdout.write(markdown(all_predictions()) + "\n")
        return 0
    if arguments.svg:
        picture(arguments.svg, all_predictions())
        return 0
    bars = Bars()
    only = arguments.only
    if only in (None, "published"):
        published(bars)
    if only in (None, "planner"):
        for bar in planner_bars():
            bars.at_most(bar.name, bar.value, bar.unit, needs=bar.need)
    if only in (None, "advisor"):
        advisor_bars(bars)
    if only in (None, "controller"):
        controller_bars(bars)
    if only in (None, "schedules"):
        schedules(bars, arguments.schedules)
    if only == "large" or arguments.large:
        large()
    return bars.exit_code


if __name__ == "__main__":
    sys.exit(main())

"""`slipstream simulate`: predict a run in virtual time, with the real ledger.

The settings say how a run is scheduled (groups, bound, groups in flight, a staleness target); the
options say on what hardware, and how long answers are. Engines, the learner and publishes follow
laws (docs/scale.md), leases and batches are decided by the code of a real run. Everything printed
is predicted. With --out it writes a run folder for `slipstream dashboard`, `metrics` and others.
"""

import argparse
import time
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from slipstream.deploy.commands.options import add_config, add_json, add_overrides
from slipstream.deploy.config import RunConfig
from slipstream.deploy.simulate.lengths import Fixed, Lengths, LogNormal
from slipstream.deploy.simulate.of_run import Hardware, scenario_of
from slipstream.deploy.simulate.outcome import Outcome, StepRecord
from slipstream.deploy.simulate.run_folder import SimulatedFolder
from slipstream.deploy.simulate.scenario import Faults, Scenario
from slipstream.deploy.simulate.world import World
from slipstream.deploy.sizing.gpus import gpu_named
from slipstream.deploy.sizing.options import (
    add_model,
    add_shares,
    mean_tokens,
    refuse_numbers,
    run_and_shape,
)
from slipstream.deploy.terminal.console import make_console
from slipstream.wire.errors import ConfigError
from slipstream.wire.process.command_line import print_json

EXAMPLES = """examples:
  slipstream simulate run.toml --gpu H100 --engines 12 --learner-gpus 4
  slipstream simulate run.toml --gpu H100 --engines 12 --learner-gpus 4 run.max_staleness_steps=4
  slipstream simulate run.toml --gpu H20 --engines 64 --learner-gpus 64 --mean-response 10000 \\
      --engine-mtbf-h 24 --out runs/predicted       a page: slipstream dashboard runs/predicted
"""
_SAY_EVERY_S = 2.0
_MAY_BE_ZERO = frozenset({"spread", "engine_mtbf_h", "kl_per_lag", "slow_share", "seed"})
_MOST_WARM = 5  # learner steps that means leave out: engines begin with nothing under way


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """What is printed; seconds are virtual."""

    step_s: float  # mean, from the sixth learner step on
    steps_per_hour: float
    tokens_per_s: float  # trained, prompts included
    learner_waits: float  # share of its time
    engines_busy: float  # share of their time in which they decode
    mean_staleness: float  # learner steps
    p95_staleness: int
    max_staleness: int
    group_s_p50: float  # from a group's lease to its last reward
    group_s_p99: float
    issued: int  # groups
    trained: int
    dropped: dict[str, int]
    unaccounted: int
    restarted_trajectories: int
    seconds: float  # of the run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    add_config(parser, required=True)
    parser.add_argument("--gpu", required=True, help='a name such as "H100", or GiB of memory')
    parser.add_argument("--engines", type=int, help="number of engines, default generators.count")
    parser.add_argument(
        "--gpus-per-engine",
        type=int,
        help="ranks of one engine, default those of generators.sglang",
    )
    parser.add_argument(
        "--learner-gpus", type=int, help="GPUs of the learner, default learner.ranks"
    )
    add_model(parser)
    parser.add_argument(
        "--spread",
        type=float,
        default=0.8,
        help="deviation of response lengths over their mean; 0: all are equal; default 0.8",
    )
    add_shares(parser)
    parser.add_argument(
        "--passes",
        type=float,
        default=1.0,
        help="passes of the learner over a batch; a forward pass alone is 0.33; default 1",
    )
    parser.add_argument("--nic-gb-s", type=float, default=50.0, help="GB/s into a host, default 50")
    parser.add_argument("--pcie-gb-s", type=float, default=50.0, help="GB/s into a GPU, default 50")
    parser.add_argument(
        "--engine-mtbf-h", type=float, default=0.0, help="hours between failures of one engine"
    )
    parser.add_argument(
        "--slow-share", type=float, default=0.0, help="share of engines that take 1.5 times as long"
    )
    parser.add_argument(
        "--kl-per-lag",
        type=float,
        default=0.0,
        help="mismatch_kl of a token of staleness 1, growing with its square; for such a target",
    )
    parser.add_argument("--steps", type=int, help="learner steps, default run.steps")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of everything that is drawn, default 0"
    )
    parser.add_argument("--out", type=Path, help="write a run folder here, which must be empty")
    add_json(parser)
    add_overrides(parser)


def main(arguments: argparse.Namespace) -> int:
    """Run the command."""
    config, scenario = asked_of(arguments)
    world = World(scenario)
    folder = None if arguments.out is None else SimulatedFolder(world, config, arguments.out)
    console = make_console()
    began_s = said_s = time.monotonic()

    def on_step(record: StepRecord) -> None:
        nonlocal said_s
        if folder is not None:
            folder.step(record)
        if not arguments.json and time.monotonic() - said_s > _SAY_EVERY_S:
            said_s = time.monotonic()
            console.print(f"step {record.step} of {scenario.steps}", highlight=False)

    outcome = world.run(on_step)
    if folder is not None:
        folder.close()
    found = prediction_of(outcome)
    if arguments.json:
        print_json(found)
        return 0
    print_prediction(found, scenario, console)
    took_s = time.monotonic() - began_s
    console.print(f"[dim]{outcome.seconds:,.0f} s of the run took {took_s:.1f} s[/dim]")
    if arguments.out is not None:
        console.print(f"slipstream dashboard {arguments.out}", soft_wrap=True)
    return 0


def asked_of(arguments: argparse.Namespace) -> tuple[RunConfig, Scenario]:
    """Return the settings and the scenario that the options ask for.

    Raises:
        ConfigError: a number is none, a GPU is unknown, or the settings cannot be used.
    """
    refuse_numbers(arguments, may_be_zero=_MAY_BE_ZERO)
    config, hf = run_and_shape(arguments)
    generators, sampling = config.generators.generators, config.generators.sampling
    prompt_tokens, response_tokens = mean_tokens(arguments, sampling)
    hardware = Hardware(
        gpu=gpu_named(arguments.gpu),
        engines=arguments.engines or generators.count,
        gpus_per_engine=arguments.gpus_per_engine or generators.num_ranks,
        learner_gpus=arguments.learner_gpus or config.learner.learner.ranks,
        bandwidth_share=arguments.engine_share,
        flops_share=arguments.engine_share,
        mfu=arguments.mfu,
        link=arguments.nic_gb_s * 1e9,
        to_device=arguments.pcie_gb_s * 1e9,
    )
    return config, scenario_of(
        config,
        hf,
        hardware,
        lengths=_lengths(response_tokens, arguments.spread, sampling.max_response_tokens),
        prompt_tokens=max(1, round(prompt_tokens)),
        passes=arguments.passes,
        steps=arguments.steps,
        faults=Faults(
            engine_mtbf_s=3600 * arguments.engine_mtbf_h,
            lease_s=config.broker.broker.lease_s,
            slow_share=arguments.slow_share,
            max_attempts=config.broker.broker.max_attempts,
        ),
        kl_per_lag=arguments.kl_per_lag,
        seed=arguments.seed,
    )


def _lengths(mean: float, spread: float, longest: int) -> Lengths:
    if mean < 1:
        raise ConfigError(f"--mean-response is {mean:g}: expected at least 1")
    if not spread or mean > 0.95 * longest:
        return Fixed(round(mean))
    return LogNormal(mean, spread, longest)


def prediction_of(outcome: Outcome) -> Prediction:
    """Return the figures of a simulated run."""
    skip = min(_MOST_WARM, len(outcome.steps) - 1)
    step_s = outcome.mean_step_s(skip)
    late = outcome.steps[skip:]
    return Prediction(
        step_s=step_s,
        steps_per_hour=3600 / step_s,
        tokens_per_s=sum(one.num_tokens for one in late) / (step_s * len(late)),
        learner_waits=outcome.waited_share(skip),
        engines_busy=outcome.engine_busy_s / outcome.engine_seconds,
        mean_staleness=outcome.mean_staleness(skip),
        p95_staleness=outcome.p95_staleness(skip),
        max_staleness=outcome.max_staleness(),
        group_s_p50=outcome.group_seconds(0.5),
        group_s_p99=outcome.group_seconds(0.99),
        issued=outcome.issued,
        trained=outcome.trained,
        dropped={str(reason): count for reason, count in outcome.dropped.items()},
        unaccounted=outcome.unaccounted,
        restarted_trajectories=outcome.restarted_trajectories,
        seconds=outcome.seconds,
    )


def print_prediction(found: Prediction, scenario: Scenario, console: Console) -> None:
    """Print the figures."""
    table = Table(title="predicted, not measured", show_header=False)
    table.add_column("figure", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("meaning")
    bound = scenario.max_staleness_steps
    rows = [
        (
            "seconds per learner step",
            f"{found.step_s:,.1f}",
            f"{found.steps_per_hour:,.1f} an hour",
        ),
        ("tokens per second", f"{found.tokens_per_s:,.0f}", "trained, prompts included"),
        ("learner waits", f"{found.learner_waits:.0%}", "of its time, for batches"),
        ("engines decode", f"{found.engines_busy:.0%}", f"of the time of {scenario.engines}"),
        (
            "staleness",
            f"{found.mean_staleness:.2f}",
            f"mean; p95 {found.p95_staleness}, at most {found.max_staleness}, bound {bound}",
        ),
        ("a group takes", f"{found.group_s_p50:,.0f} s", f"median; p99 {found.group_s_p99:,.0f} s"),
        (
            "groups",
            f"{found.issued:,}",
            f"issued: {found.trained:,} trained, {sum(found.dropped.values()):,} dropped, "
            f"{found.unaccounted} unaccounted",
        ),
    ]
    for row in rows:
        table.add_row(*row)
    console.print(table)

"""`slipstream simulate`: predict a run in virtual time, with the real ledger.

The settings say how a run is scheduled (groups, bound, groups in flight, a staleness target); the
options say on what hardware, and how long answers are. Engines, the learner and publishes follow
laws (docs/scale.md), leases and batches are decided by the code of a real run. Everything printed
is predicted. With --out it writes a run folder for `slipstream dashboard`, `metrics` and others.
"""

import argparse
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from slipstream.deploy.commands.options import add_config, add_json, add_overrides
from slipstream.deploy.config import RunConfig
from slipstream.deploy.predict.advise.fit import lengths_of
from slipstream.deploy.predict.advise.record import Record, record_of
from slipstream.deploy.predict.laws.learner_step import passes_of
from slipstream.deploy.predict.simulate.lengths import Fixed, Lengths, LogNormal, cut
from slipstream.deploy.predict.simulate.of_run import Hardware, scenario_of
from slipstream.deploy.predict.simulate.outcome import SimulatedRun, StepRecord
from slipstream.deploy.predict.simulate.run_folder import SimulatedFolder
from slipstream.deploy.predict.simulate.scenario import Faults, Scenario
from slipstream.deploy.predict.simulate.world import World
from slipstream.deploy.predict.size.options import (
    add_hardware,
    add_model,
    cluster_of,
    mean_tokens,
    policies_beside,
    refuse_numbers,
    run_and_shape,
)
from slipstream.deploy.terminal.console import make_console
from slipstream.wire.errors import ConfigError
from slipstream.wire.models.hf_config import HfConfig
from slipstream.wire.process.command_line import print_json
from slipstream.wire.settings.sections import SamplingSection

EXAMPLES = """examples:
  slipstream simulate run.toml --gpu H100 --engines 12 --learner-gpus 4
  slipstream simulate run.toml --gpu H100 --engines 12 --learner-gpus 4 run.max_staleness_steps=4
  slipstream simulate run.toml --gpu H20 --engines 64 --learner-gpus 64 --mean-response 10000 \\
      --engine-mtbf-h 24 --out runs/predicted       a page: slipstream dashboard runs/predicted
  slipstream simulate run.toml --gpu H100 --engines 12 --learner-gpus 4 --like runs/demo
"""
_SAY_EVERY_S = 2.0
_SPREAD = 0.8
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
    retractions: int  # sequences that a full cache gave up for a while
    seconds: float  # virtual time of the run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    add_config(parser, required=True)
    add_count, add_number = (partial(parser.add_argument, type=kind) for kind in (int, float))
    add_count("--engines", help="number of engines, default generators.count")
    add_count("--gpus-per-engine", help="ranks of one engine, default those of generators.sglang")
    add_count("--learner-gpus", help="GPUs of the learner, default learner.ranks")
    add_model(parser)
    add_hardware(parser)
    text = "a run's folder: lengths, useless groups and seconds to a reward are as it had them"
    parser.add_argument("--like", type=Path, metavar="RUN", help=text)
    text = "deviation of response lengths over their mean; 0: all are equal; default 0.8"
    add_number("--spread", help=text)
    text = "passes of the learner over a batch; a forward pass alone is 0.33; default those of the "
    add_number("--passes", help=f"{text}settings")
    add_count("--publish-every", default=1, help="learner steps between publishes, default 1")
    add_number("--reward-s", help="seconds from an answer to its reward, default 0")
    text = "share of groups with equal rewards, which are dropped; default 0"
    add_number("--useless-share", help=text)
    add_number("--engine-mtbf-h", default=0.0, help="hours between failures of one engine")
    add_number("--slow-share", default=0.0, help="share of engines that take 1.5 times as long")
    text = "mismatch_kl of a token of staleness 1, growing with its square; for such a target"
    add_number("--kl-per-lag", default=0.0, help=text)
    add_count("--steps", help="learner steps, default run.steps")
    add_count("--seed", default=0, help="seed of everything that is drawn, default 0")
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
        return print_json(found)
    print_prediction(found, scenario, console)
    took_s = time.monotonic() - began_s
    console.print(f"[dim]{outcome.seconds:,.0f} s of the run took {took_s:.1f} s[/dim]")
    if arguments.out is not None:
        console.print(f"slipstream dashboard {arguments.out}", soft_wrap=True)
    return 0


def asked_of(arguments: argparse.Namespace) -> tuple[RunConfig, Scenario]:
    """Return the settings and the scenario that the options ask for.

    Raises:
        ConfigError: A number is out of range, a GPU is unknown, or the settings cannot be used.
    """
    refuse_numbers(arguments)
    config, hf = run_and_shape(arguments)
    generators, given = config.generators.generators, arguments
    engine_gpus = given.gpus_per_engine or generators.num_ranks
    if engine_gpus % generators.attention_groups:
        raise ConfigError(
            f"--gpus-per-engine is {engine_gpus}: expected a multiple of the "
            f"{generators.attention_groups} of generators.sglang.attn_dp_size"
        )
    hardware = Hardware(
        cluster=cluster_of(given, config, reserve_gib=0.0),
        engines=given.engines or generators.count,
        gpus_per_engine=engine_gpus,
        learner_gpus=given.learner_gpus or config.learner.learner.ranks,
    )
    if config.run.staleness_target.mismatch_kl is not None and not given.kl_per_lag:
        raise ConfigError(
            "run.staleness_target.mismatch_kl: a simulation computes no policy; say with "
            "--kl-per-lag how many nats a token of staleness 1 has"
        )
    like = None if given.like is None else record_of(given.like)
    lengths, prompt_tokens = _tokens(given, config.generators.sampling, like)
    passes = _passes(config, hf) if given.passes is None else given.passes
    scenario = scenario_of(
        config, hf, hardware, lengths=lengths, prompt_tokens=prompt_tokens, passes=passes
    )
    return config, replace(
        scenario,
        steps=scenario.steps if given.steps is None else given.steps,
        publish_every=given.publish_every,
        score_s=_first(given.reward_s, None if like is None else like.score_s),
        useless_share=_first(given.useless_share, None if like is None else like.useless_share),
        kl_per_lag=given.kl_per_lag,
        faults=Faults(
            engine_mtbf_s=3600 * given.engine_mtbf_h,
            lease_s=config.broker.broker.lease_s,
            slow_share=given.slow_share,
            max_attempts=config.broker.broker.max_attempts,
        ),
        seed=given.seed,
    )


def _tokens(
    arguments: argparse.Namespace, sampling: SamplingSection, like: Record | None
) -> tuple[Lengths, int]:
    """Return the lengths of responses and of each prompt; an option wins over a run's figures."""
    prompt_tokens, response_tokens = mean_tokens(arguments, sampling)
    longest = sampling.max_response_tokens
    if like is not None and arguments.mean_prompt is None:
        prompt_tokens = like.prompt_tokens
    if like is not None and arguments.mean_response is None:
        response_tokens = min(like.mean_tokens, longest)
    if like is None or arguments.mean_response is not None or arguments.spread is not None:
        lengths = _lengths(response_tokens, arguments.spread, longest)
    else:
        lengths = cut(lengths_of(like), longest)
    return lengths, max(1, round(prompt_tokens))


def _passes(config: RunConfig, hf: HfConfig) -> float:
    """Return the passes of the settings, without those of other policies where torch is not."""
    num_frozen, has_critic = 0, False
    try:
        frozen, has_critic = policies_beside(config)
        num_frozen = len(frozen)
    except ModuleNotFoundError as error:
        sys.stderr.write(
            f"{error.name} is not installed: passes of a reference, a teacher and a critic are not "
            "counted (say --passes)\n"
        )
    return passes_of(hf, config.learner, frozen=num_frozen, has_critic=has_critic).in_trainings


def _first(*given: float | None) -> float:
    """Return the first number that is known, or 0."""
    return next((number for number in given if number is not None), 0.0)


def _lengths(mean: float, spread: float | None, longest: int) -> Lengths:
    if mean < 1:
        raise ConfigError(f"--mean-response is {mean:g}: expected at least 1")
    spread = _SPREAD if spread is None else spread
    if not spread or mean > 0.95 * longest:
        return Fixed(round(mean))
    return LogNormal(mean, spread, longest)


def prediction_of(outcome: SimulatedRun) -> Prediction:
    """Return the figures of a simulated run."""
    skip = min(_MOST_WARM, len(outcome.steps) - 1)
    step_s = outcome.mean_step_s(skip)
    late = outcome.steps[skip:]
    return Prediction(
        step_s=step_s,
        steps_per_hour=3600 / step_s,
        tokens_per_s=sum(step.num_tokens for step in late) / (step_s * len(late)),
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
        retractions=outcome.num_retractions,
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
    if found.retractions:
        rows.append(("retracted", f"{found.retractions:,}", "times a sequence, by a full cache"))
    for row in rows:
        table.add_row(*row)
    console.print(table)

"""Sizing of a run: layouts that fit, seconds of a step, splits of the GPUs, as tables or JSON."""

import argparse
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from slipstream.deploy.predict.laws.figure import total
from slipstream.deploy.predict.laws.publish_cost import Cost
from slipstream.deploy.predict.memory.gpu import GIB
from slipstream.deploy.predict.memory.learner_rank import MemoryPart, total_bytes
from slipstream.deploy.predict.size.answer import RunPlan, answer
from slipstream.deploy.predict.size.options import (
    cluster_of,
    mean_tokens,
    policies_beside,
    refuse_numbers,
    run_and_shape,
)
from slipstream.deploy.predict.size.pools import SplitForecast
from slipstream.deploy.predict.size.proposals import PlanRequest, Proposal
from slipstream.deploy.terminal.console import make_console, plain_table
from slipstream.wire.process.command_line import print_json

GB = 1e9
_PER_COUNT = 2  # layouts that are shown of each number of GPUs
_MOST_SPLITS = 6
_PARALLEL = ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel")
_LETTERS = (
    "F FLOPs of training on a step; R ranks, t p c e of them along tensor, pipeline, context, "
    "experts; d copies of weights; K tokens of a rank's step; h hidden size; L layers, L' with "
    "experts, k experts of a token; N parameters of a rank; m microbatches"
)


def main(arguments: argparse.Namespace) -> int:
    """Print what the settings and options ask for."""
    asked = asked_of(arguments)
    found = answer(asked)
    if arguments.json:
        return print_json(as_json(asked, found))
    print_answer(asked, found, make_console())
    return 0


def asked_of(arguments: argparse.Namespace) -> PlanRequest:
    """Return what the options and the settings ask.

    Raises:
        ConfigError: A number is out of range, a GPU is unknown, or the settings cannot be used.
    """
    refuse_numbers(arguments)
    config, hf = run_and_shape(arguments)
    frozen, has_critic = policies_beside(config)
    generators = config.generators.generators
    prompt_tokens, response_tokens = mean_tokens(arguments, config.generators.sampling)
    in_file = config.learner.learner.ranks + generators.count * generators.num_ranks
    return PlanRequest(
        config=config,
        hf=hf,
        cluster=cluster_of(arguments, config, reserve_gib=arguments.reserve_gib),
        gpus=in_file if arguments.gpus is None else arguments.gpus,
        prompt_tokens=prompt_tokens,
        response_tokens=response_tokens,
        frozen=frozen,
        has_critic=has_critic,
        host_bytes=arguments.host_gb * GB,
    )


def print_answer(asked: PlanRequest, found: RunPlan, console: Console) -> None:
    """Print everything, section by section."""
    run, gpu = asked.config.run, asked.cluster.gpu
    for figure in found.parameters:
        digits = ".1f" if figure.unit else ".0f"
        unit = f" {figure.unit}" if figure.unit else ""
        console.print(f"{figure.what}: {figure.value:,{digits}}{unit}   [{figure.formula}]")
    console.print(
        f"a step: {run.groups_per_step} groups of {run.group_size}, of "
        f"{asked.prompt_tokens:,.0f} + {asked.response_tokens:,.0f} tokens in the mean"
    )
    console.print(f"on {asked.gpus} GPUs: {gpu.name}; {asked.cluster.gpus_per_host} on a host\n")
    ranks = asked.config.learner.learner.ranks
    _print_parts(
        f"the settings' learner, the GPU of {ranks} that needs most",
        found.learner_memory,
        asked,
        console,
    )
    parts = ", ".join(f"{figure.what} {figure.value:.1f}" for figure in found.learner_step)
    console.print(f"its step: {total(found.learner_step):,.1f} s ({parts})\n")
    whose = "of the settings" if found.engine_is_given else "the smallest that holds the model"
    _print_parts(
        f"an engine of {found.engine.ranks} ({whose}), each GPU", found.engine.memory, None, console
    )
    _print_layouts(asked, found, console)
    best = found.splits[0]
    _print_step(best.split.learner, console)
    _print_publishes(asked, best, found.publishes, console)
    _print_splits(asked, found.splits, console)
    console.print(
        "predicted from data sheets and laws, nothing is measured: docs/scale.md", style="dim"
    )


def _print_parts(
    title: str, parts: Sequence[MemoryPart], asked: PlanRequest | None, console: Console
) -> None:
    """Print parts of memory with their laws; whether they fit if it is known what is asked."""
    console.print(f"memory of {title}", style="bold")
    table = plain_table("", "GiB")
    table.add_column("law, bytes")
    for part in parts:
        table.add_row(part.what, f"{part.num_bytes / GIB:.1f}", part.formula)
    verdict, style = "", "bold"
    if asked is not None:
        fits = total_bytes(parts) <= asked.cluster.available_bytes
        verdict, style = ("fits", "green") if fits else ("does NOT fit", "bold red")
        verdict += f" in {asked.cluster.available_bytes / GIB:g}"
    table.add_row("in all", f"{total_bytes(parts) / GIB:.1f}", verdict, style=style)
    console.print(table)
    console.print()


def _print_layouts(asked: PlanRequest, found: RunPlan, console: Console) -> None:
    console.print(
        f"layouts of the learner that fit in {asked.cluster.available_bytes / GIB:g} GiB, the "
        f"fewest GPUs first: {found.fewest_gpus} at least",
        style="bold",
    )
    table = plain_table(
        *("GPUs", "tp", "pp", "cp", "ep", "recompute", "optimizer"),
        *("GiB", "host GB", "s/step"),
        left=0,
    )
    for layout in _shown(found.layouts):
        learner = layout.settings.learner
        table.add_row(
            str(layout.gpus),
            *(str(getattr(learner, name)) for name in _PARALLEL),
            _recompute(layout),
            "on hosts" if learner.optimizer_offload_fraction else "on GPUs",
            f"{layout.gpu_bytes / GIB:.1f}",
            f"{layout.host_bytes / GB:,.0f}",
            f"{layout.step_s:,.1f}",
        )
    console.print(table)
    console.print()


def _shown(layouts: Sequence[Proposal]) -> list[Proposal]:
    shown: list[Proposal] = []
    for layout in layouts:
        if sum(other.gpus == layout.gpus for other in shown) < _PER_COUNT:
            shown.append(layout)
    return shown


def _recompute(layout: Proposal) -> str:
    learner = layout.settings.learner
    return learner.recompute_modules[0] if learner.recompute == "selective" else learner.recompute


def _print_step(layout: Proposal, console: Console) -> None:
    console.print(f"a learner step on {layout.gpus} GPUs, the first of them", style="bold")
    table = plain_table("", "s")
    table.add_column("law")
    for figure in layout.step:
        table.add_row(figure.what, f"{figure.value:,.2f}", figure.formula)
    table.add_row("in all", f"{layout.step_s:,.2f}", "the sum: nothing overlaps", style="bold")
    console.print(table)
    console.print(f"{_LETTERS}\n", style="dim")


def _print_publishes(
    asked: PlanRequest, best: SplitForecast, publishes: dict[str, Cost], console: Console
) -> None:
    split, cluster = best.split, asked.cluster
    console.print(
        f"a publish, from {split.learner.gpus} GPUs to {split.generator_gpus}, {cluster.nics} NICs "
        f"of {cluster.nic_bytes_s / GB:g} GB/s on a host",
        style="bold",
    )
    table = plain_table("", *(f"{name}, s" for name in publishes))
    table.add_column("law")
    laws = {
        "learner's stall": ("stall_s", "bytes / (GPUs of the learner x PCIe)"),
        "until the last engine has it": (
            "arrival_s",
            "digests of a learner's host; then its bytes or an engines' host's / its NICs or "
            "sockets, hops of a chain",
        ),
        "an engine's pause": ("pause_s", "bytes / (GPUs of an engine x a load's rate), its check"),
    }
    for what, (name, law) in laws.items():
        table.add_row(what, *(f"{getattr(cost, name):.2f}" for cost in publishes.values()), law)
    console.print(table)
    console.print()


def _print_splits(asked: PlanRequest, splits: Sequence[SplitForecast], console: Console) -> None:
    console.print(
        f"splits of {asked.gpus} GPUs with run.max_staleness_steps of at most "
        f"{asked.config.run.staleness_bound}, the most steps per hour first",
        style="bold",
    )
    table = plain_table(
        *("learner", "engines", "bound", "groups", "steps/h", "learner s", "engines s"),
        *("longest s", "waits for"),
        left=0,
    )
    for forecast in splits[:_MOST_SPLITS]:
        table.add_row(
            str(forecast.split.learner.gpus),
            f"{forecast.split.engines} x {forecast.split.engine.ranks}",
            str(forecast.split.bound),
            str(forecast.in_flight),
            f"{forecast.steps_per_hour:,.1f}",
            f"{forecast.rates.learner_s:,.1f}",
            f"{forecast.rates.generate_s:,.1f}",
            f"{forecast.rates.longest_s:,.1f}",
            forecast.limit,
        )
    console.print(table)
    console.print(
        "a step is the longest of learner, engines and (longest answer + receive) / bound; with "
        "bound 0 their sum",
        style="dim",
    )
    console.print("\nsettings of the first", style="bold")
    for line in settings_lines(splits[0]):
        console.print(f"  {line}", highlight=False)
    console.print()


def settings_lines(best: SplitForecast) -> list[str]:
    """Return what to write into the file, or behind a command, for an outcome."""
    learner, split = best.split.learner.settings.learner, best.split
    settings: dict[str, object] = {
        "run.max_staleness_steps": split.bound,
        "broker.max_in_flight": best.in_flight,
        "generators.count": split.engines,
        **{f"generators.sglang.{name}": size for name, size in split.engine.sglang.items()},
        "learner.ranks": learner.ranks,
        "learner.ranks_per_node": learner.ranks_per_node,
        **{f"learner.{name}": getattr(learner, name) for name in _PARALLEL},
        "learner.optimizer_offload_fraction": learner.optimizer_offload_fraction,
        "learner.recompute": f'"{learner.recompute}"',
    }
    if learner.recompute == "selective":
        settings["learner.recompute_modules"] = f'["{learner.recompute_modules[0]}"]'
    if split.engine.nodes > 1:
        settings["generators.nodes"] = split.engine.nodes
    return [f"{name} = {value}" for name, value in settings.items()]


def as_json(asked: PlanRequest, found: RunPlan) -> dict[str, Any]:
    """Return everything for programs; bytes and seconds are not rounded."""
    return {
        "gpus": asked.gpus,
        "gpu": asked.cluster.gpu,
        "parameters": found.parameters,
        "learner_memory": found.learner_memory,
        "learner_step": found.learner_step,
        "engine": found.engine,
        "fewest_learner_gpus": found.fewest_gpus,
        "layouts": [_layout_json(layout) for layout in found.layouts],
        "publish": found.publishes,
        "splits": [
            {
                "learner_gpus": forecast.split.learner.gpus,
                "engines": forecast.split.engines,
                "engine_ranks": forecast.split.engine.ranks,
                "max_staleness_steps": forecast.split.bound,
                "max_in_flight": forecast.in_flight,
                "step_s": forecast.step_s,
                "steps_per_hour": forecast.steps_per_hour,
                "waits_for": forecast.limit,
                "rates": forecast.rates,
            }
            for forecast in found.splits
        ],
        "settings": settings_lines(found.splits[0]),
    }


def _layout_json(layout: Proposal) -> dict[str, Any]:
    learner = layout.settings.learner
    return {
        "gpus": layout.gpus,
        **{name: getattr(learner, name) for name in _PARALLEL},
        "recompute": learner.recompute,
        "recompute_modules": learner.recompute_modules,
        "optimizer_offload_fraction": learner.optimizer_offload_fraction,
        "memory": layout.memory,
        "host_bytes": layout.host_bytes,
        "step": layout.step,
        "step_s": layout.step_s,
    }

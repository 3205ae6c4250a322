"""The output of `slipstream run --dry-run`: processes, hosts and memory."""

import shlex
from collections.abc import Sequence

from rich.console import Console

from slipstream.deploy.config import RunConfig
from slipstream.deploy.launch.plan import RolePlan, kind_of
from slipstream.deploy.predict.memory.gpu import (
    GIB,
    RESERVE_GIB,
    fewest_tensor_ranks,
    generator_memory,
    learner_memory,
)
from slipstream.deploy.predict.memory.learner_rank import MemoryPart, total_bytes
from slipstream.deploy.predict.size.options import policies_beside
from slipstream.deploy.terminal.console import plain_table
from slipstream.learner.model.division import refuse_policy, with_vision
from slipstream.wire.models.hf_config import load_hf_config
from slipstream.wire.settings.sections import model_folder


def print_dry_run(config: RunConfig, plans: Sequence[RolePlan], console: Console) -> bool:
    """Print every process with its host, environment and command, then the memory per GPU.

    Processes that differ only in their number are printed once.

    Returns:
        True if everything fits into the memory of a GPU, as far as can be estimated.

    Raises:
        ConfigError: [algo] names no algorithm that this run can train.
    """
    frozen, has_critic = policies_beside(config)
    print_processes(config, plans, console)
    hf = with_vision(load_hf_config(model_folder(config.run)), config.learner.learner)
    refuse_policy(hf, config.learner)
    if config.generators.device == "cpu":
        console.print(f"policy of {hf.num_parameters:,} parameters, on the CPU")
        return True
    available = config.deploy.gpu_memory_gib
    console.print(
        f"memory per GPU of {available:g} GiB for a policy of P = {hf.num_parameters:,} parameters"
    )
    learner = learner_memory(hf, config.learner, frozen=frozen, has_critic=has_critic)
    generator = generator_memory(hf, config)
    shared = config.deploy.share_gpus and len({plan.gpus for plan in plans if plan.gpus}) == 1
    title = "learner, a rank of the stage that needs most: slipstream plan --memory has all stages"
    fits = _print_parts(title, learner, available, console)
    given = config.learner.learner.tensor_parallel
    room = (available - RESERVE_GIB) * GIB
    if shared:
        room -= total_bytes(generator[:-1])
    fewest = fewest_tensor_ranks(hf, config.learner, room, frozen=frozen, has_critic=has_critic)
    if fewest < given:
        console.print(
            f"learner.tensor_parallel = {fewest} fits, too, and the settings have {given}: its "
            "ranks exchange activations in every layer, replicas gradients once per update "
            "(docs/parallelism.md)\n",
            style="yellow",
        )
    of_engine = generator[:-1] if shared else generator
    fits &= _print_parts("generator", of_engine, available, console)
    if shared:
        both = [*learner, *generator[:-1]]
        title = "learner and generator on one GPU"
        fits &= _print_parts(title, both, available, console, parts_shown=False)
    return fits


def print_processes(config: RunConfig, plans: Sequence[RolePlan], console: Console) -> None:
    """Print a row for each kind of process on a host, then their commands."""
    hosts = len({plan.host for plan in plans})
    console.print(
        f"run {config.run.name}: {len(plans)} processes on {hosts} "
        f"host{'' if hosts == 1 else 's'}, {config.run.mode}, staleness bound "
        f"{config.run.staleness_bound}"
    )
    table = plain_table("process", "host", "GPUs", left=3)
    for alike in _alike(plans):
        gpus = [gpu for plan in alike for gpu in plan.gpus or ()]
        shown = ", ".join(map(str, gpus)) if alike[0].gpus is not None else "-"
        table.add_row(_names(alike), alike[0].host, shown)
    console.print(table)
    console.print()
    if hosts > 1:
        console.print(
            "this command starts processes on its own host only; see docs/clusters.md, "
            "and --on hosts for the commands of each host",
            style="yellow",
        )
    console.print("each reads the settings file that `slipstream run` writes:", style="dim")
    for alike in _alike(plans):
        plan = alike[0]
        variables = " ".join(f"{name}={value}" for name, value in plan.environment.items())
        command = f"{plan.host}: {variables} {shlex.join(plan.command)}"
        console.print(command, soft_wrap=True, highlight=False)
        if len(alike) > 1:
            console.print(f"  and so for {_names(alike[1:])}", style="dim", highlight=False)
    console.print()


def _alike(plans: Sequence[RolePlan]) -> list[list[RolePlan]]:
    """Return the processes in order, grouped by kind and host."""
    grouped: dict[tuple[str, str, bool], list[RolePlan]] = {}
    for plan in plans:
        key = plan.host, kind_of(plan.name), plan.gpus is None
        grouped.setdefault(key, []).append(plan)
    return list(grouped.values())


def _names(plans: Sequence[RolePlan]) -> str:
    first, last = plans[0].name, plans[-1].name
    return first if first == last else f"{first} to {last}"


def _print_parts(
    title: str,
    parts: Sequence[MemoryPart],
    available_gib: float,
    console: Console,
    *,
    parts_shown: bool = True,
) -> bool:
    console.print(title, style="bold")
    table = plain_table("part", "GiB")
    table.add_column("formula")
    for part in parts if parts_shown else ():
        table.add_row(part.what, f"{part.num_bytes / GIB:.1f}", part.formula)
    total = sum(part.num_bytes for part in parts) / GIB
    fits = total <= available_gib * 1.001
    verdict, style = ("fits", "green") if fits else ("does NOT fit", "bold red")
    table.add_row("in all", f"{total:.1f}", verdict, style=style)
    console.print(table)
    console.print()
    return fits

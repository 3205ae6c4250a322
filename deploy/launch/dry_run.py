"""The output of `slipstream run --dry-run`: processes, hosts and memory."""

import shlex
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from slipstream.deploy.config import RunConfig
from slipstream.deploy.launch.memory import GIB, generator_memory, learner_memory
from slipstream.deploy.launch.plan import RolePlan
from slipstream.learner.memory import MemoryPart
from slipstream.learner.model.division import refuse_layout
from slipstream.learner.model.hf_config import load_hf_config
from slipstream.wire.settings.sections import model_folder


def print_dry_run(config: RunConfig, plans: Sequence[RolePlan], console: Console) -> None:
    """Print every process with its host, environment and command, then the memory per GPU.

    Raises:
        ConfigError: [algo] names no algorithm that this run can train.
    """
    from slipstream.learner.training.algorithm import (
        algorithm_of,
        frozen_policies,  # torch: seconds that no other command needs
    )

    algorithm = algorithm_of(config.learner)
    hosts = len({plan.host for plan in plans})
    console.print(
        f"run {config.run.name}: {len(plans)} processes on {hosts} "
        f"host{'' if hosts == 1 else 's'}, {config.run.mode}, staleness bound "
        f"{config.run.staleness_bound}"
    )
    table = Table(box=None, pad_edge=False)
    for title in ("process", "host", "GPUs"):
        table.add_column(title, no_wrap=True)
    for plan in plans:
        gpus = ", ".join(map(str, plan.gpus)) if plan.gpus is not None else "-"
        table.add_row(plan.name, plan.host, gpus)
    console.print(table)
    console.print()
    if hosts > 1:
        console.print(
            "this command starts processes on its own host only; see docs/clusters.md, "
            "and --on hosts for the commands of each host",
            style="yellow",
        )
    console.print("each reads the settings file that `slipstream run` writes:", style="dim")
    for plan in plans:
        variables = " ".join(f"{name}={value}" for name, value in plan.environment.items())
        command = f"{plan.host}: {variables} {shlex.join(plan.command)}"
        console.print(command, soft_wrap=True, highlight=False)
    console.print()
    model = model_folder(config.run)
    hf = load_hf_config(model)
    refuse_layout(hf, config.learner.learner, targets=config.learner.lora.used_targets)
    if config.generators.device == "cpu":
        console.print(f"policy of {hf.num_parameters:,} parameters, on the CPU")
        return
    available = config.deploy.gpu_memory_gib
    console.print(
        f"memory per GPU of {available:g} GiB for a policy of P = {hf.num_parameters:,} parameters"
    )
    frozen = frozen_policies(algorithm, config.learner)
    learner = learner_memory(hf, config, frozen=frozen, has_critic=algorithm.choice.needs_values)
    generator = generator_memory(hf, config)
    shared = config.deploy.share_gpus and len({plan.gpus for plan in plans if plan.gpus}) == 1
    _print_parts(
        "learner, a rank of the stage that needs most: slipstream memory has all stages",
        learner,
        available,
        console,
    )
    _print_parts("generator", generator[:2] if shared else generator, available, console)
    if shared:
        both = [*learner, *generator[:2]]
        _print_parts(
            "learner and generator on one GPU", both, available, console, parts_shown=False
        )


def _print_parts(
    title: str,
    parts: Sequence[MemoryPart],
    available_gib: float,
    console: Console,
    *,
    parts_shown: bool = True,
) -> None:
    console.print(title, style="bold")
    table = Table(box=None, pad_edge=False)
    table.add_column("part")
    table.add_column("GiB", justify="right")
    table.add_column("formula")
    for part in parts if parts_shown else ():
        table.add_row(part.what, f"{part.num_bytes / GIB:.1f}", part.formula)
    total = sum(part.num_bytes for part in parts) / GIB
    verdict = "fits" if total <= available_gib * 1.001 else "does NOT fit"
    style = "green" if verdict == "fits" else "bold red"
    table.add_row("in all", f"{total:.1f}", verdict, style=style)
    console.print(table)
    console.print()

"""`slipstream run`: every role of a run, on this host, on several, or on a Ray cluster."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
from rich.console import Console

from slipstream.deploy.commands.check import look_at, print_reports
from slipstream.deploy.commands.options import (
    add_config,
    add_overrides,
    add_place,
    add_resume,
    import_ray,
    placed_overrides,
)
from slipstream.deploy.config import RunConfig, free_name, run_config, with_contents
from slipstream.deploy.launch.hosts import print_host_commands
from slipstream.deploy.launch.local import run_locally
from slipstream.deploy.launch.plan import plan_roles
from slipstream.deploy.launch.pool import pool_plans, resumed_pool, run_pool, tenant_plans
from slipstream.deploy.launch.resume import (
    find_resume_point,
    newest_pool,
    refuse_taken,
    resumed_table,
)
from slipstream.deploy.launch.signals import Signals, StopRequestedError
from slipstream.deploy.preflight.check.needs import refuse_without_extras
from slipstream.deploy.preflight.dry_run import print_dry_run, print_processes
from slipstream.deploy.terminal.console import make_console
from slipstream.deploy.terminal.live import TerminalView
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.run_folder import SETTINGS
from slipstream.wire.gpus import usable_gpus
from slipstream.wire.process.command_line import EXIT_FAILED
from slipstream.wire.settings.load import Table, load_table
from slipstream.wire.settings.load import section as load_section
from slipstream.wire.settings.lora import publishing
from slipstream.wire.settings.sections import CheckpointSection, run_section
from slipstream.wire.settings.tenants import is_pool

EXAMPLES = """examples:
  slipstream run --config run.toml generators.count=4    a run with every role on this host
  slipstream run --config run.toml --dry-run             check the settings, print the processes
  slipstream run --config run.toml --resume auto         resume from the newest checkpoint
  slipstream run --config run.toml --on ray              the same on the nodes of a Ray cluster
  slipstream run --config run.toml --on hosts            print what to start on each of deploy.hosts
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    add_config(parser, required=True)
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="load what the roles load, print processes and what would fail, exit (1: something)",
    )
    add_resume(parser)
    add_place(
        parser,
        "where its processes are: this host (the default), a Ray cluster, or several hosts, "
        "whose commands are printed",
    )
    add_overrides(parser)


def main(arguments: argparse.Namespace) -> int:
    """Run the command."""
    overrides = placed_overrides(arguments)
    return run(arguments.config, overrides, arguments.dry_run, arguments.resume, place=arguments.on)


def run(
    path: Path,
    overrides: Sequence[str],
    dry_run: bool,
    resume: str | None = None,
    *,
    place: str = "local",
) -> int:
    """Run every role of a run.

    Args:
        path: Settings file of the run.
        overrides: Settings that win over the file's.
        dry_run: check, print the processes, and return.
        resume: auto, or the folder to resume from; None begins a new run.
        place: local, ray, or hosts: print the commands for each of deploy.hosts.
    """
    console = make_console(outlives_screen=True)
    table = load_table(path, overrides)
    if is_pool(table):
        return _run_pool(table, dry_run, resume, place, console)
    section = run_section(table)
    upload = load_section(table, "checkpoint", CheckpointSection).upload
    point = find_resume_point(section, resume, upload) if resume else None
    if point is not None:
        start = point.checkpoint or f"the ledger of {point.run_folder}: no checkpoint was saved yet"
        console.print(f"resuming from {start}", soft_wrap=True)
        config = run_config(resumed_table(table, point))
    else:
        if resume:
            console.print(f"nothing to resume in {section.dir}: a new run starts", soft_wrap=True)
        name = free_name(section)
        config = run_config({**table, "run": {**table.get("run", {}), "name": name}})
        refuse_taken(upload)
    if place == "local" and len(config.deploy.hosts) == 1:
        refuse_without_extras(config)
    if note := steps_before_epochs(table):
        console.print(note, style="yellow", soft_wrap=True)
    if how := publishing(config.table):
        console.print(how, soft_wrap=True)
    config = with_contents(config)
    if dry_run:
        return _try_dry(config, place, console)
    if place == "ray":
        return int(import_ray().run_on_ray(config, TerminalView(console)))
    if place == "hosts":
        print_host_commands(config, console)
        return 0
    if len(config.deploy.hosts) > 1:
        raise ConfigError(
            f"deploy.hosts names {len(config.deploy.hosts)} hosts; this command starts "
            "processes on its own host only (--dry-run shows the plan, --on hosts the commands "
            "for each host): see docs/clusters.md"
        )
    return run_locally(config, TerminalView(console))


def _run_pool(table: Table, dry_run: bool, resume: str | None, place: str, console: Console) -> int:
    """Run a pool of tenants, or print what would start."""
    if place != "local":
        raise ConfigError(
            f"--on {place} with [tenants]: a pool runs on one host; roles on others are started "
            "with start-generator --config pool.toml, start-reward-worker --tenant NAME"
        )
    if resume not in {None, "auto"}:
        raise ConfigError("--resume of a pool is auto: each tenant resumes where it was")
    section = run_section(table)
    name = newest_pool(section) if resume else free_name(section)
    config = run_config({**table, "run": {**table.get("run", {}), "name": name}})
    if resume:
        config, done = resumed_pool(config)
        for tenant in done:
            console.print(f"tenant {tenant}: its run is complete", soft_wrap=True)
    else:
        for new in config.tenants:
            refuse_taken(new.settings.learner.checkpoint.upload)
    refuse_without_extras(config)
    if len(config.deploy.hosts) > 1:
        raise ConfigError(
            f"deploy.hosts names {len(config.deploy.hosts)} hosts; this command starts a pool's "
            "processes on its own host only"
        )
    tenants = [
        replace(tenant, settings=with_contents(tenant.settings)) for tenant in config.tenants
    ]
    config = msgspec.structs.replace(config, tenants=tuple(tenants))
    if dry_run:
        return 0 if _print_pool(config, console) else EXIT_FAILED
    return run_pool(config, TerminalView(console))


def _print_pool(config: RunConfig, console: Console) -> bool:
    """Print what would start; return True if all of it fits."""
    for tenant in config.tenants:
        run = tenant.settings
        print_processes(run, tenant_plans(run, run.run.folder / SETTINGS), console)
    return print_dry_run(config, pool_plans(config, config.run.folder / SETTINGS), console)


def steps_before_epochs(table: Table) -> str:
    """Return a remark where run.epochs is set and the default of run.steps may end a run first."""
    run = run_section(table)
    if not run.epochs or "steps" in table.get("run", {}):
        return ""
    return (
        f"run.epochs = {run.epochs:g}, and run.steps is {run.steps} by default: whichever is "
        "reached first ends the run; set run.steps too"
    )


def _try_dry(config: RunConfig, place: str, console: Console) -> int:
    """Print what would start, and what would fail; return the exit code: 1 if anything would."""
    resolved = config.run.folder / SETTINGS
    plans = plan_roles(config, resolved, gpus=None if place == "ray" else usable_gpus())
    fits = print_dry_run(config, plans, console)
    if place == "ray":
        console.print("nodes of the cluster are looked at by `slipstream check --on ray`")
        return 0 if fits else EXIT_FAILED
    here = config.with_settings("deploy", hosts=config.deploy.hosts[:1])
    signals = Signals()
    with signals.handled():
        try:
            reports = look_at(here, [], "local", signals)
        except StopRequestedError as error:
            return error.exit_code
    print_reports(reports, console, only_trouble=True)
    if len(config.deploy.hosts) > 1:
        console.print("looked at this host alone; all: `slipstream check --on hosts`")
    fails = any(fact.outcome == "fail" for report in reports for fact in report.facts)
    return EXIT_FAILED if fails or not fits else 0

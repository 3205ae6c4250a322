"""The bodies of `slipstream`'s subcommands."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from broker.summary import summary_of
from deploy.addition import prepare
from deploy.config import RunConfig, free_name, run_config
from deploy.local import run_locally
from deploy.observe import dashboard_address, run_of_folder, status_now
from deploy.plan import count_gpus, plan_roles
from deploy.view import live_view
from wire.command_line import print_json
from wire.logs import start_logging
from wire.run_settings import run_section
from wire.settings import load_table

_QUICKSTART_FOLDER = Path(".cache/addition")


def run(path: Path, overrides: Sequence[str], dry_run: bool) -> int:
    """Run every role of a run on this host."""
    config = _load(path, overrides)
    console = Console()
    if dry_run:
        for plan in plan_roles(config, config.run.folder / "resolved.toml", num_gpus=count_gpus()):
            console.print(f"{plan.name}: {shlex.join(plan.command)}", soft_wrap=True)
        return 0
    return run_locally(config, console)


def quickstart(path: Path, overrides: Sequence[str]) -> int:
    """Make task and policy on the first run, then run."""
    start_logging("quickstart")
    prepare(_QUICKSTART_FOLDER)
    return run(path, overrides, dry_run=False)


def status(folder: Path, *, as_json: bool) -> int:
    """Print the figures of a run that goes on."""
    of_run = run_of_folder(folder)
    now = status_now(of_run)
    if as_json:
        return print_json(summary_of(now))
    Console().print(live_view(now, dashboard_address(of_run)))
    return 0


def _load(path: Path, overrides: Sequence[str]) -> RunConfig:
    """Return the settings with a run name that nobody has used."""
    table = load_table(path, overrides)
    name = free_name(run_section(table))
    return run_config({**table, "run": {**table.get("run", {}), "name": name}})

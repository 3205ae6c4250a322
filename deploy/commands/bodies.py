"""The bodies of `slipstream`'s subcommands."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from slipstream.broker.report.summary import summary_of
from slipstream.deploy.commands.dashboard import show_dashboard
from slipstream.deploy.commands.data_check import data_check as data_check
from slipstream.deploy.commands.dead_letters import dead_letters as dead_letters
from slipstream.deploy.commands.dry_run import print_dry_run
from slipstream.deploy.commands.export import export as export
from slipstream.deploy.commands.keys import keys as keys
from slipstream.deploy.commands.ledger import newest_started, print_account, print_trace
from slipstream.deploy.commands.replay import replay as replay
from slipstream.deploy.commands.show import show as show_rows
from slipstream.deploy.commands.top import top as show_top
from slipstream.deploy.commands.trace import write_trace
from slipstream.deploy.commands.try_reward import reward_test as reward_test
from slipstream.deploy.commands.versions import print_versions
from slipstream.deploy.config import RunConfig, free_name, run_config
from slipstream.deploy.examples.addition import SHIPPED_POLICY, prepare
from slipstream.deploy.launch.local import run_locally
from slipstream.deploy.launch.plan import count_gpus, plan_roles
from slipstream.deploy.launch.resume import find_resume_point, resumed_table
from slipstream.deploy.terminal.console import make_console
from slipstream.deploy.terminal.observe import dashboard_address, run_of_folder, status_now
from slipstream.deploy.terminal.view import live_view
from slipstream.wire.errors import ConfigError
from slipstream.wire.process.command_line import print_json
from slipstream.wire.process.logs import start_logging
from slipstream.wire.settings.load import Table, load_table
from slipstream.wire.settings.sections import run_section

_QUICKSTART_FOLDER = Path(".cache/addition")
_RUNS = Path("runs")


def run(path: Path, overrides: Sequence[str], dry_run: bool, resume: str | None = None) -> int:
    """Run every role of a run on this host."""
    console = make_console()
    config = _load(path, overrides, resume, console)
    if dry_run:
        resolved = config.run.folder / "resolved.toml"
        plans = plan_roles(config, resolved, num_gpus=count_gpus())
        print_dry_run(config, plans, console)
        return 0
    if len(config.deploy.hosts) > 1:
        raise ConfigError(
            f"deploy.hosts names {len(config.deploy.hosts)} hosts; this command starts "
            "processes on its own host only (--dry-run shows the plan): docs/weight-bus.md says "
            "how to start generators on others by hand"
        )
    return run_locally(config, console)


def quickstart(path: Path, overrides: Sequence[str], resume: str | None = None) -> int:
    """Refuse wrong settings, put task and policy into their folder, then run."""
    _check_quickstart(load_table(path, overrides))
    start_logging("quickstart")
    prepare(_QUICKSTART_FOLDER)
    return run(path, overrides, dry_run=False, resume=resume)


def _check_quickstart(table: Table) -> None:
    """Check the settings of a quickstart whose policy may not be in its folder yet.

    Raises:
        ConfigError: naming the setting.
    """
    section = run_section(table)
    if Path(section.model) == _QUICKSTART_FOLDER / "model":
        run_config({**table, "run": {**table["run"], "model": str(SHIPPED_POLICY)}})
    else:
        run_config(table)


def status(folder: Path | None, *, as_json: bool) -> int:
    """Print the figures of a run that goes on."""
    of_run = run_of_folder(folder or newest_started(_RUNS))
    now = status_now(of_run)
    if as_json:
        return print_json(summary_of(now))
    make_console().print(live_view(now, dashboard_address(of_run)))
    return 0


def top(folder: Path | None, *, as_json: bool) -> int:
    """Show a run in the terminal until q is pressed, or print it once."""
    return show_top(folder or newest_started(_RUNS), as_json=as_json)


def dashboard(folder: Path | None, *, port: int) -> int:
    """Print the address of a run's page; serve that of a run that has ended."""
    return show_dashboard(folder or newest_started(_RUNS), make_console(), port=port)


def trace(folder: Path | None, out: Path | None, *, max_spans: int) -> int:
    """Write the time line of a run."""
    if max_spans < 1:
        raise ConfigError(f"--max-spans must be at least 1, got {max_spans}")
    return write_trace(folder or newest_started(_RUNS), out, make_console(), max_spans=max_spans)


def ledger(words: Sequence[str], *, num_items: int, as_json: bool) -> int:
    """Print the account of all items of a run, or the life of one."""
    if words[:1] == ["trace"]:
        if len(words) not in {2, 3}:
            raise ConfigError("slipstream ledger trace PROMPT [RUN] names one prompt")
        folder = Path(words[2]) if len(words) == 3 else newest_started(_RUNS)
        return print_trace(folder, words[1], make_console(), as_json=as_json)
    if len(words) > 1:
        raise ConfigError(f"slipstream ledger takes one run folder, got {' '.join(words)}")
    folder = Path(words[0]) if words else newest_started(_RUNS)
    return print_account(folder, make_console(), num_items=num_items, as_json=as_json)


def versions(folder: Path | None, *, count: int, as_json: bool) -> int:
    """Print which weights each engine holds, and how the publishes went."""
    return print_versions(
        folder or newest_started(_RUNS), make_console(), count=count, as_json=as_json
    )


def show(folder: Path, *, count: int, step: int | None, group: int | None, evaluation: bool) -> int:
    """Print recorded trajectories, or answers of an evaluation."""
    return show_rows(
        folder, make_console(), count=count, step=step, group=group, evaluation=evaluation
    )


def _load(path: Path, overrides: Sequence[str], resume: str | None, console: Console) -> RunConfig:
    """Return the settings of the run to go on with, or with a run name that nobody has used."""
    table = load_table(path, overrides)
    section = run_section(table)
    point = find_resume_point(section, resume) if resume else None
    if point is not None:
        start = point.checkpoint or f"the ledger of {point.run_folder}: no checkpoint was saved yet"
        console.print(f"going on from {start}", soft_wrap=True)
        return run_config(resumed_table(table, point))
    if resume:
        console.print(f"nothing to go on from in {section.dir}: a new run begins", soft_wrap=True)
    return run_config({**table, "run": {**table.get("run", {}), "name": free_name(section)}})

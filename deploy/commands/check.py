"""`slipstream check`: find out before a run whether it will start.

Prints one line for each fact, grouped by host: ok, warn or fail, what was found, and the setting
that changes it. Exit code 0: all is well; 1: there are warnings; 2: the run would fail.
"""

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.status import Status
from rich.text import Text

from slipstream.deploy.commands.options import (
    add_config,
    add_json,
    add_overrides,
    add_place,
    import_ray,
    placed_overrides,
)
from slipstream.deploy.config import RunConfig, run_config
from slipstream.deploy.launch.hosts import addressed, print_check_commands
from slipstream.deploy.launch.plan import RolePlan, plan_roles
from slipstream.deploy.launch.signals import Signals, StopRequestedError
from slipstream.deploy.preflight.check.facts import Fact, HostReport, exit_code, fail
from slipstream.deploy.preflight.check.meeting import FirstHost, answer_first_host
from slipstream.deploy.preflight.check.places import NODE_PROGRAM, local_posts
from slipstream.deploy.preflight.check.run_folder import (
    judge_folder,
    judge_listed,
    judge_roles,
    see_folder,
)
from slipstream.deploy.preflight.check.survey import survey
from slipstream.deploy.terminal.console import make_console
from slipstream.wire.errors import ConfigError, SlipstreamError
from slipstream.wire.files.run_folder import SETTINGS
from slipstream.wire.process.command_line import print_json
from slipstream.wire.process.gpus import usable_gpus
from slipstream.wire.settings.load import load_table
from slipstream.wire.settings.lora import publishing
from slipstream.wire.settings.rendezvous import Address, parse_rendezvous

EXAMPLES = """examples:
  slipstream check --config run.toml                       every role on this host
  slipstream check --config run.toml generators.count=4    with other settings
  slipstream check --config run.toml --on ray              on the nodes of a Ray cluster
  slipstream check --config run.toml --on hosts            print what to call on each host
  slipstream check --config run.toml --json                for programs
"""
_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    add_config(parser, required=True)
    add_place(
        parser,
        "where its processes would be: here (the default), on a Ray cluster, on deploy.hosts",
    )
    parser.add_argument("--node", type=int, metavar="K", help="number of this host in deploy.hosts")
    parser.add_argument(
        "--rendezvous", metavar="HOST:PORT", help="where the hosts meet, an address of the first"
    )
    add_json(parser)
    add_overrides(parser)


def main(arguments: argparse.Namespace) -> int:
    """Run the command."""
    overrides = placed_overrides(arguments)
    meets = _meeting(arguments)
    if arguments.on == "hosts" and meets is None:
        config = run_config(load_table(arguments.config, overrides))
        print_check_commands(config, arguments.config, overrides, make_console())
        return 0
    signals = Signals()
    with signals.handled():
        try:
            reports = check(arguments.config, overrides, arguments.on, signals, meets)
        except StopRequestedError as error:
            return error.exit_code
    code = exit_code(reports)
    if arguments.json:
        print_json({"exit_code": code, "hosts": reports})
    else:
        console = make_console()
        if how := publishing(load_table(arguments.config, overrides)):
            console.print(how, soft_wrap=True)
        print_reports(reports, console)
    return code


def _meeting(arguments: argparse.Namespace) -> tuple[int, Address] | None:
    node, rendezvous = arguments.node, arguments.rendezvous
    if node is None and rendezvous is None:
        return None
    if arguments.on != "hosts" or node is None or rendezvous is None:
        raise ConfigError("--node K and --rendezvous HOST:PORT go together, with --on hosts")
    return node, parse_rendezvous(rendezvous)


def check(
    path: Path,
    overrides: Sequence[str],
    place: str,
    signals: Signals,
    meets: tuple[int, Address] | None = None,
) -> list[HostReport]:
    """Look at a run that is to be and at its hosts; return the facts.

    Args:
        path: Settings file of the run.
        overrides: Settings that win over the file's.
        place: local, ray, or hosts.
        signals: Signals that end the check.
        meets: Number of this host and the meeting point, if several hosts are checked.

    Raises:
        StopRequestedError: one of them came.
    """
    known = list[Fact]()
    try:
        table = load_table(path, overrides)
        known = judge_listed(table.get("run", {}))
        config = run_config(table)
    except ConfigError as error:
        return [_report([*known, fail("settings", str(error))])]
    return look_at(config, [*known, judge_folder(see_folder(config.run))], place, signals, meets)


def look_at(
    config: RunConfig,
    facts: Sequence[Fact],
    place: str,
    signals: Signals,
    meets: tuple[int, Address] | None = None,
) -> list[HostReport]:
    """Look at the hosts of a run that is to be; return the facts, ``facts`` first.

    The other arguments and the error are those of ``check``.
    """
    facts = list(facts)
    resolved = config.run.folder / SETTINGS
    try:
        plans = plan_roles(config, resolved, gpus=None if place == "ray" else usable_gpus())
    except ConfigError as error:
        facts.append(fail("places", str(error)))
        plans = plan_roles(config, resolved, gpus=None)
    facts.append(judge_roles([plan.name for plan in plans], config.deploy))
    if place == "local" and len(config.deploy.hosts) > 1:
        several = f"deploy.hosts names {len(config.deploy.hosts)} hosts: --on hosts looks at all"
        return [_report([*facts, fail("hosts", several, "deploy.hosts")])]
    try:
        with make_console(stderr=True).status("placing") as status:
            return _surveyed(config, plans, facts, place, signals, meets, status)
    except SlipstreamError as error:
        return [_report([*facts, fail("hosts", str(error))])]


def _surveyed(
    config: RunConfig,
    plans: Sequence[RolePlan],
    facts: Sequence[Fact],
    place: str,
    signals: Signals,
    meets: tuple[int, Address] | None,
    status: Status,
) -> list[HostReport]:
    def progress(what: str) -> None:
        status.update(Text(what))

    with ExitStack() as stack, signals.raising():
        if meets is not None:
            node, rendezvous = meets
            if not 0 <= node < len(config.deploy.hosts):
                raise ConfigError(f"--node is {node}, deploy.hosts has {len(config.deploy.hosts)}")
            if node > 0:
                progress(f"answering the first host, at {rendezvous}")
                return answer_first_host(config, plans, node, rendezvous, progress)
            first = FirstHost(addressed(config, rendezvous.host), plans, rendezvous, progress)
            stack.callback(first.close)
            reports = [_report(facts), *survey(first.config, first.posts, progress)]
            first.tell(reports)
            return reports
        if place == "ray":
            on_ray = import_ray().ray_posts(config, status.console, NODE_PROGRAM)
            config, posts = stack.enter_context(on_ray)
        else:
            posts = stack.enter_context(local_posts(plans, progress=progress))
        return [_report(facts), *survey(config, posts, progress, is_cluster=place == "ray")]


def _report(facts: Sequence[Fact]) -> HostReport:
    return HostReport(host="the run", roles=(), facts=tuple(facts))


def print_reports(
    reports: Sequence[HostReport], console: Console, *, only_trouble: bool = False
) -> None:
    """Print the facts of all hosts, then how many there are of each kind."""
    for report in reports:
        shown = [fact for fact in report.facts if not only_trouble or fact.outcome != "ok"]
        roles = f": {', '.join(report.roles)}" if report.roles else ""
        if shown:
            console.print(Text(f"{report.host}{roles}", style="bold"), soft_wrap=True)
        for fact in shown:
            line = Text(fact.line)
            line.stylize(_STYLES[fact.outcome], 0, len(fact.outcome))
            console.print(line, soft_wrap=True)
    facts = [fact for report in reports for fact in report.facts]
    counts = {kind: sum(fact.outcome == kind for fact in facts) for kind in _STYLES}
    console.print(Text(", ".join(f"{count} {kind}" for kind, count in counts.items())))

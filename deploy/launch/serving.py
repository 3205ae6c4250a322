"""`slipstream serve`: a command server, its learner and its generators on this host."""

import shutil
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import NoReturn

import tomli_w
from rich.console import Console

from slipstream.broker.commands.config import CommandServerSettings, command_server_settings
from slipstream.broker.commands.log import MOST_LIVES
from slipstream.broker.config import BrokerSettings, DataSection, RewardSection
from slipstream.deploy.config import DeploySection, RunConfig
from slipstream.deploy.launch.plan import RolePlan, plan_roles
from slipstream.deploy.launch.scratch import own_folder, remove_folders_of_the_dead
from slipstream.deploy.launch.session import hold_folder
from slipstream.deploy.launch.signals import Signals, StopRequestedError
from slipstream.deploy.launch.starters import LocalStarter
from slipstream.deploy.launch.supervise import Supervisor
from slipstream.generators.config import generator_settings
from slipstream.learner.config import learner_settings
from slipstream.wire.files.replace import replace_file
from slipstream.wire.files.run_folder import SETTINGS
from slipstream.wire.gpus import usable_gpus
from slipstream.wire.settings.load import Table, section
from slipstream.wire.settings.sections import EvalSection
from slipstream.wire.settings.serve import ServedPlaces

_POLL_S = 0.2


def serve_locally(table: Table, console: Console) -> int:
    """Start every role, and each that ends again, until a signal; return the exit code.

    A command server that was served from this run folder before continues.

    Raises:
        ConfigError: a setting is wrong, or the run folder is served already.
        ChildDiedError: a role failed too often.
    """
    server = command_server_settings(table)
    run, signals = server.run, Signals()
    remove_folders_of_the_dead()
    with ExitStack() as held:
        held.enter_context(signals.handled())
        hold_folder(run, held, f"serves {run.folder}")
        scratch = own_folder()
        held.callback(shutil.rmtree, scratch, ignore_errors=True)
        if not run.socket_dir:
            sockets = {**table.get("run", {}), "socket_dir": str(scratch / "sockets")}
            table = {**table, "run": sockets}
            server = command_server_settings(table)
        starter = LocalStarter(scratch)
        held.callback(starter.close)
        deploy = deploy_of(table)
        supervisor = Supervisor.of(deploy, run.logs, starter.start, signals.held)
        try:
            with signals.raising():
                _serve(plans_of(table, server), server, supervisor, console)
        except StopRequestedError as stop:
            return stop.exit_code
        finally:
            workers = [name for name in supervisor.children if name != "broker"]
            supervisor.stop(workers)  # each reports what it has done
            supervisor.stop(["broker"])


def deploy_of(table: Table) -> DeploySection:
    """Return [deploy], by default with the restarts after which a command ends its model alone."""
    deploy = {"max_restarts": MOST_LIVES, **table.get("deploy", {})}
    return section({"deploy": deploy}, "deploy", DeploySection)


def plans_of(table: Table, server: CommandServerSettings) -> list[RolePlan]:
    """Write the settings that every role reads; return the processes, the server first.

    Raises:
        ConfigError: a setting is wrong, or there are not enough GPUs.
    """
    resolved = server.run.folder / SETTINGS
    replace_file(resolved, tomli_w.dumps(table).encode())
    broker = BrokerSettings(
        run=server.run,
        data=DataSection(),
        eval=EvalSection(),
        sampling=server.sampling,
        broker=server.broker,
        reward=RewardSection(workers=0),
        logging=server.logging,
    )
    config = RunConfig(
        table=table,
        broker=broker,
        generators=generator_settings(table),
        learner=learner_settings(table),
        deploy=section(table, "deploy", DeploySection),
    )
    plans = plan_roles(config, resolved, gpus=usable_gpus())
    # Each role finds its state in the run folder by itself, and none ends before it is asked to.
    return [replace(plan, restart_arguments=(), serves_others=True) for plan in plans]


def _serve(
    plans: list[RolePlan], server: CommandServerSettings, supervisor: Supervisor, console: Console
) -> NoReturn:
    places = ServedPlaces(server.run)
    places.address.unlink(missing_ok=True)
    broker, *workers = plans
    supervisor.start(broker)
    while not places.address.exists():
        supervisor.check()
        time.sleep(_POLL_S)
    for plan in workers:
        supervisor.start(plan)
    address = places.address.read_text().strip()
    console.print(f"tenants are served at {address}; settings and logs in {server.run.folder}")
    console.print(
        f"their keys are in {server.keys_folder / 'tenants'} "
        "(slipstream keys make NAME --role tenant)",
        soft_wrap=True,
    )
    while True:
        supervisor.check()
        time.sleep(_POLL_S)

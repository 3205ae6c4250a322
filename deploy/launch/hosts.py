"""The commands that start a run by hand on several hosts, for `slipstream run --on hosts`.

Roles of the first host, the broker's, connect through its Unix sockets; roles of other hosts with a
key for each host and role.
"""

import re
import shlex
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path

from rich.console import Console

from slipstream.broker.config import keys_folder
from slipstream.deploy.config import RunConfig, write_resolved
from slipstream.deploy.launch.plan import RolePlan, key_role, kind_of, plan_roles
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.run_folder import SETTINGS
from slipstream.wire.gpus import usable_gpus

_BROKER_PORT, _WEIGHTS_PORT, _RENDEZVOUS_PORT = 5555, 5600, 29400
_OF_A_HOST = ("run.broker=", "run.key_file=")  # settings that only hosts after the first need
_NO_NAME = re.compile(r"[^A-Za-z0-9_.-]+")  # characters not allowed in the name of a key


@dataclass(slots=True)
class HostCommands:
    """Commands to type on one host: ``once`` first, then ``roles``, each in its own terminal."""

    host: str
    once: list[str] = field(default_factory=list)
    roles: list[str] = field(default_factory=list)


def print_check_commands(
    config: RunConfig, path: Path, overrides: Sequence[str], console: Console
) -> None:
    """Print the commands that check a run on each host; keys and settings are copied as for a run.

    Raises:
        ConfigError: there is one host, there are not enough GPUs, or the first host has no known
            IPv4 address.
    """
    if len(config.deploy.hosts) < 2:
        raise ConfigError("deploy.hosts names one host: call slipstream check without --on hosts")
    address, path = first_address(config), path.resolve()
    plans = plan_roles(config, path, gpus=usable_gpus())
    for commands in host_commands(config, plans, resolved=path, address=address):
        node = config.deploy.hosts.index(commands.host)
        meet = ("--node", str(node), "--rendezvous", f"{address}:{_RENDEZVOUS_PORT}")
        own = [word for word in shlex.split(commands.roles[0]) if word.startswith(_OF_A_HOST)]
        file = str(path) if node == 0 else path.name
        words = ("slipstream", "check", "--config", file, "--on", "hosts", *meet)
        check = shlex.join((*words, *overrides, *own))
        _print_commands(console, f"on {commands.host}:", [*commands.once, check])


def print_host_commands(config: RunConfig, console: Console) -> None:
    """Write the run's resolved settings, and print the commands of each host.

    Raises:
        ConfigError: there are not enough GPUs, or the first host has no known IPv4 address.
    """
    address = first_address(config)
    resolved = (config.run.folder / SETTINGS).resolve()
    plans = plan_roles(config, resolved, gpus=usable_gpus())
    commands = host_commands(config, plans, resolved=resolved, address=address)
    resolved.parent.mkdir(parents=True, exist_ok=True)
    write_resolved(config, resolved)
    console.print(
        f"settings in {resolved}; the model is at the same path on each host, and so is run.dir "
        "where the learner is on several",
        soft_wrap=True,
    )
    for host in commands:
        if host.once:
            _print_commands(console, f"on {host.host}, once:", host.once)
        _print_commands(console, f"on {host.host}, each in a terminal of its own:", host.roles)
    console.print(
        "\nWhen all steps are trained, every role but the broker ends: end it with Ctrl-C. A role "
        "that\nfails is started again by the same command, the learner with --resume auto besides: "
        "on all\nof its hosts, where it is on several."
    )


def host_commands(
    config: RunConfig, plans: Sequence[RolePlan], *, resolved: Path, address: str
) -> list[HostCommands]:
    """Return the commands by host, in the order of deploy.hosts; the broker's comes first.

    The first host has the settings file and the address, which is empty for a run on one host.
    """
    first = config.deploy.hosts[0]
    found = {host: HostCommands(host) for host in config.deploy.hosts}
    is_spread = any(plan.host != first for plan in plans)
    listen, weights = listeners(config, address)
    broker = f"tcp://{first}:{listen.rpartition(':')[2]}"
    keys = keys_folder(config.run, config.broker.broker).resolve()
    fetched: set[str] = set()
    for plan in plans:
        kind, words = kind_of(plan.name), list(plan.command[3:])
        if "--node" in words:
            words += ["--rendezvous", f"{address}:{_RENDEZVOUS_PORT}"]
        if plan.host == first:
            if is_spread and kind == "broker":
                words.append(f"broker.listen={listen}")
            if is_spread and kind == "learner":
                words.append(f"weightbus.listen={weights}")
        else:
            role = key_role(plan.name)
            key = f"{_NO_NAME.sub('-', plan.host)}-{role}"
            words[words.index("--config") + 1] = resolved.name
            words += [f"run.broker={broker}", f"run.key_file={key}.key"]
            if kind == "learner":
                words.append(f"run.dir={resolved.parents[1]}")
            if key not in fetched:
                fetched.add(key)
                make = ("slipstream", "keys", "make", key, "--role", role, "--keys", str(keys))
                found[first].once.append(shlex.join(make))
                for path in (resolved, keys / "clients" / f"{key}.key"):
                    found[plan.host].once.append(shlex.join(("scp", f"{first}:{path}", ".")))
        found[plan.host].roles.append(_line(plan, (f"start-{kind}", *words)))
    return [commands for commands in found.values() if commands.roles]


def listeners(config: RunConfig, address: str) -> tuple[str, str]:
    """Return the endpoints of broker and relay on the first host, which has this address."""
    broker = config.broker.broker.listen or f"tcp://0.0.0.0:{_BROKER_PORT}"
    return broker, config.learner.weightbus.listen or f"tcp://{address}:{_WEIGHTS_PORT}"


def addressed(config: RunConfig, address: str) -> RunConfig:
    """Return the run with the endpoints of its first host, which has this address."""
    broker, weights = listeners(config, address)
    return config.with_settings("broker", listen=broker).with_settings("weightbus", listen=weights)


def _print_commands(console: Console, title: str, commands: Sequence[str]) -> None:
    console.print(f"\n{title}", style="bold")
    for command in commands:
        console.print(f"  {command}", soft_wrap=True, highlight=False)


def _line(plan: RolePlan, words: Sequence[str]) -> str:
    variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in plan.environment.items())
    cores = f"taskset -c {','.join(map(str, plan.cores))} " if plan.cores else ""
    return f"{variables} {cores}{shlex.join(words)}"


def first_address(config: RunConfig) -> str:
    """Return the address that other hosts use for the first one; empty for a run on one host.

    Raises:
        ConfigError: this host does not know it.
    """
    hosts = config.deploy.hosts
    listen = config.learner.weightbus.listen.removeprefix("tcp://").rpartition(":")[0]
    return listen or address_of(hosts[0]) if len(hosts) > 1 else ""


def address_of(host: str) -> str:
    """Return an IPv4 address of a host that other hosts can reach.

    Raises:
        ConfigError: this host knows no address, or only a loopback address.
    """
    try:
        address = socket.gethostbyname(host)
    except OSError:
        address = ""
    if not address or ip_address(address).is_loopback:  # Debian names its own host 127.0.1.1
        what = f"which is {address} here" if address else "whose IPv4 address is not known here"
        raise ConfigError(
            f"deploy.hosts begins with {host}, {what}: set broker.listen and weightbus.listen to "
            "tcp://ADDRESS:PORT, with one that the others reach"
        )
    return address

"""Listening addresses and ports of a run, and the interface of collectives."""

import errno
import os
import socket
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import psutil

from slipstream.deploy.config import RunConfig
from slipstream.deploy.launch.plan import kind_of
from slipstream.deploy.preflight.check.facts import Fact, fail, ok, warn
from slipstream.weightbus.net.interfaces import interface_variables, is_loopback

_EVERY = ("0.0.0.0", "::")  # noqa: S104 ports are bound only for a moment
_OF_NCCL = ("NCCL_", "TORCH_NCCL_", "CUDA_DEVICE_MAX_CONNECTIONS")
_SWITCHES = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE")


@dataclass(frozen=True, slots=True)
class Listener:
    """A planned listener of a process."""

    name: str
    setting: str
    host: str
    port: int  # 0 for the system's choice
    count: int = 1  # number of neighboring ports


@dataclass(frozen=True, slots=True)
class SeenListener:
    """A listener as tried on this host."""

    wanted: Listener
    interface: str  # interface with the address; empty without one
    why_not: str = ""  # reason why it cannot listen; empty if it can
    addresses: Mapping[str, str] | None = None  # interface -> address, if it explains a failure


def listeners_of(config: RunConfig, roles: Collection[str]) -> list[Listener]:
    """Return the planned listeners of processes, except Unix sockets.

    Args:
        config: The run.
        roles: Names of the processes.
    """
    found = []
    broker, bus = config.broker.broker, config.learner.weightbus
    if "broker" in roles:
        if broker.listen:
            found.append(_listener("broker.listen", broker.listen))
        if broker.dashboard.enabled:
            page = broker.dashboard
            settings = "broker.dashboard.host, broker.dashboard.port"
            found.append(Listener("dashboard", settings, page.host, page.port))
    if "learner" in roles:  # the learner's node 0
        if bus.listen:
            found.append(_listener("weightbus.listen", bus.listen, count=2))
        found.append(Listener("weightbus.host", "weightbus.host", bus.host, 0))
    return found


def _listener(setting: str, endpoint: str, *, count: int = 1) -> Listener:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return Listener(setting, setting, host.strip("[]"), int(port) if port.isdecimal() else 0, count)


def see_listener(wanted: Listener) -> SeenListener:
    """Try to listen there now."""
    interface = "every interface" if wanted.host in _EVERY else towards(wanted.host, {})
    try:
        family, _, _, _, address = socket.getaddrinfo(
            wanted.host, wanted.port, type=socket.SOCK_STREAM
        )[0]
    except (OSError, OverflowError) as error:
        return SeenListener(wanted, "", f"it cannot be resolved: {error}")
    for i in range(wanted.count if wanted.port else 1):
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address[0], wanted.port + i))
                probe.listen()
            except (OSError, OverflowError) as error:
                return _refused(wanted, interface, wanted.port + i, error)
    return SeenListener(wanted, interface)


def _refused(
    wanted: Listener, interface: str, port: int, error: OSError | OverflowError
) -> SeenListener:
    number = error.errno if isinstance(error, OSError) else 0
    if number == errno.EADDRNOTAVAIL:
        return SeenListener(wanted, "", "it is no address of this host", _own_addresses())
    if number == errno.EADDRINUSE:
        return SeenListener(wanted, interface, f"another process listens on port {port}")
    return SeenListener(wanted, interface, str(error))


def _own_addresses() -> dict[str, str]:
    return {
        name: address.address
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family == socket.AF_INET
    }


def towards(host: str, environment: Mapping[str, str] | None = None) -> str:
    """Return the interface that gloo uses towards a host; empty if no interface leads there.

    Args:
        host: Address or name.
        environment: Variables that may name an interface; None for this process's.
    """
    if environment is None:
        environment = os.environ  # noqa: TID251 gloo has no setting of ours
    variable = "GLOO_SOCKET_IFNAME"
    return interface_variables(host, environment).get(variable, environment.get(variable, ""))


def judge_listener(seen: SeenListener) -> Fact:
    """Return whether a process can listen as the settings say, and on which interface."""
    wanted = seen.wanted
    shown = f"{wanted.host}:{wanted.port}" if wanted.port else wanted.host
    if seen.why_not:
        own = ", ".join(f"{name} {address}" for name, address in (seen.addresses or {}).items())
        has = f"; it has {own}" if own else ""
        return fail(wanted.name, f"{shown}: {seen.why_not}{has}", wanted.setting)
    free = "is an address of this host"
    if wanted.port:
        free = "is free" if wanted.count == 1 else f"and {wanted.count - 1} more are free"
    return ok(wanted.name, f"{shown} {free}, on {seen.interface}", wanted.setting)


def judge_interface(host: str, chosen: str, present: Collection[str]) -> Fact:
    """Return the interface of gloo and NCCL.

    Args:
        host: weightbus.host.
        chosen: Interface; empty if no interface leads to the host.
        present: Interfaces of this host.
    """
    name = "interface"
    if not chosen:
        return fail(name, f"no interface leads to {host}", "weightbus.host")
    if chosen not in present:
        return fail(
            name,
            f"GLOO_SOCKET_IFNAME is {chosen}, expected one of {', '.join(sorted(present))}: unset "
            "it, or name one that leads to weightbus.host",
            "weightbus.host",
        )
    return ok(name, f"gloo and NCCL take {chosen} towards {host}", "weightbus.host")


def judge_nccl(variables: Mapping[str, str]) -> Fact:
    """Return NCCL's environment, as the processes here inherit or get it.

    Args:
        variables: Variables of a process's environment.
    """
    name = "NCCL variables"
    chosen = {key: variables[key] for key in sorted(variables) if key.startswith(_OF_NCCL)}
    shown = " ".join(f"{key}={value}" for key, value in chosen.items())
    off = [key for key in _SWITCHES if chosen.get(key, "0") != "0"]
    if off:
        return warn(name, f"{shown}: {', '.join(off)} turns a fast path off")
    return ok(name, shown or "none is set: NCCL chooses")


def nccl_variables(host: str) -> dict[str, str]:
    """Return the environment of a process here that meets others at a host."""
    own = os.environ  # noqa: TID251 NCCL has no setting of ours
    return {**own, **interface_variables(host, own)}


def observe_network(config: RunConfig, roles: Collection[str], *, in_cluster: bool) -> list[Fact]:
    """Return the facts of this host's network.

    Args:
        config: The run.
        roles: Names of the planned processes here.
        in_cluster: True if the run never uses loopback, regardless of weightbus.host.
    """
    host = config.learner.weightbus.host
    is_used = not (in_cluster and is_loopback(host))
    facts = [
        judge_listener(see_listener(wanted))
        for wanted in listeners_of(config, roles)
        if is_used or wanted.setting != "weightbus.host"
    ]
    if is_used and {"learner", "generator"} & set(map(kind_of, roles)):
        facts.append(judge_interface(host, towards(host), list(psutil.net_if_addrs())))
    return facts

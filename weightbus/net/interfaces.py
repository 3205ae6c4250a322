"""Environment of a collective: selects its interface and keeps it from ending processes."""

import socket
from collections.abc import Mapping

import psutil

_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_ANY_PORT = 9  # nothing is sent
# Processes may lose their peers in NCCL: its watchdog and the watchdog's monitor must not end them.
# The deadlines of groups.py notice the same failures.
NCCL_ENVIRONMENT: Mapping[str, str] = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
# A relay has a group per engine: one with a stopped peer must not hold up the other groups, as it
# would in the single queue to the GPU that a learner uses.
RELAY_ENVIRONMENT: Mapping[str, str] = {**NCCL_ENVIRONMENT, "CUDA_DEVICE_MAX_CONNECTIONS": "32"}


def interface_variables(host: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment that makes gloo and NCCL use the interface that leads to a host.

    By default both use the address of the machine's name, which may be in another network or known
    to this machine alone. Variables set by the user stay, unless the host is this one: then nothing
    may be reachable from outside. Empty if no interface leads there.
    """
    name = _interface_towards(host)
    stays = () if is_loopback(host) else environment
    return {variable: name for variable in _VARIABLES if name and variable not in stays}


def address_towards(host: str) -> str:
    """Return this machine's address towards a host; empty if the host is unreachable."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, _ANY_PORT, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # chooses a route
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def _interface_towards(host: str) -> str:
    own = address_towards(host)
    for name, addresses in psutil.net_if_addrs().items():
        if own and any(entry.address.partition("%")[0] == own for entry in addresses):
            return str(name)
    return ""


def is_loopback(host: str) -> bool:
    """True if an address is known on this machine alone."""
    return host.startswith("127.") or host in {"localhost", "::1"}

"""The environment of a collective: which interface it takes, and that it ends no process."""

import socket
from collections.abc import Mapping

import psutil

_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_ANY_PORT = 9  # nothing is sent
# Of processes in which NCCL may lose its peers: neither its watchdog nor that one's monitor may end
# them. The deadlines of groups.py notice the same failures.
NCCL_ENVIRONMENT: Mapping[str, str] = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
# A relay has a group per engine: one whose peer has stopped must not hold up those of others, as it
# would in the single queue to the GPU that a learner wants.
RELAY_ENVIRONMENT: Mapping[str, str] = {**NCCL_ENVIRONMENT, "CUDA_DEVICE_MAX_CONNECTIONS": "32"}


def interface_variables(host: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment that makes gloo and NCCL use the interface that leads to a host.

    By default both take the address of the machine's name, which may be in another
    network, or one that only this machine knows. Variables set by the user stay, unless the
    host is this one: then nothing may be reachable from outside. Empty if no interface leads there.
    """
    name = _interface_towards(host)
    stays = () if is_loopback(host) else environment
    return {variable: name for variable in _VARIABLES if name and variable not in stays}


def address_towards(host: str) -> str:
    """Return the address of this machine from which a host is reached; empty if it is not."""
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
        if own and any(one.address.partition("%")[0] == own for one in addresses):
            return str(name)
    return ""


def is_loopback(host: str) -> bool:
    """True if an address is known on this machine alone."""
    return host.startswith("127.") or host in {"localhost", "::1"}

"""Every transport by name. To add one: a class in relay/transports/, and a line here.

Classes are imported by the relay alone. Facts for other roles are in a transport's line:
they check settings without torch.
"""

from collections.abc import Mapping
from typing import NamedTuple

from slipstream.weightbus.net.interfaces import is_loopback
from slipstream.wire.errors import ConfigError

_CLASSES = "slipstream.weightbus.relay.transports"


class TransportEntry(NamedTuple):
    """One transport, as every role knows it."""

    path: str  # MODULE:CLASS, a subclass of relay.transports.base.Transport
    dials_host: bool = False  # engines connect to weightbus.host
    is_staged: bool = True  # agents keep a version in memory until their engine has loaded it
    writes_live: bool = False  # into weights of the engine; versions of adapters stand beside them
    serves_parts: bool = False  # of versions that lie on several hosts of the learner

    def why_not_from_afar(self, host: str) -> str:
        """Return why an engine on another host cannot use it; empty if it can.

        Args:
            host: weightbus.host.
        """
        if self.dials_host and is_loopback(host):
            return f"it is on another host, and weightbus.host is {host}"
        return ""


TRANSPORTS: Mapping[str, TransportEntry] = {
    "collective": TransportEntry(
        f"{_CLASSES}.collective:Collective", dials_host=True, writes_live=True
    ),
    "tcp": TransportEntry(f"{_CLASSES}.staged:OverTcp", serves_parts=True),
    "disk": TransportEntry(f"{_CLASSES}.disk:OverDisk", is_staged=False),
}
AUTO = "auto"  # a setting that ``chosen`` replaces by a transport
FALLBACK = "tcp"  # needs nothing that an engine on the weight bus does not have


def chosen(name: str) -> str:
    """Return the transport of an engine: the setting, or the one with the shortest pause."""
    return FALLBACK if name == AUTO else name


def check_transport(name: str) -> None:
    """Refuse a name that is no transport's.

    Raises:
        ConfigError: with the names that are.
    """
    if name not in TRANSPORTS:
        raise ConfigError(
            f"weightbus.transport is {name!r}, expected one of {', '.join((AUTO, *TRANSPORTS))}"
        )

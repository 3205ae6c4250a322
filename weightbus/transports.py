"""Every transport by name. To add one: a class in relay/transports/, and a line here.

Only the relay imports the classes. A transport's line has the facts that other roles need to check
settings without torch.
"""

from collections.abc import Mapping
from typing import NamedTuple

from slipstream.weightbus.net.interfaces import is_loopback
from slipstream.wire.errors import ConfigError

_CLASSES = "slipstream.weightbus.relay.transports"


class TransportEntry(NamedTuple):
    """Facts about one transport for every role."""

    path: str  # MODULE:CLASS, a subclass of relay.transports.base.Transport
    dials_host: bool = False  # engines connect to weightbus.host
    is_staged: bool = True  # agents keep a version in memory until their engine has loaded it
    writes_live: bool = False  # overwrites the engine's weights: adapters cannot use it
    serves_parts: bool = False  # can serve a version that is spread over the learner's hosts

    def why_not_from_afar(self, host: str) -> str:
        """Return why an engine on another host cannot use it; empty if it can.

        Args:
            host: Value of weightbus.host.
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
AUTO = "auto"  # setting that ``chosen`` replaces by a transport
FALLBACK = "tcp"  # works for every engine on the weight bus


def chosen(name: str) -> str:
    """Return the transport of an engine: the setting, or the one with the shortest pause."""
    return FALLBACK if name == AUTO else name


def check_transport(name: str) -> None:
    """Refuse the name of an unknown transport.

    Raises:
        ConfigError: there is no such transport; the text lists the known ones.
    """
    if name not in TRANSPORTS:
        raise ConfigError(
            f"weightbus.transport is {name!r}, expected one of {', '.join((AUTO, *TRANSPORTS))}"
        )

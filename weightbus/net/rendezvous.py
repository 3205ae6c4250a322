"""A torch store that listens on one chosen address and nowhere else.

torch's TCPStore has no authentication and by default listens on every interface.
"""

import datetime
import socket

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in torch's stubs

from slipstream.weightbus.net.listening import listen_at


def open_store(host: str, *, world_size: int, timeout_s: float) -> TCPStore:
    """Return the master store of a group, which listens on one address of this machine.

    Args:
        host: Address, or its name.
        world_size: Size of the group.
        timeout_s: Limit of waits for keys.

    Raises:
        ConfigError: this machine does not have the address.
    """
    listener = listen_at(host, named="weightbus.host")
    return store_on(listener, host, world_size=world_size, timeout_s=timeout_s)


def store_on(
    listener: socket.socket, host: str, *, world_size: int | None, timeout_s: float
) -> TCPStore:
    """Return the master store of a group; it takes over a socket that listens at ``host``."""
    return TCPStore(
        host,
        listener.getsockname()[1],
        world_size,
        is_master=True,
        timeout=datetime.timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )

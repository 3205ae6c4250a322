"""A torch store that listens on one chosen address and nowhere else.

torch's TCPStore knows no authentication and by itself listens on every interface.
"""

import datetime
import errno
import socket

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in torch's stubs

from slipstream.wire.errors import ConfigError


def open_store(
    host: str, *, world_size: int, timeout_s: float, port: int = 0, named: str = "weightbus.host"
) -> TCPStore:
    """Return the master store of a group, which listens on one address of this machine.

    Args:
        host: the address, or a name of it.
        world_size: of the group.
        timeout_s: for keys.
        port: to listen on; 0 has the system choose.
        named: setting or option that names the address, for the error.

    Raises:
        ConfigError: this machine has no such address, or the port is taken.
    """
    shown = f"{host} port {port}" if port else host
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"cannot listen on {shown} ({named}): {error.strerror}") from error
    try:
        if port:  # connections of a process that had it before may linger
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {shown} ({named}): {_reason(error)}") from error
    return TCPStore(
        host,
        listener.getsockname()[1],
        world_size,
        is_master=True,
        timeout=datetime.timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # the store owns it now
    )


def _reason(error: OSError) -> str:
    if error.errno == errno.EADDRNOTAVAIL:
        return "it is not an address of this machine"
    if error.errno == errno.EADDRINUSE:
        return "another process listens there"
    return error.strerror or str(error)

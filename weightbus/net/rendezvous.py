"""A torch store that listens on one chosen address and nowhere else.

torch's TCPStore knows no authentication and by itself listens on every interface.
"""

import datetime
import socket

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in torch's stubs

from slipstream.wire.errors import ConfigError


def open_store(host: str, *, world_size: int, timeout_s: float) -> TCPStore:
    """Return the master store of a group; its ``port`` is chosen by the system.

    Raises:
        ConfigError: this machine has no such address.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.bind((host, 0))
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host} (weightbus.host): {error.strerror}") from error
    listener.listen()
    port = listener.getsockname()[1]
    return TCPStore(
        host,
        port,
        world_size,
        is_master=True,
        timeout=datetime.timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # the store owns it now
    )

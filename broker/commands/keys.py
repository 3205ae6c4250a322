"""Keys of tenants: a folder with a file for each, which has the key's hash and not the key.

keys/tenants/NAME.toml          name and hash: may ask
keys/tenants/NAME.key           the key, carried to the tenant and removed, 0600
keys/tenants/revoked/NAME.toml  may no longer ask
"""

import hashlib
import logging
import re
import secrets
from pathlib import Path

import msgspec

from slipstream.wire.errors import ConfigError
from slipstream.wire.files.keys import write_private
from slipstream.wire.unreadable import UNREADABLE

_log = logging.getLogger(__name__)
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,60}")
_PREFIX = "tml-"  # the SDK takes no other key


class TenantHash(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant and the SHA-256 of its key."""

    name: str
    hash: str


class TenantKeys:
    """The keys in a folder; ``refresh`` notices those that were made or revoked meanwhile."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._by_hash: dict[str, str] = {}
        self.refresh()

    def tenant(self, key: str) -> str:
        """Return whose key this is; empty for an unknown one.

        Keys are found by their hashes, so no time that this takes tells of one.
        """
        return self._by_hash.get(_hash(key), "")

    def refresh(self) -> None:
        """Read the folder again."""
        self._by_hash = {tenant.hash: tenant.name for tenant in tenants(self._folder)}


def tenants(folder: Path) -> list[TenantHash]:
    """Return the tenants in a folder, by name. Other files are logged and left out."""
    found = []
    for path in sorted(folder.glob("*.toml")):
        try:
            found.append(msgspec.toml.decode(path.read_bytes(), type=TenantHash))
        except FileNotFoundError:
            continue  # revoked at this moment
        except (ValueError, *UNREADABLE) as error:
            _log.warning("%s is no key of a tenant: %s", path, error)
    return found


def make_tenant_key(folder: Path, name: str) -> Path:
    """Make a tenant's key; return the file to carry to the tenant, and then to remove.

    Raises:
        ConfigError: there is a tenant of this name, or no file can have it.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} cannot be the name of a tenant: take letters, digits, dots, dashes and "
            "underscores"
        )
    known = folder / f"{name}.toml"
    if known.exists():
        raise ConfigError(f"there is a tenant {name} already; revoke its key first")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    key = _PREFIX + secrets.token_urlsafe(32)
    carried = folder / f"{name}.key"
    write_private(carried, key + "\n")
    write_private(known, f'name = "{name}"\nhash = "{_hash(key)}"\n')
    return carried


def revoke_tenant_key(folder: Path, name: str) -> None:
    """Take a tenant's rights away; a server that runs notices within a second.

    Raises:
        ConfigError: there is no such tenant.
    """
    known = folder / f"{name}.toml"
    if not known.exists():
        raise ConfigError(f"there is no tenant {name} in {folder}")
    (folder / "revoked").mkdir(exist_ok=True, mode=0o700)
    known.replace(folder / "revoked" / known.name)
    (folder / f"{name}.key").unlink(missing_ok=True)


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode(errors="replace")).hexdigest()

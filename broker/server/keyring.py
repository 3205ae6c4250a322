"""The keys that a broker knows: makes, lists and revokes them. One folder, one file per key.

keys/broker.key             the broker's own, 0600
keys/clients/NAME.key       carried to a client's host, 0600
keys/authorized/NAME.toml   public half, name and role: may connect
keys/revoked/NAME.toml      may no longer connect
"""

import logging
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import msgspec
import zmq
from typing_extensions import override

from slipstream.wire.errors import ConfigError
from slipstream.wire.files.keys import ClientKey, read_private, write_client_key, write_private
from slipstream.wire.messages.broker import Role
from slipstream.wire.unreadable import UNREADABLE

_log = logging.getLogger(__name__)
_ALSO: dict[Role, tuple[Role, ...]] = {
    "operator": ("observer",),
    "learner": ("relay", "learner_part"),
}
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,60}")


class KeyHolder(msgspec.Struct, frozen=True, kw_only=True):
    """Name and role that a key was made for."""

    name: str
    role: Role
    public: str
    discard: bool = False  # it was revoked, and its answers are not to be trained


@dataclass(frozen=True, slots=True)
class BrokerKey:
    """The key pair that the broker proves itself with."""

    public: bytes
    secret: bytes

    @override
    def __repr__(self) -> str:
        """Return it without its secret."""
        return f"BrokerKey({self.public!r})"


class KeyRing:
    """The keys in a folder. ``refresh`` notices keys that were made or revoked meanwhile."""

    def __init__(self, folder: Path) -> None:
        """Read the keys that are there."""
        self.folder = folder
        self._by_public: dict[str, KeyHolder] = {}
        self._seen: list[tuple[str, int, int]] | None = None
        self.discarded: frozenset[str] = frozenset()  # keys that were revoked with --discard
        self.refresh()

    def holder(self, public: str) -> KeyHolder | None:
        """Return the holder of a public key; None if unknown or revoked."""
        return self._by_public.get(public)

    @property
    def holders(self) -> list[KeyHolder]:
        """Holders that may connect."""
        return list(self._by_public.values())

    def callback(self, _domain: str, key: bytes) -> bool:
        """True if a connection that proved this key (in Z85) is accepted; for zmq.auth."""
        return key.decode() in self._by_public

    def refresh(self) -> list[KeyHolder]:
        """Read the folder again if it has changed; return whose keys were revoked.

        Raises:
            OSError: the folder cannot be read; the keys known so far stay.
        """
        seen: list[tuple[str, int, int]] = []  # changes with any file made, replaced or removed
        if (folder := self.folder / "authorized").is_dir():
            with os.scandir(folder) as entries:
                stats = [(entry.name, entry.stat()) for entry in entries]
            seen = sorted((name, stat.st_mtime_ns, stat.st_ino) for name, stat in stats)
        if seen == self._seen:
            return []
        now = {holder.public: holder for holder in holders(self.folder)}
        gone = {holder.name for holder in holders(self.folder, "revoked") if holder.discard}
        self.discarded = frozenset(gone - {holder.name for holder in now.values()})
        before, self._by_public, self._seen = self._by_public, now, seen
        return [holder for public, holder in before.items() if public not in now]


def admits(made_for: Role, role: Role) -> bool:
    """True if a key that was made for one role admits clients in another."""
    return role == made_for or role in _ALSO.get(made_for, ())


def broker_key(folder: Path) -> BrokerKey:
    """Return the broker's own key, which is made the first time.

    Raises:
        ConfigError: its file can be read by others, or is no key.
    """
    path = folder / "broker.key"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        public, secret = zmq.curve_keypair()
        own = folder / f".broker-{os.getpid()}.key"
        write_private(own, f"{public.decode()}\n{secret.decode()}\n")
        with suppress(FileExistsError):  # another process was quicker: its key it is
            path.hardlink_to(own)
        own.unlink()
    words = read_private(path, "broker.keys").split()
    if [len(word) for word in words] != [40, 40]:
        raise ConfigError(f"{path} is no key of a broker: remove it to have another made")
    return BrokerKey(words[0].encode(), words[1].encode())


def make_client_key(folder: Path, name: str, role: Role) -> Path:
    """Make a key and authorize it; return the file to carry to the client's host.

    Raises:
        ConfigError: there is a key of that name, or no file can have the name.
    """
    if _authorized(folder, name).exists():
        raise ConfigError(f"there is a key {name} already; revoke it first, or take another name")
    key = authorize(folder, name, role)
    (folder / "clients").mkdir(exist_ok=True, mode=0o700)
    carried = folder / "clients" / f"{name}.key"
    write_client_key(carried, key)
    return carried


def authorize(folder: Path, name: str, role: Role) -> ClientKey:
    """Make a key and authorize it in place of one of that name; its secret is in no file.

    Raises:
        ConfigError: no file can have the name, or there is no such role.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} cannot be the name of a key: take the name of its host, of letters, digits, "
            "dots, dashes and underscores"
        )
    if role not in get_args(Role):
        raise ConfigError(f"role {role!r} is none of {', '.join(get_args(Role))}")
    public, secret = (half.decode() for half in zmq.curve_keypair())
    own = broker_key(folder)
    known = _authorized(folder, name)
    known.parent.mkdir(exist_ok=True, mode=0o700)
    write_private(known, f'name = "{name}"\nrole = "{role}"\npublic = "{public}"\n')
    return ClientKey(name=name, role=role, public=public, secret=secret, broker=own.public.decode())


def revoke(folder: Path, name: str, *, discard: bool = False) -> None:
    """Take a key's rights away; a broker that runs notices within a second.

    With ``discard`` its answers that are not trained yet are dropped, too.

    Raises:
        ConfigError: there is no such key, or it is for another role than generator and ``discard``.
    """
    known = _authorized(folder, name)
    if not known.exists():
        raise ConfigError(f"there is no key {name} in {folder}")
    found = {holder.name: holder.role for holder in holders(folder)}
    if discard and found.get(name) != "generator":
        raise ConfigError(
            f"--discard drops answers, and {name} is the key of a {found.get(name, 'file')}; "
            "revoke it without"
        )
    (folder / "revoked").mkdir(exist_ok=True, mode=0o700)
    if discard:
        write_private(known, known.read_text() + "discard = true\n")
    known.replace(folder / "revoked" / known.name)
    (folder / "clients" / f"{name}.key").unlink(missing_ok=True)


def holders(folder: Path, place: str = "authorized") -> list[KeyHolder]:
    """Return the holders of keys, by name. Other files are logged and left out."""
    found = []
    for path in sorted((folder / place).glob("*.toml")):
        try:
            found.append(msgspec.toml.decode(path.read_bytes(), type=KeyHolder))
        except FileNotFoundError:
            continue  # revoked at this moment
        except (ValueError, *UNREADABLE) as error:
            _log.warning("%s is no key and admits no connection: %s", path, error)
    return found


def _authorized(folder: Path, name: str) -> Path:
    return folder / "authorized" / f"{name}.toml"

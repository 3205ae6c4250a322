"""Key files, by which clients authenticate to a broker on another host (CurveZMQ)."""

import stat
from pathlib import Path

import msgspec

from slipstream.wire.errors import ConfigError
from slipstream.wire.files.replace import replace_file
from slipstream.wire.messages.broker import Role
from slipstream.wire.unreadable import UNREADABLE

_NOBODY_ELSE = stat.S_IRWXG | stat.S_IRWXO
_HEAD = (
    "# This file lets its holder act as this client towards the broker: keep it private (0600).\n"
)
_Z85_KEY = 40  # characters


class ClientKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The key of one host, for one role. Keys are 32 bytes as 40 characters of Z85."""

    name: str
    role: Role
    public: str
    secret: str
    broker: str  # the broker's public key, which it has to prove

    def __repr__(self) -> str:  # type: ignore[explicit-override]  # override is new in Python 3.12
        """Return it without its secret."""
        return f"ClientKey({self.name!r}, {self.role!r}, public={self.public!r})"


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read, whole or not at all."""
    replace_file(path, text.encode(), mode=0o600)


def write_client_key(path: Path, key: ClientKey) -> None:
    """Write a key file."""
    fields = msgspec.structs.asdict(key)
    write_private(path, _HEAD + "".join(f'{name} = "{value}"\n' for name, value in fields.items()))


def read_client_key(path: Path, *, setting: str = "run.key_file") -> ClientKey:
    """Return the key in a file.

    Raises:
        ConfigError: the file is missing, is no key file, or others can read it.
    """
    text = read_private(path, setting)
    try:
        key = msgspec.toml.decode(text, type=ClientKey)
    except UNREADABLE as error:
        raise ConfigError(f"{path} ({setting}) is no key file: {error}") from error
    for field in ("public", "secret", "broker"):
        if len(getattr(key, field)) != _Z85_KEY:
            raise ConfigError(f"{path} ({setting}): {field} is not {_Z85_KEY} characters long")
    return key


def read_private(path: Path, setting: str) -> str:
    """Return the text of a secret file.

    Raises:
        ConfigError: it cannot be read, or others can read it too.
    """
    try:
        mode = path.stat().st_mode
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"cannot read {path} ({setting}): {reason}") from error
    if mode & _NOBODY_ELSE:
        raise ConfigError(
            f"{path} ({setting}) can be read by others (mode {mode & 0o777:04o}): chmod 600 it"
        )
    return text

"""`slipstream keys`: make, list and revoke the keys that roles on other hosts need."""

from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from rich.console import Console
from rich.table import Table as RichTable

from slipstream.broker.config import BrokerSection, keys_folder
from slipstream.broker.server.keyring import holders, make_client_key, revoke
from slipstream.deploy.terminal.console import make_console
from slipstream.wire.errors import ConfigError
from slipstream.wire.messages.broker import Role
from slipstream.wire.process.command_line import print_json
from slipstream.wire.settings.load import load_table, section
from slipstream.wire.settings.sections import run_section


def keys(
    action: str,
    names: Sequence[str],
    *,
    role: str,
    folder: Path | None,
    config: Path | None,
    as_json: bool,
    discard: bool = False,
) -> int:
    """Make, list or revoke keys.

    Args:
        action: make, list or revoke.
        names: of the keys, one per host and role.
        role: that a new key is for.
        folder: of the keys; None is that of ``config``.
        config: the run's settings; None is all defaults.
        as_json: print for programs.
        discard: what was answered with a revoked key and is not trained yet is dropped.
    """
    folder = folder or _keys_folder(config)
    console = make_console()
    match action:
        case "make":
            _make(names, role, folder, console)
        case "revoke":
            for name in names:
                revoke(folder, name, discard=discard)
                also = ", and what it delivered is dropped unless it is trained" if discard else ""
                console.print(f"revoked {name}: it is refused from the next second on{also}")
        case _:
            return _list(folder, console, as_json=as_json)
    return 0


def _make(names: Sequence[str], role: str, folder: Path, console: Console) -> None:
    if not names:
        raise ConfigError("slipstream keys make NAME --role ROLE: name the host that it is for")
    for name in names:
        for known in get_args(Role):
            if role == known:
                path = make_client_key(folder, name, known)
                console.print(
                    f"{path}\n  carry it to its host by scp, keep it at 0600, and start there with "
                    f"run.key_file={path.name}",
                    soft_wrap=True,
                )
                break
        else:
            raise ConfigError(f"--role {role}: expected one of {', '.join(get_args(Role))}")


def _list(folder: Path, console: Console, *, as_json: bool) -> int:
    found = {place: holders(folder, place) for place in ("authorized", "revoked")}
    if as_json:
        return print_json(found)
    table = RichTable("name", "role", "public key", "", title=str(folder), title_justify="left")
    for place, all_of_it in found.items():
        for holder in all_of_it:
            table.add_row(holder.name, holder.role, holder.public, place)
    console.print(table if table.row_count else f"no keys in {folder}")
    return 0


def _keys_folder(config: Path | None) -> Path:
    table = load_table(config)
    return keys_folder(run_section(table), section(table, "broker", BrokerSection))

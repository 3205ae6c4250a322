"""`slipstream keys`: make, list and revoke the keys that roles on other hosts need."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from rich.table import Table as RichTable

from slipstream.broker.commands.keys import make_tenant_key, revoke_tenant_key, tenants
from slipstream.broker.config import BrokerSection, keys_folder
from slipstream.broker.server.keyring import holders, make_client_key, revoke
from slipstream.deploy.commands.options import add_config, add_json
from slipstream.deploy.terminal.console import make_console
from slipstream.wire.errors import ConfigError
from slipstream.wire.messages.broker import Role
from slipstream.wire.process.command_line import print_json
from slipstream.wire.settings.load import load_table, section
from slipstream.wire.settings.sections import run_section

_TENANT = "tenant"  # a client of a command server, which is no role of ours
_TENANTS = "tenants"  # folder of such keys
EXAMPLES = """examples:
  slipstream keys make desk --role operator --config run.toml
  slipstream keys make judge-1 judge-2 --role reward_worker --keys /srv/keys
  slipstream keys make alice --role tenant --config serve.toml      for a client of slipstream serve
  slipstream keys list --config run.toml
  slipstream keys revoke judge-1 --config run.toml     a running broker applies it within a second
  slipstream keys revoke gpu7 --discard                and drop its answers that are not trained yet
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument(
        "action",
        choices=("make", "list", "revoke"),
        help="make: new keys; list: all, with their roles; revoke: refuse some from now on",
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="names of keys, one per host and role"
    )
    parser.add_argument(
        "--role", default="reward_worker", help="make: the role of a new key (reward_worker)"
    )
    parser.add_argument(
        "--keys", type=Path, metavar="DIR", help="folder of the keys; default: that of --config"
    )
    add_config(parser, required=False, text="whose broker.keys to use")
    parser.add_argument(
        "--discard",
        action="store_true",
        help="revoke: also drop the key's answers that are not trained yet",
    )
    add_json(parser, "for programs")


def main(arguments: argparse.Namespace) -> int:
    """Make, list or revoke keys in a folder, by default that of the run's settings."""
    folder: Path | None = arguments.keys
    if folder is None:
        settings = load_table(arguments.config)
        folder = keys_folder(run_section(settings), section(settings, "broker", BrokerSection))
    match arguments.action:
        case "make":
            _make(folder, arguments.names, arguments.role)
        case "revoke":
            _revoke(folder, arguments.names, discard=arguments.discard)
        case _:
            return _list(folder, as_json=arguments.json)
    return 0


def _make(folder: Path, names: Sequence[str], role: str) -> None:
    if not names:
        raise ConfigError("slipstream keys make NAME --role ROLE: give the host that it is for")
    if role not in (*get_args(Role), _TENANT):
        expected = ", ".join((*get_args(Role), _TENANT))
        raise ConfigError(f"--role {role}: expected one of {expected}")
    for name in names:
        if role == _TENANT:
            path = make_tenant_key(folder / _TENANTS, name)
            line = f"hand it to {name} as TINKER_API_KEY, and remove the file"
        else:
            path = make_client_key(folder, name, role)  # type: ignore[arg-type]  # checked above
            line = (
                "copy it to its host with scp, keep its mode 0600, and start the role there with "
                f"run.key_file={path.name}"
            )
        make_console().print(f"{path}\n  {line}", soft_wrap=True)


def _revoke(folder: Path, names: Sequence[str], *, discard: bool) -> None:
    for name in names:
        if (folder / _TENANTS / f"{name}.toml").exists() and not discard:
            revoke_tenant_key(folder / _TENANTS, name)
        else:
            revoke(folder, name, discard=discard)
        also = ", and its untrained answers are dropped" if discard else ""
        make_console().print(f"revoked {name}: it is refused from the next second on{also}")


def _list(folder: Path, *, as_json: bool) -> int:
    found = {place: holders(folder, place) for place in ("authorized", "revoked")}
    known = tenants(folder / _TENANTS)
    if as_json:
        return print_json({**found, _TENANTS: [tenant.name for tenant in known]})
    table = RichTable("name", "role", "public key", "", title=str(folder), title_justify="left")
    for place, its_holders in found.items():
        for holder in its_holders:
            table.add_row(holder.name, holder.role, holder.public, place)
    for tenant in known:
        table.add_row(tenant.name, _TENANT, "", "authorized")
    make_console().print(table if table.row_count else f"no keys in {folder}")
    return 0

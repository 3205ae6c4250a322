"""`slipstream keys`: make, list and revoke the keys that roles on other hosts need."""

import argparse
from pathlib import Path
from typing import get_args

from rich.table import Table as RichTable

from slipstream.broker.config import BrokerSection, keys_folder
from slipstream.broker.server.keyring import holders, make_client_key, revoke
from slipstream.deploy.commands.options import add_config, add_json
from slipstream.deploy.terminal.console import make_console
from slipstream.wire.errors import ConfigError
from slipstream.wire.messages.broker import Role
from slipstream.wire.process.command_line import print_json
from slipstream.wire.settings.load import load_table, section
from slipstream.wire.settings.sections import run_section

EXAMPLES = """examples:
  slipstream keys make desk --role operator --config run.toml
  slipstream keys make judge-1 judge-2 --role reward_worker --keys /srv/keys
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
    console = make_console()
    if arguments.action == "make":
        if not arguments.names:
            raise ConfigError("slipstream keys make NAME --role ROLE: give the host that it is for")
        if arguments.role not in get_args(Role):
            expected = ", ".join(get_args(Role))
            raise ConfigError(f"--role {arguments.role}: expected one of {expected}")
        for name in arguments.names:
            path = make_client_key(folder, name, arguments.role)
            console.print(
                f"{path}\n  copy it to its host with scp, keep its mode 0600, and start the role "
                f"there with run.key_file={path.name}",
                soft_wrap=True,
            )
        return 0
    if arguments.action == "revoke":
        for name in arguments.names:
            revoke(folder, name, discard=arguments.discard)
            also = ", and its untrained answers are dropped" if arguments.discard else ""
            console.print(f"revoked {name}: it is refused from the next second on{also}")
        return 0
    found = {place: holders(folder, place) for place in ("authorized", "revoked")}
    if arguments.json:
        return print_json(found)
    table = RichTable("name", "role", "public key", "", title=str(folder), title_justify="left")
    for place, its_holders in found.items():
        for holder in its_holders:
            table.add_row(holder.name, holder.role, holder.public, place)
    console.print(table if table.row_count else f"no keys in {folder}")
    return 0

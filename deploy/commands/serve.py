"""`slipstream serve`: many tenants train and sample adapters of one model over HTTP, by the SDK."""

import argparse

from slipstream.deploy.commands.options import add_config, add_overrides
from slipstream.deploy.launch.serving import serve_locally
from slipstream.deploy.terminal.console import make_console
from slipstream.wire.errors import ConfigError
from slipstream.wire.settings.load import load_table
from slipstream.wire.settings.serve import serves

EXAMPLES = """examples:
  slipstream keys make alice --role tenant --config serve.toml   a key for the SDK
  slipstream serve serve.toml                                    server, learner and generators here
  slipstream serve serve.toml serve.port=8080 learner.ranks=2

A client sets TINKER_BASE_URL to the address that is printed, and TINKER_API_KEY to its key:
docs/serving.md has the routes.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    add_config(parser, required=True, text="settings with a section [serve]")
    add_overrides(parser)


def main(arguments: argparse.Namespace) -> int:
    """Serve until a signal.

    Raises:
        ConfigError: the settings are not those of a command server.
    """
    table = load_table(arguments.config, arguments.overrides)
    if not serves(table):
        raise ConfigError(f"{arguments.config} has no section [serve]: see docs/serving.md")
    return serve_locally(table, make_console(outlives_screen=True))

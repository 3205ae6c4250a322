"""The settings file among rendered files. Settings hold no secret."""

from collections.abc import Sequence
from pathlib import Path

import tomli_w

from slipstream.broker.config import broker_settings
from slipstream.wire.settings.load import Table, load_table

SETTINGS_FILE = "run.toml"


def settings_text(table: Table) -> str:
    """Return the file that every role reads."""
    return f"# Written by `slipstream render`.\n{tomli_w.dumps(table)}"


def elsewhere(path: Path, overrides: Sequence[str], there: Sequence[str]) -> Table:
    """Return the settings as they hold on other machines, where the model cannot be looked at.

    Args:
        path: Settings file.
        overrides: Overrides of the command line.
        there: Overrides that hold on those machines.

    Raises:
        ConfigError: An override names no setting.
    """
    table = load_table(path, [*overrides, *there])
    broker_settings(table)
    return table

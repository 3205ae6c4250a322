"""Calls subcommands of `slipstream` within the test's process, by their command line."""

import sys
from unittest.mock import patch

from slipstream.deploy.main import _called


def call_command(*words: object, **options: object) -> int:
    """Do what `slipstream WORD... --OPTION=VALUE...` does; errors are raised.

    Options that are None or False are left out, those that are True have no value.
    """
    command = ["slipstream", *map(str, words)]
    for name, value in options.items():
        if value is not None and value is not False:
            command.append(f"--{name}" if value is True else f"--{name}={value}")
    with patch.object(sys, "argv", command):
        return _called()

"""A command of `slipstream` in this process: learners and checks that it starts are forked.

For tests of what a command finds. Its process is the subject where it is installed, interrupted or
starts a run.
"""

import io
import logging
import subprocess
from contextlib import redirect_stderr, redirect_stdout
from unittest.mock import patch

from slipstream.deploy import main as deploy_main
from tests.support.nursery import forking
from tests.support.signals import signals_as_before


def called(*words: object) -> "subprocess.CompletedProcess[str]":
    """Return the exit code of a command, and what it printed itself."""
    argv = ["slipstream", *map(str, words)]
    output, errors = io.StringIO(), io.StringIO()
    log = logging.StreamHandler(errors)  # tests have one of their own, so that a command adds none
    logging.getLogger().addHandler(log)
    try:
        with (
            signals_as_before(),
            patch("subprocess.Popen", forking()),
            patch("sys.argv", argv),
            redirect_stdout(output),
            redirect_stderr(errors),
        ):
            code = deploy_main.main()
    finally:
        logging.getLogger().removeHandler(log)
    return subprocess.CompletedProcess(argv, code, output.getvalue(), errors.getvalue())


def call_command(*words: object, **options: object) -> int:
    """Do what `slipstream WORD... --OPTION=VALUE...` does; errors are raised.

    Options that are None or False are left out, those that are True have no value.
    """
    command = ["slipstream", *map(str, words)]
    for name, value in options.items():
        if value is not None and value is not False:
            command.append(f"--{name}" if value is True else f"--{name}={value}")
    with patch("sys.argv", command):
        return deploy_main._called()

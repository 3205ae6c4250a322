"""A command of `slipstream` in this process: learners and checks that it starts are forked.

For tests of what a command finds. Its process is the subject where it is installed, interrupted or
starts a run.
"""

import io
import logging
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from unittest.mock import patch

from slipstream.deploy import main as deploy_main
from slipstream.wire.process.stopping import STOP_SIGNALS
from tests.support.nursery import forking


def called(*words: object) -> "subprocess.CompletedProcess[str]":
    """Return the exit code of a command, and what it printed itself."""
    argv = ["slipstream", *map(str, words)]
    output, errors = io.StringIO(), io.StringIO()
    log = logging.StreamHandler(errors)  # tests have one of their own, so that a command adds none
    logging.getLogger().addHandler(log)
    try:
        with (
            _signals_as_before(),
            patch("subprocess.Popen", forking()),
            patch("sys.argv", argv),
            redirect_stdout(output),
            redirect_stderr(errors),
        ):
            code = deploy_main.main()
    finally:
        logging.getLogger().removeHandler(log)
    return subprocess.CompletedProcess(argv, code, output.getvalue(), errors.getvalue())


@contextmanager
def _signals_as_before() -> Iterator[None]:
    """Take back the handlers that a command leaves for the end of its process."""
    before = {one: signal.getsignal(one) for one in STOP_SIGNALS}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)

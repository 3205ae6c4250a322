"""`slipstream scale`: another number of generators, while a run is under way."""

import argparse
import secrets
import time

from slipstream.deploy.commands.options import add_run, chosen_run
from slipstream.deploy.terminal.console import make_console
from slipstream.deploy.terminal.observe import run_of_folder
from slipstream.wire.errors import ConfigError, PeerLostError
from slipstream.wire.files.run_folder import RUN_LOCK
from slipstream.wire.files.scale_request import (
    MOST_GENERATORS,
    ScaleRequest,
    read_answer,
    write_request,
)
from slipstream.wire.process.processes import is_locked
from slipstream.wire.settings.tenants import FOLDER

EXAMPLES = """examples:
  slipstream scale generators=6                start or end generators until there are six
  slipstream scale runs/demo generators=6      of a run that is not the newest
"""
ANSWER_S = 60.0  # in which the supervisor must answer
_POLL_S = 0.1
_POOL = "generators"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    add_run(parser)
    parser.add_argument("count", metavar="generators=N", help="how many there are to be")


def main(arguments: argparse.Namespace) -> int:
    """Ask the supervisor of a run for another number of generators, and wait for its answer.

    Generators that leave hand their work back first; the staleness bound holds throughout.

    Raises:
        ConfigError: there is no such run, or it cannot have so many.
        PeerLostError: nothing answers.
    """
    folder, wanted = chosen_run(arguments.folder), arguments.count
    pool, _, number = wanted.partition("=")
    is_short = number.isdecimal() and len(number) <= len(str(MOST_GENERATORS))
    if pool != _POOL or not is_short or not 1 <= int(number) <= MOST_GENERATORS:
        raise ConfigError(
            f"expected generators=N with N from 1 to {MOST_GENERATORS}, got {wanted:.100}"
        )
    if (folder / FOLDER).is_dir() or folder.absolute().parent.name == FOLDER:
        raise ConfigError(
            f"{folder} is of a pool, whose generators stay as many as they are: stop it, and "
            "resume it with another generators.count"
        )
    run_of_folder(folder)
    if not is_locked(folder / RUN_LOCK):
        raise ConfigError(f"{folder} is not running: set generators.count where it is started")
    request = ScaleRequest(id=secrets.token_hex(8), generators=int(number))
    write_request(folder, request)
    deadline = time.monotonic() + ANSWER_S
    while (answer := read_answer(folder, request.id)) is None:
        if time.monotonic() > deadline:
            raise PeerLostError(
                f"the supervisor of {folder} has not answered for {ANSWER_S:g} s; it takes the "
                "request when it can"
            )
        time.sleep(_POLL_S)
    if answer.refused:
        raise ConfigError(f"{folder} keeps {answer.generators} generators: {answer.refused}")
    make_console().print(f"{folder}: {answer.generators} generators from now on", soft_wrap=True)
    return 0

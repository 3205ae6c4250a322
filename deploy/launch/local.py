"""`slipstream run`: every role of a run on this host."""

import logging
import os
import shutil
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from slipstream.deploy.config import RunConfig, write_resolved
from slipstream.deploy.launch.plan import RolePlan, plan_generator, plan_roles
from slipstream.deploy.launch.session import Session, View, run_in_folder
from slipstream.deploy.launch.signals import Signals
from slipstream.deploy.launch.starters import LocalStarter
from slipstream.generators.sglang.process import remove_leftovers
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.run_folder import SETTINGS
from slipstream.wire.process.gpus import usable_gpus
from slipstream.wire.process.patience import END_AT_MOST, Patience, signs_of
from slipstream.wire.process.processes import is_locked
from slipstream.wire.settings.load import load_table
from slipstream.wire.settings.sections import RunSection, relay_lock, run_section

_log = logging.getLogger(__name__)
_POLL_S = 0.2
_RELAY_END_S = 10.0  # limit without a sign of life
_SCRATCH = "slipstream-"
_SOCKETS = "sockets"
_OWNER = "owner"  # file in a temporary folder: the run folder that it belongs to


def run_locally(config: RunConfig, view: View) -> int:
    """Run to the end; print one live view, then a table. Returns the exit code."""
    signals = Signals()
    with signals.handled():

        def session() -> Session:
            site = LocalSite(config)
            return Session(site.config, site, view, signals)

        return run_in_folder(config.run, session)


class LocalSite:
    """This host: a temporary folder with sockets, and the relay that outlives the learner."""

    def __init__(self, config: RunConfig) -> None:
        """Make the temporary folder; remove the folder of a killed run."""
        remove_scratch_of_killed_run(config.run)
        self.scratch = Path(tempfile.mkdtemp(prefix=_SCRATCH))
        (self.scratch / _OWNER).write_text(str(config.run.folder.resolve()))
        if not config.run.socket_dir:  # outside hidden scratch, for reward functions
            config = config.with_settings("run", socket_dir=str(self.scratch / _SOCKETS))
        self.config = config
        self.run = config.run
        self.starter = LocalStarter(self.scratch)

    def plans(self) -> list[RolePlan]:
        """Write the settings that every role reads; return the processes, the broker first."""
        resolved = self.run.folder / SETTINGS
        write_resolved(self.config, resolved)
        return plan_roles(self.config, resolved, gpus=usable_gpus())

    def generator(self, name: str) -> RolePlan:
        """Return an additional generator of the run."""
        resolved = self.run.folder / SETTINGS
        return plan_generator(self.config, resolved, name, gpus=usable_gpus())

    def broker_listens(self) -> bool:
        """True once the broker's socket is there."""
        return self.run.socket("broker").exists()

    def where_to_connect(self) -> str:
        """Return a line on how roles on other hosts join; empty if they cannot."""
        if not (listen := self.config.broker.broker.listen):
            return ""
        return (
            f"roles on other hosts connect to {listen}, with keys in "
            f"{self.config.broker.keys_folder} (slipstream keys make)"
        )

    def close(self) -> None:
        """End the relay, remove the temporary folder."""
        await_relay(self.run)
        shutil.rmtree(self.scratch, ignore_errors=True)


def await_relay(run: RunSection) -> None:
    """Wait for the weight relay to end; only the learner knows its process."""
    patience = Patience(
        "the weight relay to end", _RELAY_END_S, signs_of(lambda: _relays(run)), at_most=END_AT_MOST
    )
    while is_locked(relay_lock(run)):
        if patience.is_over():
            for holder in _relays(run):
                _log.warning("the weight relay %d %s and is killed", holder, patience.why)
                with suppress(ProcessLookupError):
                    os.kill(holder, signal.SIGKILL)
            return
        time.sleep(_POLL_S)


def _relays(run: RunSection) -> list[int]:
    """Return the process that holds the relay's lock; empty while it is unknown."""
    with suppress(OSError, ValueError):
        return [int(relay_lock(run).read_text())]
    return []


def remove_scratch_of_killed_run(run: RunSection) -> None:
    """Remove the temporary folder of a run that was killed in this run folder.

    No other process uses it: its owner is this run folder, which this process holds locked. The
    settings in a copy of a run folder name the temporary folder of the original.
    """
    resolved = run.folder / SETTINGS
    if not resolved.is_file():
        return
    try:
        sockets = Path(run_section(load_table(resolved)).socket_dir)
        owner = (sockets.parent / _OWNER).read_text()
    except (ConfigError, OSError, UnicodeDecodeError) as error:
        _log.info("no temporary folder of an earlier run is known: %s", error)
        return
    folder = sockets.parent
    if owner != str(run.folder.resolve()):
        return
    if sockets.name != _SOCKETS:  # a folder that the user chose
        return
    if folder.name.startswith(_SCRATCH) and folder.parent == Path(tempfile.gettempdir()):
        for left in folder.glob("*-*"):
            remove_leftovers(left)
        shutil.rmtree(folder, ignore_errors=True)

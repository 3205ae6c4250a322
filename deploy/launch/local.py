"""`slipstream run`: every role of a run on this host."""

import logging
import os
import shutil
import signal
import time
from contextlib import suppress

from slipstream.deploy.config import RunConfig, write_resolved
from slipstream.deploy.launch.plan import RolePlan, plan_generator, plan_roles
from slipstream.deploy.launch.scratch import own_folder, remove_folders_of_the_dead
from slipstream.deploy.launch.session import SessionView, run_in_folder
from slipstream.deploy.launch.starters import LocalStarter
from slipstream.wire.files.run_folder import SETTINGS
from slipstream.wire.gpus import usable_gpus
from slipstream.wire.process.patience import END_AT_MOST, Patience, signs_of
from slipstream.wire.process.processes import is_locked
from slipstream.wire.settings.sections import RunSection, relay_lock

_log = logging.getLogger(__name__)
_POLL_S = 0.2
_RELAY_END_S = 10.0  # limit without a sign of life


def run_locally(config: RunConfig, view: SessionView) -> int:
    """Run to the end; print one live view, then a table. Returns the exit code."""
    return run_in_folder(config.run, lambda: LocalSite(config), view)


class LocalSite:
    """This host: a temporary folder with sockets, and the relay that outlives the learner."""

    def __init__(self, config: RunConfig) -> None:
        """Make the temporary folder; remove those of killed runs."""
        remove_folders_of_the_dead()
        self.scratch = own_folder()
        if not config.run.socket_dir:  # outside hidden scratch, for reward functions
            config = config.with_settings("run", socket_dir=str(self.scratch / "sockets"))
        self.config = config
        self.run = config.run
        self._resolved = self.run.folder / SETTINGS
        self._starter = LocalStarter(self.scratch)
        self.start = self._starter.start

    def give_back(self, name: str) -> None:
        """Do nothing: this host reserves no place."""

    def plans(self) -> list[RolePlan]:
        """Write the settings that every role reads; return the processes, the broker first."""
        write_resolved(self.config, self._resolved)
        return plan_roles(self.config, self._resolved, gpus=usable_gpus())

    def generator(self, name: str) -> RolePlan:
        """Return an additional generator of the run."""
        return plan_generator(self.config, self._resolved, name, gpus=usable_gpus())

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
        self._starter.close()
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

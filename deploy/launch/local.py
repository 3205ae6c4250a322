"""`slipstream run`: every role of a run on this host, under one supervisor."""

import errno
import fcntl
import json
import logging
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.live import Live

from slipstream.broker.report.summary import replace_figures, summary_of
from slipstream.deploy.config import RunConfig, run_config, write_resolved
from slipstream.deploy.launch.plan import plan_roles
from slipstream.deploy.launch.supervise import Supervisor
from slipstream.deploy.terminal.figures import final_table
from slipstream.deploy.terminal.live import Show
from slipstream.deploy.terminal.observe import StatusWatcher
from slipstream.generators.sglang.process import remove_leftovers
from slipstream.wire.errors import ChildDiedError, ConfigError, PeerLostError, SlipstreamError
from slipstream.wire.files.checkpoints import (
    best_checkpoint,
    newest_checkpoint,
    read_checkpoint_info,
)
from slipstream.wire.files.run_folder import SETTINGS
from slipstream.wire.messages.status import RunStatus
from slipstream.wire.process.command_line import (
    EXIT_BAD_SETTINGS,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    disk_trouble,
)
from slipstream.wire.process.gpus import usable_gpus
from slipstream.wire.process.patience import END_AT_MOST, Patience, signs_of
from slipstream.wire.process.processes import is_locked, last_lines
from slipstream.wire.settings.load import load_table
from slipstream.wire.settings.sections import RunSection, relay_lock, run_section

_log = logging.getLogger(__name__)
_POLL_S = 0.2
_BROKER_START_S = 120.0  # without a sign of life, as the next one
_RELAY_END_S = 10.0
_WITHOUT_BROKER_S = 5.0  # for roles to end where the broker is gone for good
_REFUSED = "refused: "
_SCRATCH = "slipstream-"
_SOCKETS = "sockets"
_OWNER = "owner"  # in a temporary folder: the run folder that it belongs to


class _StopRequestedError(BaseException):
    """SIGINT or SIGTERM arrived; code that only shows a run does not catch it."""


class _Signals:
    """SIGINT and SIGTERM from the start of a run to the end of its clean-up.

    Each is handled once, where it may be: not while a child is forked, and not in the clean-up.
    """

    def __init__(self) -> None:
        self._received: list[str] = []
        self._raises = False
        self._is_held: Callable[[], bool] = lambda: False

    def held_while(self, is_held: Callable[[], bool]) -> None:
        """Raise later what arrives while this is true."""
        self._is_held = is_held

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handle both in this block."""
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self._take) for number in numbers}
        try:
            yield
        finally:
            for number, old in before.items():
                signal.signal(number, old)

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Raise what arrives in this block, or arrived between two of them.

        Raises:
            _StopRequestedError: a signal arrived.
        """
        self._raises = True
        try:
            self.raise_received()
            yield
        finally:
            self._raises = False

    def forget(self) -> None:
        """Forget what has arrived so far: one Ctrl-C may reach this process twice."""
        self._received.clear()

    def raise_received(self) -> None:
        """Raise if a signal has arrived and may be raised now."""
        if self._raises and self._received and not self._is_held():
            self._raises = False  # once: the next one belongs to the next block
            raise _StopRequestedError(self._received.pop(0))

    def _take(self, signum: int, _frame: object) -> None:
        self._received.append(signal.Signals(signum).name)
        self.raise_received()


def run_locally(config: RunConfig, console: Console) -> int:
    """Run to the end; print one live view, then a table. Returns the exit code."""
    signals = _Signals()
    with signals.handled():
        return _run_locally(config, console, signals)


def _run_locally(config: RunConfig, console: Console, signals: _Signals) -> int:
    run = config.run
    lock = _lock(run)
    _remove_scratch_of_killed_run(run)
    scratch = Path(tempfile.mkdtemp(prefix=_SCRATCH))
    (scratch / _OWNER).write_text(str(run.folder.resolve()))
    if not run.socket_dir:  # not scratch itself: reward functions use it, this one is hidden
        sockets = {"socket_dir": str(scratch / _SOCKETS)}
        config = run_config({**config.table, "run": {**config.table.get("run", {}), **sockets}})
    supervisor = Supervisor(
        logs=run.logs,
        scratch=scratch,
        max_restarts=config.deploy.max_restarts,
        window_s=config.deploy.restart_window_s,
        backoff_s=config.deploy.restart_backoff_s,
        stop_timeout_s=config.deploy.stop_timeout_s,
    )
    signals.held_while(lambda: supervisor.is_forking)
    supervisor.on_forked = signals.raise_received
    reason, code = "failed: by a fault of this program", EXIT_FAILED  # the learner saves then, too
    watcher = StatusWatcher(config.run)
    try:
        with signals.raising():
            resolved = run.folder / SETTINGS
            write_resolved(config, resolved)
            _run(config, supervisor, watcher, console, resolved)
            reason, code = "finished", 0
    except _StopRequestedError as error:
        reason, code = f"stopped: {error}", EXIT_INTERRUPTED
    except ConfigError as error:
        reason, code = f"{_REFUSED}{error}", EXIT_BAD_SETTINGS
    except SlipstreamError as error:
        reason, code = f"failed: {error}", EXIT_FAILED
        if shutil.disk_usage(run.folder).free == 0:
            full = os.strerror(errno.ENOSPC)
            reason, code = f"{_REFUSED}{full}: {run.folder} (run.dir)", EXIT_BAD_SETTINGS
    except OSError as error:
        if (trouble := disk_trouble(error)) is None:
            raise
        reason, code = f"{_REFUSED}{trouble}", EXIT_BAD_SETTINGS
    finally:
        if code:
            _let_learner_save(config, supervisor, watcher, console, signals)
        # Signals that arrive now change nothing: deploy.stop_timeout_s bounds the clean-up.
        _end_roles(supervisor, watcher, console, reason if code else "")
        _await_relay(config.run)
        shutil.rmtree(scratch, ignore_errors=True)
        lock.close()
    _finish(run, watcher.newest, reason, console)
    return code


def _end_roles(
    supervisor: Supervisor, watcher: StatusWatcher, console: Console, reason: str
) -> None:
    """End all processes, the broker last; ``reason`` is empty if the run is complete."""
    watcher.close()
    roles = [name for name in supervisor.children if name != "broker"]
    if supervisor.runs("broker"):
        supervisor.stop(roles)
    else:  # they would only wait for it
        if reason and supervisor.children:
            console.print(reason, style="bold red", highlight=False, soft_wrap=True)
        supervisor.stop(roles, timeout_s=_WITHOUT_BROKER_S, at_most=1)
    supervisor.stop(["broker"])
    supervisor.let_go()


def _await_relay(run: RunSection) -> None:
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
    """Return the process that holds the place of the relay, or nothing while it is unknown."""
    with suppress(OSError, ValueError):
        return [int(relay_lock(run).read_text())]
    return []


def _let_learner_save(
    config: RunConfig,
    supervisor: Supervisor,
    watcher: StatusWatcher,
    console: Console,
    signals: _Signals,
) -> None:
    """End the learner in order while the broker still answers; another signal ends it at once."""
    if not config.learner.checkpoint.on_stop or not supervisor.runs("learner"):
        return
    status = watcher.newest
    if not supervisor.runs("broker") or status is None or status.steps == 0:
        return
    signals.forget()
    console.print("stopping: the learner saves a checkpoint (Ctrl-C ends it at once)")
    with suppress(_StopRequestedError), signals.raising():
        supervisor.stop(["learner"], timeout_s=config.deploy.save_timeout_s)
    newest = newest_checkpoint(config.run.folder)
    step = read_checkpoint_info(newest).step if newest is not None else 0
    if step < status.steps:
        console.print(
            f"no checkpoint of step {status.steps} was saved: steps after {step} are lost: see "
            f"{config.run.logs / 'learner.log'}",
            style="bold red",
            soft_wrap=True,
        )


def _run(
    config: RunConfig,
    supervisor: Supervisor,
    watcher: StatusWatcher,
    console: Console,
    resolved: Path,
) -> None:
    run = config.run
    console.print(f"run {run.name}: settings, logs and results in {run.folder}")
    broker, *others = plan_roles(config, resolved, gpus=usable_gpus())
    supervisor.start(broker)
    patience = _patience_with_broker(supervisor, console)
    while not run.socket("broker").exists():
        supervisor.check()
        child = supervisor.children["broker"]
        if child.finished or patience.is_over():
            why = "ended" if child.finished else patience.why
            last = last_lines(child.log_file)
            raise ChildDiedError(f"the broker did not start: it {why}; {child.log_file}:\n{last}")
        time.sleep(_POLL_S)
    for plan in others:
        supervisor.start(plan)
    if listen := config.broker.broker.listen:
        console.print(
            f"roles on other hosts connect to {listen}, with keys in {config.broker.keys_folder} "
            "(slipstream keys make)",
            soft_wrap=True,
        )
    watcher.start()
    names = [plan.name for plan in others]
    started = time.monotonic()
    ended: set[str] = set()
    live = Live(console=console, auto_refresh=False, transient=True)
    show = Show(console, run, live if console.is_terminal else None)
    with live if console.is_terminal else nullcontext():
        while len(ended) < len(names):
            supervisor.check()
            for name in names:
                if name not in ended and supervisor.finished([name]):
                    ended.add(name)
                    left = [n for n in names if _kind(n) == _kind(name) and n not in ended]
                    if not left and not supervisor.left_out(name):
                        _require_complete(supervisor, watcher, name, console)
            limit = config.deploy.time_limit_s
            if limit and time.monotonic() - started > limit:
                raise ChildDiedError(f"the run took longer than deploy.time_limit_s = {limit:.0f}")
            if watcher.newest is not None:
                show(watcher.newest, watcher.trouble)
            time.sleep(_POLL_S)


def _kind(name: str) -> str:
    return name.rstrip("0123456789")


def _require_complete(
    supervisor: Supervisor, watcher: StatusWatcher, name: str, console: Console
) -> None:
    """The last process of a role may end only when the run is over; others may leave."""
    patience = _patience_with_broker(supervisor, console)
    ended_s = time.monotonic()
    while watcher.asked_s < ended_s:
        if patience.is_over():
            raise PeerLostError(watcher.error or f"the broker did not answer: it {patience.why}")
        supervisor.check()  # the broker may be on its way back
        time.sleep(_POLL_S)
    status = watcher.newest
    if status is None or not status.finished:
        steps = f"{status.steps} of {status.total_steps} steps" if status else "an unknown step"
        raise ChildDiedError(f"{name} ended before the run was complete, at {steps}")


def _lock(run: RunSection) -> TextIO:
    """Make the run's folder ours; the kernel lets go of it when this process ends.

    Raises:
        ConfigError: another process runs in it, or it cannot be written.
    """
    try:
        run.logs.mkdir(parents=True, exist_ok=True)
        lock = (run.folder / "run.lock").open("a+")
    except OSError as error:
        raise ConfigError(
            f"cannot write the run folder {run.folder} (run.dir): {error.strerror}"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise ConfigError(f"another process runs {run.folder}") from error
    return lock


def _remove_scratch_of_killed_run(run: RunSection) -> None:
    """Remove the temporary folder of a run that was killed in this run folder.

    No other process uses it: we hold the lock of the run folder, of which it has the name. In a
    copy of a run folder the settings name the temporary folder of the original.
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
    if sockets.name != _SOCKETS:  # the user's own
        return
    if folder.name.startswith(_SCRATCH) and folder.parent == Path(tempfile.gettempdir()):
        for left in folder.glob("*-*"):
            remove_leftovers(left)
        shutil.rmtree(folder, ignore_errors=True)


def _patience_with_broker(supervisor: Supervisor, console: Console) -> Patience:
    def report(words: str) -> None:
        console.print(words, soft_wrap=True, highlight=False)

    signs = signs_of(lambda: supervisor.pids("broker"), supervisor.children["broker"].log_file)
    return Patience("the broker to answer", _BROKER_START_S, signs, log=report)


def _finish(run: RunSection, newest: RunStatus | None, reason: str, console: Console) -> None:
    """Write the run's outcome into its summary, and show it."""
    path = run.summary_file
    outcome = reason.splitlines()[0]
    try:
        figures = json.loads(path.read_text()) if path.exists() else {}
        if not figures and newest is not None:
            figures = summary_of(newest)
        replace_figures(path, figures | {"outcome": outcome})
    except OSError as error:
        console.print(f"no summary was written: {error}", style="red")
    if outcome.startswith(_REFUSED):
        console.print(reason, style="bold red", highlight=False, soft_wrap=True)
        return
    if newest is not None:
        console.print(final_table(newest, outcome=outcome))
    checkpoint = newest_checkpoint(run.folder)
    if checkpoint is not None:
        best = best_checkpoint(run.folder)
        also = f", best {best}" if best not in {None, checkpoint} else ""
        hint = "" if reason == "finished" else "; resume from it with --resume auto"
        console.print(f"checkpoint {checkpoint}{also}{hint}", soft_wrap=True)
    if reason != "finished":
        console.print(reason, style="bold red", highlight=False, soft_wrap=True)
    console.print(f"figures in {path}")

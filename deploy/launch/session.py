"""The life of a run under one supervisor: start, watch, scale, end cleanly, show the outcome.

A `RunSite` knows where the processes run: this host (`local.py`) or a Ray cluster
(`cluster/ray_site.py`).
"""

import errno
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from rich.console import Console
from typing_extensions import override

from slipstream.broker.report.summary import replace_figures, summary_of
from slipstream.deploy.config import RunConfig
from slipstream.deploy.launch.observer import StatusWatcher
from slipstream.deploy.launch.plan import RolePlan, kind_of
from slipstream.deploy.launch.rotation import rotate
from slipstream.deploy.launch.scaling import GeneratorBounds, changes, count_by_load, waited_between
from slipstream.deploy.launch.signals import Signals, StopRequestedError
from slipstream.deploy.launch.starters import RoleProcess
from slipstream.deploy.launch.supervise import Supervisor
from slipstream.wire.errors import ChildDiedError, ConfigError, PeerLostError, SlipstreamError
from slipstream.wire.files.checkpoints import (
    best_checkpoint,
    newest_checkpoint,
    read_checkpoint_info,
    read_upload_state,
)
from slipstream.wire.files.run_folder import RUN_LOCK
from slipstream.wire.files.scale_request import ScaleAnswer, take_request, write_answer
from slipstream.wire.messages.status import RunStatus
from slipstream.wire.process.command_line import EXIT_BAD_SETTINGS, EXIT_FAILED, disk_trouble
from slipstream.wire.process.patience import Patience
from slipstream.wire.process.processes import last_lines, locked
from slipstream.wire.settings.sections import RunSection

_POLL_S = 0.2
_BROKER_START_S = 120.0  # limit without a sign of life
_WITHOUT_BROKER_S = 5.0  # time for roles to end after the broker is lost
_ROTATE_EVERY_S = 30.0


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """How a run ended."""

    kind: Literal["finished", "stopped", "refused", "failed"]
    reason: str  # empty if it is finished
    code: int  # exit code

    @override
    def __str__(self) -> str:
        return f"{self.kind}: {self.reason}" if self.reason else self.kind


def outcome_of(
    error: StopRequestedError | SlipstreamError | OSError, folder: Path, *, has_room: bool
) -> RunOutcome:
    """Return how an error ends the run in a folder, whose disk has room or is full.

    Raises:
        OSError: the error itself, if it is a fault of this program.
    """
    match error:
        case StopRequestedError():
            return RunOutcome("stopped", str(error), error.exit_code)
        case ConfigError():
            reason = str(error)
        case OSError():
            if (trouble := disk_trouble(error)) is None:
                raise error
            reason = str(trouble)
        case _ if has_room:
            return RunOutcome("failed", str(error), EXIT_FAILED)
        case _:
            reason = f"{os.strerror(errno.ENOSPC)}: {folder} (run.dir)"
    return RunOutcome("refused", reason, EXIT_BAD_SETTINGS)


def has_room(folder: Path) -> bool:
    """True unless the disk of a folder is full."""
    try:
        return shutil.disk_usage(folder).free > 0
    except OSError:  # nothing is known of it
        return True


class RunSite(Protocol):
    """Place of a run's processes."""

    @property
    def config(self) -> RunConfig:
        """The run, as its processes there read it."""

    @property
    def run(self) -> RunSection:
        """[run], as this process reads it to watch the run."""

    def plans(self) -> list[RolePlan]:
        """Return the processes in the order of their start; the broker comes first."""

    def generator(self, name: str) -> RolePlan:
        """Return an additional generator of the run.

        Raises:
            ConfigError: no place is free.
        """

    def start(self, plan: RolePlan, arguments: Sequence[str], log_file: Path) -> RoleProcess:
        """Start a role with additional arguments; append its output to the log."""

    def give_back(self, name: str) -> None:
        """Free the place of a role that has ended and will not restart."""

    def broker_listens(self) -> bool:
        """True once the broker can be connected to."""

    def where_to_connect(self) -> str:
        """Return a line on how roles started by hand join; empty if they cannot."""

    def close(self) -> None:
        """End what outlives the roles, and clean up."""


class SessionView(Protocol):
    """A picture of the run for its user."""

    @property
    def console(self) -> Console:
        """Console for additional lines."""

    def following(self, run: RunSection) -> AbstractContextManager[Callable[[StatusWatcher], None]]:
        """Return a function that draws the newest state when it is time to."""

    def show_figures(self, status: RunStatus, outcome: str) -> None:
        """Show the figures of a run that has ended."""


class RunSession:
    """One run, from its first process to its outcome."""

    def __init__(
        self, site: RunSite, view: SessionView, signals: Signals, watcher: StatusWatcher
    ) -> None:
        self._config = config = site.config
        self._site = site
        self._view = view
        self._console = view.console
        self._signals = signals
        deploy = config.deploy
        self._supervisor = Supervisor.of(
            deploy, config.run.logs, site.start, signals.held, give_back=site.give_back
        )
        self._watcher = watcher
        self._ended: set[str] = set()  # processes that will not restart
        self._bounds = GeneratorBounds(deploy.min_generators, deploy.max_generators)
        self._rotates_s = 0.0  # time of the next look at the logs
        self._window: tuple[float, RunStatus] | None = None  # start, and the run then

    def run(self) -> RunOutcome:
        """Run to the end; show and return the outcome."""
        # outcome if run() itself fails; the learner saves then
        outcome = RunOutcome("failed", "by a fault of this program", EXIT_FAILED)
        try:
            with self._signals.raising():
                self._run()
                outcome = RunOutcome("finished", "", 0)
        except (StopRequestedError, SlipstreamError, OSError) as error:
            folder = self._config.run.folder
            outcome = outcome_of(error, folder, has_room=has_room(folder))
        finally:
            if outcome.code:
                self._let_learner_save()
            # Signals that arrive now change nothing: deploy.stop_timeout_s bounds the clean-up.
            self._end_roles(outcome)
            self._site.close()
        finish(self._config.run, self._watcher.newest, outcome, self._view)
        return outcome

    @property
    def has_stepped(self) -> bool:
        """True once the learner has visibly made a step."""
        return self._watcher.newest is not None and self._watcher.newest.steps > 0

    def _end_roles(self, outcome: RunOutcome) -> None:
        """End all processes, the broker last."""
        supervisor = self._supervisor
        self._watcher.close()
        roles = [name for name in supervisor.children if name != "broker"]
        if supervisor.runs("broker"):
            supervisor.stop(roles)
        else:  # roles would only wait for the broker
            if outcome.code and supervisor.children:
                print_trouble(self._console, outcome)
            supervisor.stop(roles, timeout_s=_WITHOUT_BROKER_S, at_most=1)
        supervisor.stop(["broker"])

    def _let_learner_save(self) -> None:
        """End the learner cleanly while the broker answers; a second signal cuts it off."""
        config, supervisor = self._config, self._supervisor
        status, runs = self._watcher.newest, supervisor.runs
        can_save = config.learner.checkpoint.on_stop and runs("learner") and runs("broker")
        if not can_save or status is None or status.steps == 0:
            return
        self._signals.forget()
        self._console.print("stopping: the learner saves a checkpoint (Ctrl-C ends it at once)")
        with suppress(StopRequestedError), self._signals.raising():
            supervisor.stop(["learner"], timeout_s=config.deploy.save_timeout_s)
        newest = newest_checkpoint(config.run.folder)
        step = read_checkpoint_info(newest).step if newest is not None else 0
        if step < status.steps:
            print_trouble(
                self._console,
                f"no checkpoint of step {status.steps} was saved: steps after {step} are lost: see "
                f"{config.run.logs / 'learner.log'}",
            )

    def _run(self) -> None:
        run, supervisor = self._config.run, self._supervisor
        self._console.print(f"run {run.name}: settings, logs and results in {run.folder}")
        take_request(run.folder)  # drop an outdated request, unseen by an earlier process
        broker, *others = self._site.plans()
        supervisor.start(broker)
        self._await_broker()
        for plan in others:
            supervisor.start(plan)
        if line := self._site.where_to_connect():
            self._console.print(line, soft_wrap=True)
        self._watcher.start(self._site.run)
        self._watch()

    def _await_broker(self) -> None:
        patience = self._patience_with_broker()
        while not self._site.broker_listens():
            self._supervisor.check()
            if patience.is_over():
                log = self._supervisor.children["broker"].log_file
                raise ChildDiedError(
                    f"the broker did not start: it {patience.why}; {log}:\n{last_lines(log)}"
                )
            time.sleep(_POLL_S)

    def _watch(self) -> None:
        """Watch until every role except the broker has ended cleanly."""
        supervisor = self._supervisor
        limit = self._config.deploy.time_limit_s
        started = time.monotonic()
        with self._view.following(self._site.run) as show:
            while len(self._ended) < len(self._names()):
                supervisor.check()
                if time.monotonic() >= self._rotates_s:
                    self._rotates_s = time.monotonic() + _ROTATE_EVERY_S
                    rotate(self._config.run.logs, self._config.broker.logging)
                self._scale()
                self._record_ended()
                if limit and time.monotonic() - started > limit:
                    raise ChildDiedError(
                        f"the run took longer than deploy.time_limit_s = {limit:g}"
                    )
                show(self._watcher)
                time.sleep(_POLL_S)

    def _record_ended(self) -> None:
        names = self._names()
        for name in names:
            if name not in self._ended and self._supervisor.finished([name]):
                self._ended.add(name)
                same = [other for other in names if kind_of(other) == kind_of(name)]
                if self._ended.issuperset(same) and not self._supervisor.left_out(name):
                    self._require_complete(name)

    def _scale(self) -> None:
        """Start or end generators, as a request or the load asks for."""
        folder = self._config.run.folder
        if request := take_request(folder):
            refused = self._scale_to(request.generators, "as requested")
            count = sum(self._generators().values())
            write_answer(folder, ScaleAnswer(id=request.id, generators=count, refused=refused))
        status, now_s = self._watcher.newest, time.monotonic()
        if not self._bounds.largest or status is None or status.finished:
            return
        self._window = self._window or (now_s, status)
        began_s, before = self._window
        if now_s - began_s < self._config.deploy.scale_every_s:
            return
        self._window = (now_s, status)
        if (waited := waited_between(before, status)) is None:
            return
        count = sum(self._generators().values())
        wanted = count_by_load(count, waited, self._bounds)
        if wanted != count:
            why = f"the learner waited {waited.learner:.0%}, the generators {waited.generators:.0%}"
            self._scale_to(wanted, why)

    def _scale_to(self, count: int, why: str) -> str:
        """Change the number of generators to ``count``; return the reason if it is not possible."""
        if count not in self._bounds:
            return (
                f"{count} is not between deploy.min_generators = {self._bounds.smallest} and "
                f"deploy.max_generators = {self._bounds.largest}"
            )
        present = self._generators()
        started, leaving = changes(present, count)
        try:
            plans = [self._site.generator(name) for name in started]
        except ConfigError as error:
            return str(error)
        for plan in plans:
            self._ended.discard(plan.name)
            self._supervisor.start(plan)
        for name in leaving:
            self._supervisor.leave(name)
        self._console.print(
            f"generators: {sum(present.values())} -> {count}, {why}", highlight=False
        )
        return ""

    def _generators(self) -> dict[str, bool]:
        """Return the generators that have not ended; True for those that stay."""
        return {
            name: child.leaving is None
            for name, child in self._supervisor.children.items()
            if kind_of(name) == "generator" and not child.finished
        }

    def _names(self) -> Sequence[str]:
        return [name for name in self._supervisor.children if name != "broker"]

    def _require_complete(self, name: str) -> None:
        """Refuse the end of a role's last process before the run is over; others may leave."""
        watcher, patience = self._watcher, self._patience_with_broker()
        ended_s = time.monotonic()
        while watcher.asked_s < ended_s:
            if patience.is_over():
                raise PeerLostError(
                    watcher.error or f"the broker did not answer: it {patience.why}"
                )
            self._supervisor.check()  # the broker may be restarting
            time.sleep(_POLL_S)
        status = watcher.newest
        if status is None or not status.finished:
            steps = f"{status.steps} of {status.total_steps} steps" if status else "an unknown step"
            raise ChildDiedError(f"{name} ended before the run was complete, at {steps}")

    def _patience_with_broker(self) -> Patience:
        def report(words: str) -> None:
            self._console.print(words, soft_wrap=True, highlight=False)

        broker = self._supervisor.children["broker"]
        signs = lambda: broker.process.signs()  # noqa: E731 it may have restarted
        return Patience("the broker to answer", _BROKER_START_S, signs, log=report)


def hold_folder(run: RunSection, held: ExitStack, doing: str) -> None:
    """Make a run's folder with its logs, and lock it until ``held`` is closed.

    Raises:
        ConfigError: another process holds the folder, or it cannot be written.
    """
    try:
        run.logs.mkdir(parents=True, exist_ok=True)
        held.enter_context(locked(run.folder / RUN_LOCK, doing))
    except OSError as error:
        raise ConfigError(
            f"cannot write the run folder {run.folder} (run.dir): {error.strerror}"
        ) from error


def run_in_folder(
    run: RunSection,
    make_site: Callable[[], RunSite],
    view: SessionView,
    watcher: StatusWatcher | None = None,
) -> int:
    """Run to the end in the run's folder, locked meanwhile; return the exit code.

    A folder created by a refused start is removed, so the next try can use the name.

    Raises:
        ConfigError: another process holds the folder, or it cannot be written.
    """
    is_new, signals = not run.folder.exists(), Signals()
    with ExitStack() as held:
        held.enter_context(signals.handled())
        hold_folder(run, held, f"runs {run.folder}")
        session = RunSession(make_site(), view, signals, watcher or StatusWatcher())
        outcome = session.run()
        if outcome.kind == "refused" and is_new and not session.has_stepped:
            shutil.rmtree(run.folder, ignore_errors=True)
        return outcome.code


def missing_upload(checkpoint: Path) -> str:
    """Return a line if the newest checkpoint should have been uploaded but was not; else empty."""
    state = read_upload_state(checkpoint.parent)
    if state is None or state.step == read_checkpoint_info(checkpoint).step:
        return ""
    why = f": {state.error}" if state.error else ""
    return f"{checkpoint.name} is not in {state.url} (checkpoint.upload){why}"


def finish(
    run: RunSection, newest: RunStatus | None, outcome: RunOutcome, view: SessionView
) -> None:
    """Write the run's outcome into its summary, and show it."""
    console, path = view.console, run.summary_file
    line = str(outcome).splitlines()[0]
    try:
        figures = json.loads(path.read_text()) if path.exists() else {}
        if not figures and newest is not None:
            figures = summary_of(newest)
        replace_figures(path, figures | {"outcome": line})
    except OSError as error:
        console.print(f"no summary was written: {error}", style="red")
    if outcome.kind == "refused":
        print_trouble(console, outcome)
        return
    if newest is not None:
        view.show_figures(newest, line)
    checkpoint = newest_checkpoint(run.folder)
    if checkpoint is not None:
        best = best_checkpoint(run.folder)
        also = f", best {best}" if best not in {None, checkpoint} else ""
        hint = "" if outcome.kind == "finished" else "; resume from it with --resume auto"
        console.print(f"checkpoint {checkpoint}{also}{hint}", soft_wrap=True)
        if late := missing_upload(checkpoint):
            print_trouble(console, late)
    if outcome.kind != "finished":
        print_trouble(console, outcome)
    console.print(f"figures in {path}")


def print_trouble(console: Console, trouble: object) -> None:
    """Print what the user must see."""
    console.print(str(trouble), style="bold red", highlight=False, soft_wrap=True)

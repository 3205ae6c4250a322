"""Starts, watches, restarts and ends the processes of a run; kills nothing but its own."""

import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from slipstream.deploy.launch.plan import RolePlan
from slipstream.generators.sglang.process import remove_leftovers
from slipstream.wire.errors import ChildDiedError, ConfigError
from slipstream.wire.process.command_line import EXIT_BAD_SETTINGS, EXIT_SUPERSEDED
from slipstream.wire.process.last_words import LAST_WORDS_VARIABLE, LastWords
from slipstream.wire.process.patience import END_AT_MOST, Patience, signs_of
from slipstream.wire.process.processes import LIFELINE_VARIABLE, bound_to_me, last_lines

_log = logging.getLogger(__name__)
_POLL_S = 0.05


@dataclass(slots=True)
class Child:
    """One role, over all its incarnations."""

    plan: RolePlan
    log_file: Path
    process: "subprocess.Popen[bytes] | None" = None
    last_words: LastWords | None = None  # of the process
    failed_at_s: list[float] = field(default_factory=list)  # within the window
    num_starts: int = 0
    restart_at_s: float | None = None
    finished: bool = False
    is_left_out: bool = False  # another process has its name, and its place


@dataclass(slots=True)
class Supervisor:
    """Owns the children of one run. Call it from the main thread."""

    logs: Path
    scratch: Path  # TMPDIR of all children
    max_restarts: int  # of one role within the window
    window_s: float
    backoff_s: float
    stop_timeout_s: float
    now: Callable[[], float] = time.monotonic
    children: dict[str, Child] = field(default_factory=dict)
    is_forking: bool = False
    """True while no signal handler may raise: logging would stay locked, and a child be lost."""
    on_forked: Callable[[], None] = lambda: None
    """Called after a child was started: a handler may have waited."""
    _lifeline: tuple[int, int] = field(default_factory=os.pipe)

    def start(self, plan: RolePlan) -> None:
        """Start a role."""
        child = Child(plan, self.logs / f"{plan.name}.log")
        self.children[plan.name] = child
        self._spawn(child)

    def check(self) -> None:
        """Record ended roles; restart failed ones.

        Raises:
            ChildDiedError: a role failed too often.
        """
        for child in self.children.values():
            if child.restart_at_s is not None:
                if self.now() >= child.restart_at_s:
                    child.restart_at_s = None
                    self._spawn(child)
            elif child.process is not None and not child.finished:
                code = child.process.poll()
                if code == EXIT_SUPERSEDED and child.plan.is_one_of_many:
                    child.is_left_out = child.finished = True
                    _log.warning(
                        "%s ends: another process connected under its name and replaced it "
                        "(start-generator and start-reward-worker take --name)",
                        child.plan.name,
                    )
                elif code == 0 and not child.plan.serves_others:
                    child.finished = True
                elif code is not None:
                    self._failed(child, code)

    def runs(self, name: str) -> bool:
        """True if a role was started and has not ended."""
        child = self.children.get(name)
        return child is not None and child.process is not None and child.process.poll() is None

    def pids(self, name: str) -> list[int]:
        """Return the process id of a role, or nothing between two processes."""
        return _pids(self.children[name])

    def finished(self, names: Iterable[str]) -> bool:
        """True if all these roles ended in order, or were left out."""
        return all(self.children[name].finished for name in names)

    def left_out(self, name: str) -> bool:
        """True if another process has the name of a role."""
        return self.children[name].is_left_out

    def stop(
        self,
        names: Iterable[str] | None = None,
        *,
        timeout_s: float | None = None,
        at_most: float = END_AT_MOST,
    ) -> None:
        """End roles: SIGTERM, and SIGKILL if that has no effect. Nothing is left behind.

        Args:
            names: of the roles; None is all.
            timeout_s: without a sign of life; None is deploy.stop_timeout_s.
            at_most: times that, whatever they do.
        """
        chosen = list(self.children) if names is None else names
        children = [self.children[name] for name in chosen if name in self.children]
        running = [c for c in children if c.process is not None and c.process.poll() is None]
        for child in children:
            child.restart_at_s = None
        for child in running:
            _signal(child, signal.SIGTERM)
        limit_s = self.stop_timeout_s if timeout_s is None else timeout_s
        patience: dict[str, Patience] = {}
        for child in running:
            name = child.plan.name
            signs = signs_of(partial(_pids, child), child.log_file)
            patience[name] = Patience(
                f"{name} to end", limit_s, signs, at_most=at_most, log=_log.warning, now=self.now
            )
        while running:
            running = [c for c in running if c.process is not None and c.process.poll() is None]
            for child in running:
                name = child.plan.name
                if name in patience and patience[name].is_over():
                    _log.warning("%s %s after SIGTERM and is killed", name, patience[name].why)
                    _signal(child, signal.SIGKILL)
                    del patience[name]
            time.sleep(_POLL_S)
        for child in children:
            self._sweep(child)

    def let_go(self) -> None:
        """Cut the lifeline of processes that outlive a role; so does the end of this process."""
        for descriptor in self._lifeline:
            os.close(descriptor)
        for child in self.children.values():
            if child.last_words is not None:
                child.last_words.close()
                child.last_words = None

    def _spawn(self, child: Child) -> None:
        environment = dict(os.environ)  # noqa: TID251 handed on to children
        lifeline, _ = self._lifeline
        environment |= {"TMPDIR": str(self.scratch), LIFELINE_VARIABLE: str(lifeline)}
        environment |= child.plan.environment
        if child.last_words is not None:
            child.last_words.close()
        words = child.last_words = LastWords()
        environment[LAST_WORDS_VARIABLE] = str(words.descriptor)
        again = child.plan.restart_arguments if child.num_starts else ()
        child.num_starts += 1
        self.is_forking = True
        try:
            with child.log_file.open("ab") as log:
                child.process = subprocess.Popen(  # noqa: S603 our own programs
                    [*child.plan.command, *again],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    preexec_fn=bound_to_me(child.plan.cores),
                    process_group=0,
                    pass_fds=[lifeline, words.descriptor],
                )
        finally:
            self.is_forking = False
        _log.info("%s is process %d", child.plan.name, child.process.pid)
        self.on_forked()

    def _failed(self, child: Child, code: int) -> None:
        self._sweep(child)
        if code == EXIT_BAD_SETTINGS:
            words = child.last_words.read() if child.last_words is not None else ""
            reason = words or last_lines(child.log_file, 1).strip()
            raise ConfigError(f"{child.plan.name}: {reason}")
        now = self.now()
        child.failed_at_s = [at for at in child.failed_at_s if at > now - self.window_s] + [now]
        failures = len(child.failed_at_s)
        if failures > self.max_restarts or code == EXIT_SUPERSEDED:
            often = "" if failures == 1 else f" (failure {failures})"
            raise ChildDiedError(
                f"{child.plan.name} {_how(code)}{often}; {child.log_file} ends with:\n"
                f"{last_lines(child.log_file)}"
            )
        delay = self.backoff_s * 2 ** (failures - 1)
        _log.warning("%s %s; restarting it in %.1f s", child.plan.name, _how(code), delay)
        child.restart_at_s = now + delay

    def _sweep(self, child: Child) -> None:
        """Remove the files that a killed role could not remove itself."""
        for path in self.scratch.glob(f"{child.plan.name}-*"):
            remove_leftovers(path)


def _pids(child: Child) -> list[int]:
    return [] if child.process is None else [child.process.pid]


def _how(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with code {code}"


def _signal(child: Child, signum: signal.Signals) -> None:
    if child.process is not None:
        try:
            child.process.send_signal(signum)
        except ProcessLookupError:
            return

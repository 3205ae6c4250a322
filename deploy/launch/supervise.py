"""Starts, watches, restarts and ends the processes of a run; kills only its own children."""

import logging
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from slipstream.deploy.config import DeploySection
from slipstream.deploy.launch.plan import RolePlan
from slipstream.deploy.launch.starters import RoleProcess
from slipstream.wire.errors import ChildDiedError, ConfigError
from slipstream.wire.process.command_line import EXIT_BAD_SETTINGS, EXIT_SUPERSEDED
from slipstream.wire.process.patience import END_AT_MOST, Patience
from slipstream.wire.process.processes import last_lines

_log = logging.getLogger(__name__)
_POLL_S = 0.05


@dataclass(slots=True)
class Child:
    """One role, over all its incarnations."""

    plan: RolePlan
    log_file: Path
    process: RoleProcess
    failed_at_s: list[float] = field(default_factory=list)  # within the window
    num_starts: int = 1
    restart_at_s: float | None = None
    finished: bool = False
    is_left_out: bool = False  # another process took its name and its place
    leaving: Patience | None = None  # set once it was asked to leave for good

    @property
    def is_running(self) -> bool:
        """True if the process has not ended."""
        return self.process.poll() is None


@dataclass(slots=True)
class Supervisor:
    """Owns the children of one run. Call it from the main thread."""

    logs: Path
    start_process: Callable[[RolePlan, Sequence[str], Path], RoleProcess]
    """Starts a role with additional arguments; appends its output to the log."""
    max_restarts: int  # limit for one role within the window
    window_s: float
    backoff_s: float
    stop_timeout_s: float
    give_back: Callable[[str], None] = lambda _name: None
    """Frees the place of a role that has ended and will not restart."""
    now: Callable[[], float] = time.monotonic
    children: dict[str, Child] = field(default_factory=dict)
    forking: Callable[[], AbstractContextManager[None]] = nullcontext
    """Block in which no signal handler raises: logging would stay locked, and a child be lost."""

    @classmethod
    def of(
        cls,
        deploy: DeploySection,
        logs: Path,
        start_process: Callable[[RolePlan, Sequence[str], Path], RoleProcess],
        forking: Callable[[], AbstractContextManager[None]],
        *,
        give_back: Callable[[str], None] = lambda _name: None,
    ) -> Self:
        """Return a supervisor with the limits of the settings."""
        return cls(
            logs=logs,
            start_process=start_process,
            max_restarts=deploy.max_restarts,
            window_s=deploy.restart_window_s,
            backoff_s=deploy.restart_backoff_s,
            stop_timeout_s=deploy.stop_timeout_s,
            give_back=give_back,
            forking=forking,
        )

    def start(self, plan: RolePlan) -> None:
        """Start a role."""
        log = self.logs / f"{plan.name}.log"
        with self.forking():
            self.children[plan.name] = Child(plan, log, self.start_process(plan, (), log))

    def check(self) -> None:
        """Record ended roles; restart failed ones.

        Raises:
            ChildDiedError: a role failed too often.
        """
        for child in list(self.children.values()):
            if child.restart_at_s is not None:
                due = [part for part in self._parts(child) if part.restart_at_s is not None]
                if self.now() >= child.restart_at_s and not any(part.is_running for part in due):
                    self._restart(child)
            elif not child.finished:
                self._look_at(child)

    def _look_at(self, child: Child) -> None:
        code, leaving = child.process.poll(), child.leaving
        if leaving is not None and code is not None:
            child.finished = True
            child.process.release()
            self.give_back(child.plan.name)
        elif leaving is not None:
            if leaving.is_over():
                _log.warning("%s %s after SIGTERM and is killed", child.plan.name, leaving.why)
                child.process.send_signal(signal.SIGKILL)
        elif code == EXIT_SUPERSEDED and child.plan.is_one_of_many:
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
        return name in self.children and self.children[name].is_running

    def finished(self, names: Iterable[str]) -> bool:
        """True if all these roles ended cleanly, or were left out."""
        return all(self.children[name].finished for name in names)

    def left_out(self, name: str) -> bool:
        """True if another process has the name of a role."""
        return self.children[name].is_left_out

    def leave(self, name: str) -> None:
        """Ask a role to hand its work back and end; the run continues without it."""
        child = self.children[name]
        child.restart_at_s = None
        child.leaving = self._patience(child, self.stop_timeout_s)
        child.process.send_signal(signal.SIGTERM)

    def stop(
        self,
        names: Iterable[str] | None = None,
        *,
        timeout_s: float | None = None,
        at_most: float = END_AT_MOST,
    ) -> None:
        """End roles: SIGTERM, and SIGKILL if that has no effect. No process is left.

        Args:
            names: Roles; None for all.
            timeout_s: Limit without a sign of life; None for deploy.stop_timeout_s.
            at_most: Multiple of timeout_s after which a role is killed whatever it does.
        """
        chosen = set(self.children if names is None else names)
        children = [child for name, child in self.children.items() if name in chosen]
        limit_s = self.stop_timeout_s if timeout_s is None else timeout_s
        patience: dict[str, Patience] = {}
        for child in children:
            child.restart_at_s = None
            if child.is_running:
                child.process.send_signal(signal.SIGTERM)
                patience[child.plan.name] = self._patience(child, limit_s, at_most, _log.warning)
        while running := [child for child in children if child.is_running]:
            for child in running:
                name = child.plan.name
                if name in patience and patience[name].is_over():
                    _log.warning("%s %s after SIGTERM and is killed", name, patience[name].why)
                    child.process.send_signal(signal.SIGKILL)
                    del patience[name]
            time.sleep(_POLL_S)
        for child in children:
            child.process.release()

    def _patience(
        self,
        child: Child,
        limit_s: float,
        at_most: float = END_AT_MOST,
        log: Callable[[str], None] = _log.info,
    ) -> Patience:
        what, signs = f"{child.plan.name} to end", child.process.signs
        return Patience(what, limit_s, signs, at_most=at_most, log=log, now=self.now)

    def _restart(self, child: Child) -> None:
        plan, log = child.plan, child.log_file
        child.restart_at_s = None
        child.num_starts += 1
        child.process.release()
        with self.forking():
            child.process = self.start_process(plan, plan.restart_arguments, log)

    def _parts(self, child: Child) -> list[Child]:
        """Return the processes that start and restart together with the child, and the child."""
        whole, others = child.plan.part_of, self.children.values()
        return [part for part in others if part is child or (whole and part.plan.part_of == whole)]

    def _failed(self, child: Child, code: int) -> None:
        name, because = child.plan.name, child.process.ended_because
        words = child.process.last_words()
        child.process.release()
        if code == EXIT_BAD_SETTINGS:
            reason = words or because or last_lines(child.log_file, 1).strip()
            raise ConfigError(f"{name}: {reason}")
        now = self.now()
        child.failed_at_s = [at for at in child.failed_at_s if at > now - self.window_s] + [now]
        failures = len(child.failed_at_s)
        ended = f"ended with code {code}"
        if code < 0:
            ended = f"was killed by {signal.Signals(-code).name}"
        how = f"{ended}: {because}" if because else ended
        if failures > self.max_restarts or code == EXIT_SUPERSEDED:
            often = "" if failures == 1 else f" (failure {failures})"
            raise ChildDiedError(
                f"{name} {how}{often}; {child.log_file} ends with:\n{last_lines(child.log_file)}"
            )
        delay = self.backoff_s * 2 ** (failures - 1)
        _log.warning("%s %s; restarting it in %.1f s", name, how, delay)
        for part in self._parts(child):
            part.finished = False
            part.restart_at_s = now + delay
            part.process.send_signal(signal.SIGKILL)

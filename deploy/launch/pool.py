"""A pool under one supervisor: a learner and engines for several tenants, each a run of its own.

Every tenant has its broker and reward workers, a run folder and an outcome. The learner and the
generators are the pool's. A tenant that fails ends alone; the pool ends when all have ended.
"""

import functools
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import msgspec
from rich.console import Console

from slipstream.deploy.config import RunConfig, run_config, write_resolved
from slipstream.deploy.launch.local import LocalSite
from slipstream.deploy.launch.observer import StatusWatcher
from slipstream.deploy.launch.plan import RolePlan, kind_of, plan_roles
from slipstream.deploy.launch.resume import (
    AUTO,
    find_resume_point,
    is_complete,
    refuse_taken,
    resumed_table,
)
from slipstream.deploy.launch.rotation import rotate
from slipstream.deploy.launch.session import (
    RunOutcome,
    SessionView,
    finish,
    has_room,
    hold_folder,
    outcome_of,
    print_trouble,
)
from slipstream.deploy.launch.signals import Signals, StopRequestedError
from slipstream.deploy.launch.supervise import Supervisor
from slipstream.wire.errors import ChildDiedError, ConfigError, SlipstreamError
from slipstream.wire.files.run_folder import SETTINGS
from slipstream.wire.files.tenant_end import forget_tenant_end, read_tenant_end
from slipstream.wire.gpus import usable_gpus
from slipstream.wire.messages.status import RunStatus
from slipstream.wire.process.command_line import EXIT_FAILED
from slipstream.wire.process.patience import Patience
from slipstream.wire.process.processes import last_lines
from slipstream.wire.settings.tenants import Tenant

_POLL_S = 0.2
_LINE_EVERY_S = 10.0
_BROKER_START_S = 120.0  # limit without a sign of life
_OF_TENANT = ("broker", "reward-worker")  # kinds of a tenant's own processes
_OF_POOL = ("learner", "generator")


def pool_plans(config: RunConfig, resolved: Path) -> list[RolePlan]:
    """Return the learner and the generators of a pool."""
    return plans_of(plan_roles(config, resolved, gpus=usable_gpus()), _OF_POOL)


def tenant_plans(config: RunConfig, resolved: Path) -> list[RolePlan]:
    """Return the processes that a tenant has to itself, the broker first."""
    return plans_of(plan_roles(config, resolved, gpus=None), _OF_TENANT)


def resumed_pool(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """Return a pool whose tenants resume where they were, and the names of those that are done.

    Raises:
        ConfigError: no tenant's run needs more steps, or a checkpoint cannot be read.
    """
    resumed, done = list[Tenant[RunConfig]](), list[str]()
    for tenant in config.tenants:
        run, upload = tenant.settings.run, tenant.settings.learner.checkpoint.upload
        if is_complete(run):
            done.append(tenant.name)
            continue
        point = find_resume_point(run, AUTO, upload, is_tenant=True)
        if point is None:
            refuse_taken(upload)
            resumed.append(tenant)
        else:
            table = resumed_table(tenant.settings.table, point)
            resumed.append(replace(tenant, settings=run_config(table)))
    if not resumed:
        raise ConfigError(f"the runs of all tenants of {config.run.folder} are complete")
    return msgspec.structs.replace(config, tenants=tuple(resumed)), done


class PoolView(SessionView, Protocol):
    """A picture of a pool for its user."""

    def show_line(self, tenant: str, status: RunStatus) -> None:
        """Show the state of a tenant's run in a line."""


def plans_of(plans: Iterable[RolePlan], kinds: Sequence[str]) -> list[RolePlan]:
    """Return the processes of some kinds."""
    return [plan for plan in plans if kind_of(plan.name) in kinds]


@dataclass(slots=True)
class TenantRun:
    """One tenant: its own processes, what is known of it, and its outcome."""

    name: str
    site: LocalSite
    supervisor: Supervisor
    watcher: StatusWatcher = field(default_factory=StatusWatcher)
    outcome: RunOutcome | None = None
    _waiting: list[RolePlan] = field(default_factory=list)  # begun once the broker listens
    _patience: Patience | None = None

    def begin(self) -> None:
        """Start the broker; the others follow once it listens."""
        run = self.site.run
        run.logs.mkdir(parents=True, exist_ok=True)
        forget_tenant_end(run.folder)
        broker, *self._waiting = plans_of(self.site.plans(), _OF_TENANT)
        self.supervisor.start(broker)
        child = self.supervisor.children["broker"]
        signs = lambda: child.process.signs()  # noqa: E731 it may have restarted
        self._patience = Patience("the broker to answer", _BROKER_START_S, signs)

    @property
    def is_beginning(self) -> bool:
        """True until the broker listens."""
        return self._patience is not None

    def look(self) -> bool:
        """Look at the processes and the run's state; return True once the run is complete.

        Raises:
            SlipstreamError: the run cannot continue.
        """
        self.supervisor.check()
        if self._patience is not None:
            self._await_broker(self._patience)
            return False
        if end := read_tenant_end(self.site.run.folder):
            raise ChildDiedError(end)
        names = [name for name in self.supervisor.children if name != "broker"]
        return self.is_over and end is not None and self.supervisor.finished(names)

    @property
    def is_over(self) -> bool:
        """True if its run is complete, by what its broker answered last."""
        return self.watcher.newest is not None and self.watcher.newest.finished

    def require_over(self, kind: str, ended_s: float) -> None:
        """Refuse the end of the pool's last process of a kind before the run is complete.

        Raises:
            ChildDiedError: the broker answered since then, and it is not.
        """
        if not self.is_over and self.watcher.asked_s > ended_s:
            raise ChildDiedError(f"{kind} ended before the run was complete")

    def _await_broker(self, patience: Patience) -> None:
        if self.site.broker_listens():
            self._patience = None
            for plan in self._waiting:
                self.supervisor.start(plan)
            self.watcher.start(self.site.run)
        elif patience.is_over():
            log = self.supervisor.children["broker"].log_file
            raise ChildDiedError(
                f"the broker did not start: it {patience.why}; {log}:\n{last_lines(log)}"
            )

    def end(self, outcome: RunOutcome, view: SessionView) -> None:
        """End the tenant's processes, the broker last; write and show the outcome."""
        self.outcome = outcome
        self.watcher.close()
        self.supervisor.stop([name for name in self.supervisor.children if name != "broker"])
        self.supervisor.stop(["broker"])
        self.site.close()
        view.console.print(f"tenant {self.name} of the pool", style="bold")
        finish(self.site.run, self.watcher.newest, outcome, view)


class PoolSession:
    """A pool, from its first process to the outcomes of its tenants."""

    def __init__(self, config: RunConfig, view: PoolView, signals: Signals) -> None:
        """Prepare the pool's and every tenant's place on this host."""
        self._config = config
        self._view = view
        self._console: Console = view.console
        self._signals = signals
        self._tenants = [self._tenant(tenant.name, tenant.settings) for tenant in config.tenants]
        self._site = LocalSite(config)
        self._supervisor = self._supervisor_of(self._site)
        self._next_line_s = 0.0
        self._ended_s: dict[str, float] = {}  # kinds of the pool's processes that have all ended

    def _tenant(self, name: str, config: RunConfig) -> TenantRun:
        site = LocalSite(config)
        return TenantRun(name, site, self._supervisor_of(site))

    def _supervisor_of(self, site: LocalSite) -> Supervisor:
        return Supervisor.of(site.config.deploy, site.run.logs, site.start, self._signals.held)

    @property
    def is_refused(self) -> bool:
        """True if no tenant's run has begun."""
        outcomes = [tenant.outcome for tenant in self._tenants]
        return all(outcome is not None and outcome.kind == "refused" for outcome in outcomes)

    @property
    def _live(self) -> list[TenantRun]:
        return [tenant for tenant in self._tenants if tenant.outcome is None]

    def run(self) -> int:
        """Run to the end; return the exit code: 0 if every tenant's run is complete."""
        outcome = RunOutcome("failed", "by a fault of this program", EXIT_FAILED)
        try:
            with self._signals.raising():
                self._run()
                outcome = RunOutcome("finished", "", 0)
        except (StopRequestedError, SlipstreamError, OSError) as error:
            folder = self._config.run.folder
            outcome = outcome_of(error, folder, has_room=has_room(folder))
            print_trouble(self._console, outcome)
        finally:
            self._end_pool(outcome)
            for tenant in self._live:
                tenant.end(outcome, self._view)
            self._site.close()
        codes = [tenant.outcome.code for tenant in self._tenants if tenant.outcome is not None]
        return outcome.code or max(codes, default=0)

    def _run(self) -> None:
        run = self._config.run
        names = ", ".join(tenant.name for tenant in self._tenants)
        self._console.print(
            f"pool {run.name} of {names}: its folder is {run.folder}", soft_wrap=True
        )
        for tenant in self._tenants:
            self._step(tenant, tenant.begin)
        while any(tenant.is_beginning for tenant in self._live):
            for tenant in self._live:  # the learner would wait for a broker that does not come
                self._step(tenant, tenant.look)
            time.sleep(_POLL_S)
        resolved = self._write_settings()
        for plan in pool_plans(self._config, resolved):
            self._supervisor.start(plan)
        limit_s, began_s = self._config.deploy.time_limit_s, time.monotonic()
        while live := self._live:
            self._supervisor.check()
            if limit_s and time.monotonic() - began_s > limit_s:
                raise ChildDiedError(f"the pool took longer than deploy.time_limit_s = {limit_s:g}")
            for tenant in self._live:
                if self._step(tenant, tenant.look):
                    tenant.end(RunOutcome("finished", "", 0), self._view)
            self._require_complete()
            if self._live and len(self._live) < len(live):
                with suppress(OSError):  # a learner that starts again begins without the ended ones
                    self._write_settings()
            self._report()
            time.sleep(_POLL_S)

    def _require_complete(self) -> None:
        """End tenants whose runs are not complete though no learner, or no generator, is left."""
        for kind in _OF_POOL:
            names = [name for name in self._supervisor.children if kind_of(name) == kind]
            if self._supervisor.finished(names):
                ended_s = self._ended_s.setdefault(kind, time.monotonic())
                for tenant in self._live:
                    self._step(tenant, functools.partial(tenant.require_over, kind, ended_s))

    def _write_settings(self) -> Path:
        """Write the pool's settings, which name the files of its tenants; return their file."""
        weights = {tenant.name: tenant.weight for tenant in self._config.tenants}
        tenants = {
            tenant.name: {
                "settings": str(tenant.site.run.folder.absolute() / SETTINGS),
                "weight": weights[tenant.name],
            }
            for tenant in self._live
        }
        if not tenants:
            raise ConfigError("no tenant of this pool can begin")
        resolved = self._config.run.folder / SETTINGS
        write_resolved(self._site.config, resolved, tenants=tenants)
        return resolved

    def _step(self, tenant: TenantRun, work: Callable[[], bool | None]) -> bool:
        """Do something for a tenant; a failure ends it alone."""
        try:
            return bool(work())
        except (SlipstreamError, OSError) as error:
            folder = tenant.site.run.folder
            tenant.end(outcome_of(error, folder, has_room=has_room(folder)), self._view)
            return False

    def _report(self) -> None:
        """Print a line for each tenant, and rotate logs, when it is time to."""
        if time.monotonic() < self._next_line_s:
            return
        self._next_line_s = time.monotonic() + _LINE_EVERY_S
        for site in (self._site, *(tenant.site for tenant in self._live)):
            rotate(site.run.logs, site.config.broker.logging)
        for tenant in self._live:
            if tenant.watcher.newest is not None:
                self._view.show_line(tenant.name, tenant.watcher.newest)

    def _end_pool(self, outcome: RunOutcome) -> None:
        """End the learner and the generators; a learner that is stopped saves first."""
        supervisor, config = self._supervisor, self._config
        if outcome.code and supervisor.runs("learner"):
            self._signals.forget()
            self._console.print("stopping: the learner saves checkpoints (Ctrl-C ends it at once)")
            with suppress(StopRequestedError), self._signals.raising():
                supervisor.stop(["learner"], timeout_s=config.deploy.save_timeout_s)
        supervisor.stop()


def run_pool(config: RunConfig, view: PoolView) -> int:
    """Run a pool in its folder, locked meanwhile; return the exit code.

    Raises:
        ConfigError: another process holds the folder, or it cannot be written.
    """
    run, signals = config.run, Signals()
    is_new = not run.folder.exists()
    with ExitStack() as held:
        held.enter_context(signals.handled())
        hold_folder(run, held, f"runs {run.folder}")
        session = PoolSession(config, view, signals)
        code = session.run()
        if is_new and session.is_refused:
            shutil.rmtree(run.folder, ignore_errors=True)
        return code

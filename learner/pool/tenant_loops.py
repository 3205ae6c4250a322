"""The loops of all tenants on one rank, in turns: a turn trains one tenant's next batch.

Rank 0 decides whose turn it is; the others follow. Its searches for batches run in the background,
so no tenant is waited for: what has no batch is not ready. A tenant that fails ends alone, on every
rank: with a batch that cannot be trained, a broker that is gone, a publish or checkpoint that is
refused.
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from slipstream.learner.batches.broker_link import LeaderLink
from slipstream.learner.loop import VISIT_S, LearnerLoop
from slipstream.learner.model.collectives import broadcast_bytes
from slipstream.learner.pool.fair_turns import FairTurns
from slipstream.learner.stop import StopRequest
from slipstream.learner.training.policy import Policy
from slipstream.wire.errors import SlipstreamError, text_of
from slipstream.wire.files.tenant_end import write_tenant_end
from slipstream.wire.process.health import Health
from slipstream.wire.process.logs import logging_for
from slipstream.wire.process.phases import TURN, WAIT, PhaseClock

_log = logging.getLogger(__name__)
_LOOK_S = 0.02  # between looks at what the searches have found


@dataclass(slots=True)
class TenantLoop:
    """One tenant on this rank."""

    name: str
    weight: float
    folder: Path
    policy: Policy
    loop: LearnerLoop
    clock: PhaseClock
    leader: LeaderLink | None  # on rank 0
    looked_s: float = 0.0  # time of its last turn, or visit to a checkpoint that is being written
    cleanup: ExitStack = field(default_factory=ExitStack)  # closes its connections

    @property
    def has_news(self) -> bool:
        """True if a turn would not wait; on rank 0."""
        return self.leader is not None and self.leader.has_news


class TenantLoops:
    """All tenants of one rank."""

    def __init__(
        self, tenants: Sequence[TenantLoop], stop: StopRequest, *, rank: int, wait_s: float
    ) -> None:
        """Prepare to train.

        Rank 0 answers the others at least every ``wait_s``, whether a tenant is ready or not.
        """
        self._live = {tenant.name: tenant for tenant in tenants}
        self._turns = FairTurns({tenant.name: tenant.weight for tenant in tenants})
        self._leads = rank == 0
        self._stop = stop
        self._wait_s = wait_s
        self._num_orders = 0

    def run(self, health: Health) -> None:
        """Train until every tenant's run is complete, has failed, or rank 0 is asked to stop."""
        health.waits_for("brokers to hand it their runs")
        for tenant in list(self._live.values()):
            self._do(tenant, tenant.loop.start)
            self._watch(tenant)
        health.begins(self._signs)
        while self._live:
            name, has_turn = self._chosen_by_all()
            self._num_orders += 1
            if not name:
                continue
            tenant = self._live[name]
            tenant.looked_s = time.monotonic()
            if has_turn:
                self._take_turn(tenant)
            else:
                self._do(tenant, tenant.loop.visit)

    def _chosen_by_all(self) -> tuple[str, bool]:
        """Return the tenant that is next on every rank, and whether it has a turn or a visit."""
        name, has_turn = self._chosen() if self._leads else ("", False)
        data = broadcast_bytes(f"{int(has_turn)}{name}".encode()).decode()
        return data[1:], data[0] == "1"

    def _signs(self) -> tuple[object, ...]:
        return self._num_orders, *(tenant.loop.signs() for tenant in self._live.values())

    def _chosen(self) -> tuple[str, bool]:
        """Return the tenant whose turn is next, on rank 0; empty if none is ready for long.

        Without one, checkpoints that are being written are visited.
        """
        until_s = time.monotonic() + self._wait_s
        while (now_s := time.monotonic()) < until_s:
            stops = self._stop.requested
            ready = [name for name, tenant in self._live.items() if stops or tenant.has_news]
            if (name := self._turns.next(ready)) is not None:
                for other in ready:
                    if other != name:
                        self._live[other].clock.enter(TURN)
                return name, True
            for tenant in self._live.values():
                if tenant.loop.is_saving and now_s - tenant.looked_s > VISIT_S:
                    return tenant.name, False
            time.sleep(_LOOK_S)
        return "", False

    def _take_turn(self, tenant: TenantLoop) -> None:
        began_s = time.monotonic()
        tenant.clock.enter(WAIT)
        more = self._do(tenant, lambda: tenant.loop.turn(0.0))
        if more is False:
            self._do(tenant, tenant.loop.finish)
            if tenant.name in self._live:  # it did not fail
                self._leave(tenant, "")
        else:
            self._watch(tenant)
        if self._leads:
            self._turns.spend(tenant.name, time.monotonic() - began_s)
        if tenant.name not in self._live:
            self._turns.leave(tenant.name)

    def _watch(self, tenant: TenantLoop) -> None:
        if tenant.name in self._live and tenant.leader is not None:
            tenant.leader.watch(tenant.loop.version)

    def _do(self, tenant: TenantLoop, work: Callable[[], bool | None]) -> bool | None:
        """Do some work of a tenant; a failure, which every rank has alike, ends it alone."""
        with logging_for(tenant.name):
            tenant.policy.attach()
            try:
                return work()
            except SlipstreamError as error:
                _log.error("this tenant ends: %s", error)
                self._leave(tenant, text_of(error))
        return None

    def _leave(self, tenant: TenantLoop, reason: str) -> None:
        """Close all of a tenant; its run folder says so, with the reason of a failure."""
        del self._live[tenant.name]
        tenant.loop.close()
        if reason and tenant.leader is not None:
            with suppress(SlipstreamError):
                tenant.leader.end()
                tenant.leader.leave(is_stopped=True)
        tenant.cleanup.close()
        if tenant.leader is not None:
            why = f"the learner gave it up: {reason}" if reason else ""
            write_tenant_end(tenant.folder, why)
        _log.info("tenant %s has ended; %d remain", tenant.name, len(self._live))

"""One rank of several loops in turns, of which some fail on rank 0 alone, or on every rank.

Usage: tenant_turns WORK_FOLDER RANK WORLD_SIZE
Prints, as JSON, what each tenant's loop did here, and the tenants in the order of their turns.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from slipstream.learner.config import LearnerSection
from slipstream.learner.coordinator import Coordinator
from slipstream.learner.pool.tenant_loops import TenantLoop, TenantLoops
from slipstream.learner.stop import StopRequest
from slipstream.wire.errors import PeerLostError, PublishError
from slipstream.wire.files.tenant_end import read_tenant_end
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.process.health import Health
from slipstream.wire.process.phases import PhaseClock
from tests.support.ranks.program import join_ranks, run

STEPS = 4


class Leader:
    """Rank 0's link to a tenant's broker, which is gone after some requests."""

    left = False

    def __init__(self, lives_for: int, loop: "Loop") -> None:
        self._left = lives_for
        self._loop = loop

    @property
    def has_news(self) -> bool:
        """True unless a checkpoint waits to be finished."""
        return not self._loop.is_saving

    def reserve(self) -> int:
        self._left -= 1
        if self._left < 0:
            raise PeerLostError("its broker is gone")
        return 7

    def watch(self, version: PolicyVersion) -> None:
        assert isinstance(version, PolicyVersion)

    def leave(self, *, is_stopped: bool) -> None:
        self.left = is_stopped

    def end(self) -> None:
        pass


class Loop:
    """A loop of a few steps; each asks rank 0."""

    coordinator: Coordinator

    def __init__(self, name: str, order: list[str]) -> None:
        self.done: list[object] = []
        self.version = PolicyVersion(1, 0)
        self._name, self._order = name, order

    def start(self) -> None:
        self.done.append("start")

    def turn(self, longest_s: float) -> bool:
        assert longest_s == 0.0
        self._order.append(self._name)
        self.done.append(self.coordinator.reserve())
        if self._name == "unpublished" and len(self.done) == 3:
            raise PublishError("v1.2 is not published")  # on every rank
        return len(self.done) <= STEPS

    def finish(self) -> None:
        self.done.append("finish")

    def close(self) -> None:
        self.done.append("close")

    def signs(self) -> object:
        return len(self.done)

    @property
    def is_saving(self) -> bool:
        """True after the last turn but one of a tenant, until it is visited."""
        return self._name == "also fine" and len(self.done) == STEPS and "visit" not in self.done

    def visit(self) -> None:
        self.done.append("visit")


def main(work: Path, rank: int, world_size: int) -> None:
    join_ranks(work, rank, world_size, LearnerSection(ranks=world_size))
    order: list[str] = []
    loops, leaders, tenants = {}, {}, list[TenantLoop]()
    for name in ("fine", "lost", "unpublished", "also fine"):
        loops[name] = Loop(name, order)
        leader: Any = Leader(2 if name == "lost" else 1000, loops[name]) if rank == 0 else None
        loops[name].coordinator = Coordinator(leader, StopRequest(), shares_failures=True)
        folder = work / name
        folder.mkdir(exist_ok=True)
        leaders[name] = leader
        policy: Any = SimpleNamespace(attach=lambda: None)
        loop: Any = loops[name]
        tenants.append(TenantLoop(name, 1.0, folder, policy, loop, PhaseClock(), leader))
    TenantLoops(tenants, StopRequest(), rank=rank, wait_s=5.0).run(Health())
    report = {
        "did": {name: loop.done for name, loop in loops.items()},
        "order": order,
        "ends": {tenant.name: read_tenant_end(tenant.folder) for tenant in tenants},
        "left": [name for name, leader in leaders.items() if leader is not None and leader.left],
    }
    sys.stdout.write(json.dumps(report))


if __name__ == "__main__":
    run(main)

"""Four tenants train while server, learner and engine are killed 200 times.

No command is lost or done twice, and no tenant's weights are touched by another: every figure,
answer and version is, to the bit, what the same tenant gets where nothing dies.
"""

import random
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.served_tenants import TENANTS, Role, Served, serving
from tests.support.waiting import until

pytest.importorskip("tinker")
pytestmark = pytest.mark.chaos
KILLS = 200
ROLES: tuple[Role, ...] = (*("server",) * 9, *("learner",) * 9, *("engine",) * 2)


def tenants(served: Served, steps: list[int], stop: Path) -> list[Any]:
    """Play all tenants at once; return what each has seen, with its last version."""

    def play(number: int) -> Any:  # noqa: ANN401 what it returns
        found = served.play(
            "tenant_loop",
            key=served.key(TENANTS[number]),
            seed=number + 1,
            steps=steps[number],
            stop=str(stop),
        )
        return found["seen"], served.version_of(found["sampler"])

    with ThreadPoolExecutor(len(steps)) as threads:
        return list(threads.map(play, range(len(steps))))


def test_nothing_is_lost_or_doubled_over_two_hundred_kills():
    draw = random.Random(5)
    kills: dict[Role, int] = {"server": 0, "learner": 0, "engine": 0}
    with (
        tempfile.TemporaryDirectory(prefix="sp-", dir="/tmp") as name,
        serving(Path(name), "server", "learner", "engine") as served,
        ThreadPoolExecutor(1) as thread,
    ):
        stop = Path(name) / "stop"
        playing = thread.submit(tenants, served, [0] * len(TENANTS), stop)
        try:
            while sum(kills.values()) < KILLS and not playing.done():
                before, more = served.num_done(), draw.randint(1, 12)
                until(lambda: playing.done() or served.num_done() >= before + more)  # noqa: B023
                time.sleep(draw.uniform(0.0, 0.3))  # anywhere in the next command
                role = draw.choice(ROLES)
                served.restart(role)
                kills[role] += 1
        finally:
            stop.touch()
        killed = playing.result()
    with (
        tempfile.TemporaryDirectory(prefix="sp-", dir="/tmp") as name,
        serving(Path(name), "server", "learner", "engine") as served,
    ):
        alone = tenants(served, [len(seen) for seen, _ in killed], Path(name) / "stop")
    assert sum(kills.values()) == KILLS
    assert all(len(seen) > 20 for seen, _ in killed)
    for (seen, version), (expected, known) in zip(killed, alone, strict=True):
        assert all(row[-1] is True for row in seen[::4]), "replayed by the label's own weights"
        assert seen == expected
        assert version == known

"""What looking at a run costs the broker: memory of a day's history, CPU seconds per second.

A run of 64 generators, with viewers that read the page's stream. The baseline is the run: one core
of the broker's host, so that 1% is 0.01 CPU seconds per second.
"""

import asyncio
import resource
import sys
import tempfile
import time
from pathlib import Path

import aiohttp
import msgspec
from yarl import URL

from benchmarks.bars import Bars
from broker.dashboard.history import History, StoredState, encode_json, write_state
from broker.dashboard.items import RecordedItems
from broker.dashboard.recorder import Recorder
from broker.dashboard.web import Dashboard
from tests.wire_samples import STATUS
from wire.bus import MemberState
from wire.run_folder import PAGE_STATE
from wire.status import RoleStatus, RunStatus, StepPoint
from wire.versions import PolicyVersion

NEEDS_MB = 50
NEEDS_CPU_SHARE = 0.02
_DAY_S = 24 * 3600
_STEP_S = 10
_GENERATORS = 64
_FIGURES = 40  # of a learner step
_VIEWERS = (0, 1, 8)
_MEASURED_S = 15


def busy_status(at_s: float, steps: int) -> RunStatus:
    """Return the state of a large run."""
    names = [f"generator-{i}" for i in range(_GENERATORS)]
    roles = [
        RoleStatus(
            name=name,
            role="generator",
            age_s=at_s + 1,
            silent_s=0.5,
            busy=0.9,
            phase_seconds={"generate": 0.9 * at_s, "wait": 0.1 * at_s},
            tokens_per_second=1500.0,
            leases=8,
        )
        for name in names
    ]
    members = [
        MemberState(
            name=name,
            state="current",
            version=PolicyVersion(1, steps),
            since_s=at_s,
            transport="collective",
        )
        for name in names
    ]
    points = [point(step) for step in range(max(1, steps - 1_999), steps + 1)]
    return msgspec.structs.replace(
        STATUS, steps=steps, roles=roles, members=members, steps_history=points, elapsed_s=at_s
    )


def point(step: int) -> StepPoint:
    """Return what a learner reports of a step."""
    figures = {f"policy/figure_{i}": step / (i + 1) for i in range(_FIGURES)}
    return StepPoint(step=step, at_s=float(step * _STEP_S), metrics=figures)


def measure_day(bars: Bars) -> None:
    """Take a day's samples at once, then write them and encode what a page loads."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    history = History(began_s=0.0)
    status = busy_status(1.0, 1)
    for at_s in range(0, _DAY_S, 2):
        history.sample(status, float(at_s))
        if at_s % _STEP_S == 0:
            history.step(point(at_s // _STEP_S), float(at_s))
    kept = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    with tempfile.TemporaryDirectory() as name:
        shown = history.snapshot()
        encoded = len(encode_json(shown)) / 1e6
        write_state(Path(name) / PAGE_STATE, StoredState(at_s=0.0, status=status, history=shown))
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(
        f"24 h: {history.num_bytes / 1e6:.1f} MB of numbers, memory grew by {kept:.0f} MB, "
        f"while one page loads {encoded:.1f} MB and a state is written by {peak:.0f} MB"
    )
    bars.at_most("history_of_a_day", peak, "MB", needs=NEEDS_MB)


async def measure_looking(bars: Bars) -> None:
    """Serve a run of 2,000 steps to viewers."""
    for viewers in _VIEWERS:
        share = await _share(viewers)
        bars.at_most(
            f"observability_cpu_{viewers}_viewers", share, "of a core", needs=NEEDS_CPU_SHARE
        )


async def _share(viewers: int) -> float:
    seen = busy_status(100_000.0, 9_999)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recorder = Recorder(
            lambda: seen, folder / PAGE_STATE, high_water_bytes=1 << 32, fsync="always"
        )
        for at in range(2_000):
            recorder.history.sample(seen, time.time() - 10.0 * (2_000 - at))
        page = Dashboard(recorder, RecordedItems(folder), host="127.0.0.1", port=0)
        address = URL(await page.start())
        jobs = [asyncio.create_task(recorder.run())]
        readers = [
            await asyncio.create_subprocess_exec(sys.executable, "-m", __spec__.name, str(address))
            for _ in range(viewers)
        ]
        try:
            await asyncio.sleep(3.0)
            if page.num_viewers != viewers:
                raise RuntimeError(f"{page.num_viewers} of {viewers} viewers came")
            before_s, began_s = time.process_time(), time.monotonic()
            await asyncio.sleep(_MEASURED_S)
            return (time.process_time() - before_s) / (time.monotonic() - began_s)
        finally:
            for reader in readers:
                reader.kill()
                await reader.wait()
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)
            await page.stop()


async def read_stream(address: URL) -> None:
    """Read the page's events until killed."""
    async with (
        aiohttp.ClientSession() as session,
        session.get(
            address.with_path("/events", keep_query=True),
            timeout=aiohttp.ClientTimeout(None),
        ) as reply,
    ):
        async for _ in reply.content.iter_any():
            pass


def main() -> int:
    """Measure, or be a viewer of ADDRESS."""
    if len(sys.argv) > 1:
        asyncio.run(read_stream(URL(sys.argv[1])))
        return 0
    bars = Bars()
    measure_day(bars)
    asyncio.run(measure_looking(bars))
    return bars.exit_code


if __name__ == "__main__":
    sys.exit(main())

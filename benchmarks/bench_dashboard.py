"""What watching a run costs the broker: memory of a day's history, CPU seconds per second.

A live run of 64 generators: its ledger and telemetry are the broker's own, every generator
reports as often as it does, a learner step with its figures and a publish come every two seconds,
and viewers read the page's stream. The baseline is the run: one core of the broker's host, so that
1% is 0.01 CPU seconds per second. What the run itself costs here (the work of ledger and telemetry
on reports, groups and steps) is measured beside it and does not count; reading the state does.
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
from slipstream.broker.dashboard.items import RecordedItems
from slipstream.broker.dashboard.recorder import SnapshotRecorder
from slipstream.broker.dashboard.web import Dashboard
from slipstream.broker.history.columns import StoredState, encode_json, write_state
from slipstream.broker.history.history import RunHistory
from slipstream.broker.ledger.scoring_queue import ScoringQueue
from slipstream.broker.report.telemetry import Telemetry
from slipstream.wire.files.run_folder import PAGE_STATE
from slipstream.wire.messages.broker import Hello, RoleReport
from slipstream.wire.messages.status import REPORT_EVERY_S, RunStatus, StepPoint
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.messages.weightbus import MemberState, PublishRecord
from slipstream.wire.settings.sections import RunSection
from tests.support.ledger_driver import lease, make_ledger, make_ready, make_rules, train_step
from tests.support.wire_samples import STATUS

NEEDS_MB = 50
NEEDS_CPU_SHARE = 0.02
_DAY_S = 24 * 3600
_STEP_S = 10
_GENERATORS = 64
_FIGURES = 40  # of a learner step
_VIEWERS = (0, 1, 8)
_NEW_STEP_S = 2.0
_WARM_S = 3.0
_MEASURED_S = 15
_LONGEST_S = 60.0


class LivingRun:
    """A large run as its broker holds it."""

    def __init__(self, *, steps: int) -> None:
        """Have done so many steps."""
        rules = make_rules(
            max_staleness_steps=2, groups_per_step=_GENERATORS, group_size=8, total_steps=10 * steps
        )
        state = make_ledger(rules).book.state
        state.version = PolicyVersion(1, steps)  # what happened before is not what is measured
        self._ledger = make_ledger(rules, state)
        self._first_step = steps
        self._scoring = ScoringQueue(lease_s=60.0)
        self._telemetry = Telemetry(RunSection(name="large"))
        self._began_s = time.monotonic()
        self.own_cpu_s = 0.0  # of the run itself
        self._names = [f"generator-{i}" for i in range(_GENERATORS)]
        for name in self._names:
            self._telemetry.hello(Hello(role="generator", name=name))
        self._telemetry.training_began()
        for step in range(1, steps + 1):
            self._telemetry.step(step, point(step).metrics)
        self.report()

    def status(self) -> RunStatus:
        """Return its state, as the broker's server does."""
        return self._telemetry.status(self._ledger.book, self._scoring)

    def report(self) -> None:
        """Every generator reports its state."""
        at_s = time.monotonic() - self._began_s
        for name in self._names:
            self._telemetry.received_from(name)
            phases = {"generate": 0.9 * at_s, "wait": 0.1 * at_s}
            counters = {"tokens": 1500.0 * at_s, "trajectories": 3.0 * at_s}
            self._telemetry.report(name, RoleReport(phases, counters, self._ledger.book.version))

    def step(self) -> None:
        """A step's groups are generated, scored and trained; the next version is published."""
        for name in self._names:
            make_ready(self._ledger, lease(self._ledger, name, max_sequences=16))
        train_step(self._ledger)
        version = self._ledger.book.version
        self._telemetry.step(version.step, point(version.step).metrics)
        self._telemetry.published(
            PublishRecord(
                version=version,
                at_s=time.time(),
                adopted_by=dict.fromkeys(self._names, 0.1),
                num_in_flight=dict.fromkeys(self._names, 8),
                phase_seconds={"offer": 0.01, "transfer": 0.2, "verify": 0.1, "commit": 0.05},
            )
        )
        self._telemetry.members(
            [
                MemberState(
                    name=name,
                    state="current",
                    version=version,
                    since_s=time.time(),
                    transport="collective",
                )
                for name in self._names
            ]
        )

    async def live(self) -> None:
        """Run until cancelled."""
        while True:
            began_s = time.thread_time()
            self.report()
            if self._is_due():
                self.step()
            self.own_cpu_s += time.thread_time() - began_s
            await asyncio.sleep(REPORT_EVERY_S)

    def _is_due(self) -> bool:
        lived_s = time.monotonic() - self._began_s
        return lived_s > _NEW_STEP_S * (self._ledger.book.step - self._first_step + 1)


def point(step: int) -> StepPoint:
    """Return what a learner reports of a step."""
    figures = {f"policy/figure_{i}": step / (i + 1) for i in range(_FIGURES)}
    return StepPoint(step=step, at_s=float(step * _STEP_S), metrics=figures)


def measure_day(bars: Bars) -> None:
    """Take a day's samples at once, then write them and encode what a page loads."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    history = RunHistory(began_s=0.0)
    living = LivingRun(steps=1)
    living.step()
    run = living.status()
    status = msgspec.structs.replace(STATUS, steps=1, roles=run.roles, members=run.members)
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


async def measure_watching(bars: Bars) -> None:
    """Serve a run of 2,000 steps to viewers."""
    for viewers in _VIEWERS:
        share = await _share(viewers)
        bars.at_most(
            f"observability_cpu_{viewers}_viewers", share, "of a core", needs=NEEDS_CPU_SHARE
        )


async def _share(viewers: int) -> float:
    run = LivingRun(steps=2_000)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recorder = SnapshotRecorder(
            run.status, folder / PAGE_STATE, high_water_bytes=1 << 32, fsync="always"
        )
        seen = run.status()
        for at in range(2_000):
            recorder.history.sample(seen, time.time() - 10.0 * (2_000 - at))
        page = Dashboard(recorder, RecordedItems(folder), host="127.0.0.1", port=0)
        address = URL(await page.start())
        jobs = [asyncio.create_task(recorder.run()), asyncio.create_task(run.live())]
        readers = [
            await asyncio.create_subprocess_exec(sys.executable, "-m", __spec__.name, str(address))
            for _ in range(viewers)
        ]
        try:
            deadline_s = time.monotonic() + _LONGEST_S
            while page.num_viewers < viewers:
                if time.monotonic() > deadline_s:
                    raise TimeoutError(f"{page.num_viewers} of {viewers} viewers came")
                await asyncio.sleep(0.1)
            await asyncio.sleep(_WARM_S)
            first_step, own_before_s = _newest_step(recorder), run.own_cpu_s
            before_s, began_s = time.process_time(), time.monotonic()
            await asyncio.sleep(_MEASURED_S)
            spent_s, seconds = time.process_time() - before_s, time.monotonic() - began_s
            own_s, steps = run.own_cpu_s - own_before_s, _newest_step(recorder) - first_step
            if not steps:
                raise RuntimeError(f"no new step came in within {seconds:.0f} s")
            print(f"{viewers} viewers: {steps} new steps; the run itself {own_s / seconds:.3f}")
            return (spent_s - own_s) / seconds
        finally:
            for reader in readers:
                reader.kill()
                await reader.wait()
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)
            await page.stop()


def _newest_step(recorder: SnapshotRecorder) -> int:
    """Return the newest learner step that the page was sent."""
    if recorder.snapshot is None:
        raise RuntimeError("the state of the run could not be read")
    return recorder.snapshot.status.steps_history[-1].step


async def read_stream(address: URL) -> None:
    """Read the page's events until killed."""
    async with (
        aiohttp.ClientSession() as session,
        session.get(
            address.with_path("/events", keep_query=True), timeout=aiohttp.ClientTimeout(None)
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
    asyncio.run(measure_watching(bars))
    return bars.exit_code


if __name__ == "__main__":
    sys.exit(main())

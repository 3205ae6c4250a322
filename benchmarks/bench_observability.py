"""Which share of a run's CPU seconds is spent on watching it.

A run of real parts with everything on that is on by default, and one viewer that reads the page's
stream. In every Python process the functions of the modules below are on CPU clocks of their thread
(benchmarks/cpu_clocks.py); the baseline is the CPU clocks of the same processes. Both are added up
by the same processes at the same moments, and count only where they reach the CPU time that the
system reports of them. Redis runs no Python and is on neither side. What a viewer costs his own
machine does not count.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.bars import Bars, NotRun
from benchmarks.cpu_clocks import KINDS, VARIABLE
from benchmarks.run_measurement import ROOT, CpuMeter, run_slipstream, write_inputs
from slipstream.wire.files.run_folder import PAGE_ADDRESS

NEEDS_SHARE = 0.02
MOST_APART = 0.1  # of the CPU time that the system reports
_STEPS = 60
_WAIT_S = 60.0
_COUNT_S = 0.1
_NOT_PYTHON = ("redis-server",)
WATCHING = {
    "page, history, advice": r"slipstream\.broker\.dashboard\..*:",
    "state of the run": (
        r"slipstream\.broker\.(report\.(telemetry|run_report)|ledger\.(survivorship|view)):"
    ),
    "files and trackers": (
        r"(slipstream\.broker\.report\.(trackers\..*|run_files|summary|versions_file)"
        r"|slipstream\.broker\.store\.event_log|tensorboard\.summary\.writer\..*):"
    ),
    "recorded trajectories": r"slipstream\.learner\.record\.rollout_log:",
    "learner's figures": r"slipstream\.algos\.diagnostics:",
    "reports of the roles": (
        r"slipstream\.(weightbus\.relay\.main|learner\.batches\.broker_link|generators\.worker)"
        r":_reports?$|slipstream\.wire\.(process\.phases|messages\.metrics):"
    ),
    "terminal": r"(slipstream\.deploy\.(terminal\.\w+|commands\.top)|rich\.live):",
}
_SETTINGS: dict[str, object] = {
    "run.steps": _STEPS,
    "run.group_size": 8,
    "run.groups_per_step": 8,
    "learner.rollouts_per_step": 2,
    "generators.max_sequences": 64,
    "generators.max_cached_tokens": 64 * 1024,
    "generators.environment": json.dumps([VARIABLE, "PYTHONPATH"]),
}


class Watch:
    """A viewer beside a run, and the CPU time that the system reports of its processes."""

    def __init__(self, folder: Path, name: str) -> None:
        self._page = folder / "runs" / name / PAGE_ADDRESS
        self.cpu_s = 0.0  # of the run's Python processes
        self._viewer: subprocess.Popen[bytes] | None = None
        self._counting: threading.Thread | None = None

    def begin(self, pid: int) -> None:
        """Count, and read the page as soon as there is one."""
        self._counting = threading.Thread(target=self._count, args=(pid,))
        self._counting.start()
        deadline = time.monotonic() + _WAIT_S
        while not self._page.exists():
            if time.monotonic() > deadline:
                raise RuntimeError(f"no page within {_WAIT_S:.0f} s")
            time.sleep(0.1)
        address, quiet = self._page.read_text().strip(), subprocess.DEVNULL
        command = [sys.executable, "-m", "benchmarks.bench_dashboard", address]
        self._viewer = subprocess.Popen(command, cwd=ROOT, stdout=quiet, stderr=quiet, stdin=quiet)

    def _count(self, pid: int) -> None:
        """Read the CPU time until the run is over."""
        meter = CpuMeter(pid, without=_NOT_PYTHON)
        while psutil.pid_exists(pid):
            self.cpu_s = meter.read()
            time.sleep(_COUNT_S)

    def end(self) -> None:
        """Stop reading; the run is over."""
        if self._viewer is not None:
            self._viewer.kill()
            self._viewer.wait()
        if self._counting is not None:
            self._counting.join()


@dataclass(frozen=True, slots=True)
class Clocked:
    """CPU seconds of all processes by their own clocks, and as the system reports them."""

    spent_s: Counter[str]  # by what they worked on, of WATCHING
    process_s: float
    reported_s: float

    @classmethod
    def read(cls, folder: Path, reported_s: float) -> "Clocked":
        """Add up what the processes wrote."""
        files = [path for path in folder.glob("*.json") if path.name != KINDS]
        clocks = [json.loads(path.read_text()) for path in files]
        spent_s = sum((Counter(one["spent_s"]) for one in clocks), Counter[str]())
        return cls(spent_s, sum(one["process_s"] for one in clocks), reported_s)

    @property
    def share_of_watching(self) -> float | NotRun:
        """The part of the processes' CPU time that is not the run itself."""
        if abs(self.process_s - self.reported_s) > MOST_APART * self.reported_s:
            return NotRun(
                f"the processes' clocks add up to {self.process_s:.0f} of {self.reported_s:.0f} "
                f"CPU seconds, more than {MOST_APART:.0%} apart"
            )
        return self.spent_s.total() / self.process_s


def main() -> int:
    """Run and count."""
    bars = Bars()
    with tempfile.TemporaryDirectory() as name:
        folder, clocks = Path(name), Path(name) / "clocks"
        clocks.mkdir()
        (clocks / KINDS).write_text(json.dumps(WATCHING))
        write_inputs(folder, hidden=128, layers=4)
        watch = Watch(folder, "watched")
        search = os.pathsep.join([str(ROOT / "benchmarks" / "clocked"), str(ROOT)])
        readings = run_slipstream(
            folder,
            "watched",
            _SETTINGS,
            began=watch.begin,
            environment={VARIABLE: str(clocks), "PYTHONPATH": search},
        )
        watch.end()
        clocked = Clocked.read(clocks, watch.cpu_s)
    print(
        f"{readings[-1].step} steps: {clocked.reported_s:.0f} CPU seconds of Python processes; "
        f"{clocked.process_s:.0f} by their own clocks"
    )
    for kind in WATCHING:
        seconds = clocked.spent_s[kind]
        print(f"{kind}: {seconds:.2f} s, {seconds / clocked.process_s:.2%}")
    bars.at_most(
        "observability_of_a_run", clocked.share_of_watching, "of its CPU time", needs=NEEDS_SHARE
    )
    return bars.exit_code


if __name__ == "__main__":
    sys.exit(main())

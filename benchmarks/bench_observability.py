"""Which share of a run's CPU seconds is spent on watching it.

A run of real parts with everything on that is on by default, and one viewer who reads the page's
stream. A sampling profiler (py-spy; install it by hand) looks at every thread of every
process; a sample counts if a function of the modules below is anywhere on its stack. A thread that
waits for a core counts as working, so that the share is rather too high. The baseline is the CPU
time of all processes of the same run. What a viewer costs his own machine does not count.
"""

import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from benchmarks.bars import Bars, NotRun
from benchmarks.measured_runs import ROOT, run_slipstream, write_inputs
from wire.run_folder import PAGE_ADDRESS

NEEDS_SHARE = 0.02
_SAMPLER = Path(sys.executable).with_name("py-spy")
_STEPS = 60
_RATE = 50  # samples a second
_WAIT_S = 60.0
_WATCHING = {
    "page, history, advice": r"broker/dashboard/",
    "state of the run": r"broker/(telemetry|survivorship|account)\.py|^status .*broker/server\.py",
    "files and trackers": r"broker/(trackers/|records|summary|trail|versions_file)|/tensorboard/",
    "recorded trajectories": r"learner/rollout_log\.py",
    "learner's figures": r"algos/diagnostics\.py",
    "reports of the roles": r"^_?reports? \(|wire/phases\.py|wire/metrics\.py",
    "terminal": r"deploy/(view|observe|recent|screen|top)\.py|/rich/",
}
_SETTINGS: dict[str, object] = {
    "run.steps": _STEPS,
    "run.group_size": 8,
    "run.groups_per_step": 8,
    "learner.rollouts_per_step": 2,
    "generators.max_sequences": 64,
    "generators.max_cached_tokens": 64 * 1024,
}


class Watch:
    """A viewer and a profiler beside a run."""

    def __init__(self, folder: Path, name: str) -> None:
        self._page = folder / "runs" / name / PAGE_ADDRESS
        self.samples = folder / "samples.txt"
        self._processes: list[subprocess.Popen[bytes]] = []

    def begin(self, pid: int) -> None:
        """Start to sample, and to look at the page as soon as there is one."""
        sampler = [str(_SAMPLER), "record", "--pid", str(pid)]
        sampler += ["--subprocesses", "--nonblocking", "--full-filenames", "--rate", str(_RATE)]
        sampler += ["--format", "raw", "--output", str(self.samples)]
        self._start(sampler)
        deadline = time.monotonic() + _WAIT_S
        while not self._page.exists():
            if time.monotonic() > deadline:
                raise RuntimeError(f"no page within {_WAIT_S:.0f} s")
            time.sleep(0.1)
        address = self._page.read_text().strip()
        self._start([sys.executable, "-m", "benchmarks.bench_dashboard", address])

    def _start(self, command: list[str]) -> None:
        quiet = subprocess.DEVNULL
        self._processes.append(
            subprocess.Popen(command, cwd=ROOT, stdout=quiet, stderr=quiet, stdin=quiet)
        )

    def end(self) -> None:
        """Wait for the samples; the run is over."""
        sampler, *others = self._processes
        for process in others:
            process.kill()
            process.wait()
        sampler.wait(_WAIT_S)


def stacks(path: Path) -> Iterator[tuple[list[str], int]]:
    """Yield (frames from the outermost on, number of samples)."""
    for line in path.read_text().splitlines():
        text, _, count = line.rpartition(" ")
        yield text.split(";"), int(count)


def kind_of(frames: list[str]) -> str:
    """Return what a thread worked on, as a name of _WATCHING; empty is the run itself."""
    for frame in frames:
        for kind, pattern in _WATCHING.items():
            if re.search(pattern, frame):
                return kind
    return ""


def main() -> int:
    """Run and count."""
    bars = Bars()
    if not _SAMPLER.exists():
        missing = NotRun(f"there is no {_SAMPLER}: pip install py-spy")
        bars.at_most("observability_of_a_run", missing, "of its CPU", needs=NEEDS_SHARE)
        return bars.exit_code
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder, hidden=128, layers=4)
        watch = Watch(folder, "watched")
        readings = run_slipstream(folder, "watched", _SETTINGS, began=watch.begin)
        watch.end()
        spent = Counter[str]()
        for frames, count in stacks(watch.samples):
            spent[kind_of(frames)] += count
    cpu_s = readings[-1].cpu_s
    sampled = sum(spent.values())
    print(f"{cpu_s:.0f} CPU seconds in {readings[-1].step} steps; {sampled / _RATE:.0f} s sampled")
    for kind in _WATCHING:
        print(f"{kind}: {spent[kind] / _RATE:.2f} s, {spent[kind] / _RATE / cpu_s:.2%}")
    watching = (sampled - spent[""]) / _RATE
    bars.at_most("observability_of_a_run", watching / cpu_s, "of its CPU", needs=NEEDS_SHARE)
    return bars.exit_code


if __name__ == "__main__":
    sys.exit(main())

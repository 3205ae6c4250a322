"""Runs mutants, each in a process forked from one that has the libraries already, in a copied tree.

Nothing here writes into the repository but its ``.cache``.
"""

import contextlib
import importlib
import os
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

import psutil
import pytest

from tests.mutation.mutants import Mutant
from tests.mutation.record import Record
from tests.mutation.trees import environment

# Limits of a run, in multiples of what its tests took when they were recorded, on the same machine
# and slowed by coverage; what a run takes before its first test is added.
_LIMIT = 5.0
_START_S = 60.0
_IDLE_S = 30.0  # a process that sleeps for so long hangs: no hermetic test waits for a clock
_IDLE_SHARE = 0.02  # of one core, or less, is sleep
_CHECK_S = 5.0  # of tests that are run without a mutant, for each package
_MEMORY_BYTES = 6 << 30
_FIRST_STAGE = 40  # tests: most mutants die in them, and few test files are imported
_POLL_S = 0.02
_LIBRARIES = (
    "torch", "numpy", "msgspec", "zmq", "zmq.asyncio", "aiohttp", "aiohttp.web", "hypothesis",
    "hypothesis.stateful", "prometheus_client", "safetensors.torch", "tokenizers", "xxhash",
    "pytest_timeout", "xdist", "jinja2", "rich.console", "redis.asyncio", "psutil",
)  # fmt: skip


class Verdict(StrEnum):
    """What came of a mutant."""

    KILLED = "killed"
    TIMED_OUT = "timed out"
    SURVIVED = "survived"
    EQUIVALENT = "equivalent"
    UNREACHED = "not executed"


@dataclass(frozen=True, slots=True)
class Outcome:
    """A mutant, what came of it, and the explanation."""

    mutant: Mutant
    verdict: Verdict
    remark: str = ""


# ---- one run


@dataclass(slots=True)
class _Job:
    """A mutant on its way through stages of tests, in a tree of its own."""

    mutant: Mutant
    stages: list[list[str]]
    left_out: int  # tests that would have cost more than is allowed
    tree: Path
    source: bytes  # of the file, without the mutant
    times: os.stat_result
    pid: int = 0
    began_s: float = 0.0
    limit_s: float = 0.0
    idle_s: float = 0.0
    seen: tuple[float, float] = (0.0, 0.0)  # when the process was last not asleep, and its CPU then


@dataclass(slots=True)
class Runner:
    """Runs mutants, as many at once as there are trees.

    Args:
        record: which tests reach what, and how long they take.
        root: the repository.
        trees: copies of it, one for each process.
        most_s: recorded seconds of the tests that one mutant is run against.
        start_s: what a run takes at most before its first test, in seconds of CPU.
    """

    record: Record
    root: Path
    trees: Sequence[Path]
    most_s: float
    start_s: float = _START_S
    _running: list[_Job] = field(default_factory=list)
    _stamp: int = 2_000_000_000  # a time of each mutated file's own: no bytecode of another fits

    def check(self, mutants: Sequence[Mutant]) -> None:
        """Run the tests of some mutants without a mutant.

        Raises:
            RuntimeError: they fail, so that they would kill anything.
        """

        def note(outcome: Outcome) -> None:
            if outcome.verdict in {Verdict.KILLED, Verdict.TIMED_OUT}:
                place = f"{outcome.mutant.file}:{outcome.mutant.line}"
                raise RuntimeError(
                    f"tests of {place} fail without a mutant: {outcome.verdict}, {outcome.remark}"
                )

        most_s, self.most_s = self.most_s, min(self.most_s, _CHECK_S)
        self.run([replace(one, end=one.start, new=b"") for one in mutants], note)
        self.most_s = most_s

    def run(self, mutants: Sequence[Mutant], done: Callable[[Outcome], None]) -> None:
        """Run mutants; report what came of each as soon as it is known."""
        _import_libraries()
        waiting, free = list(reversed(mutants)), list(self.trees)
        try:
            while waiting or self._running:
                while waiting and free:
                    mutant = waiting.pop()
                    tests = self.record.reaching(mutant, self.trees[0])
                    if tests:
                        self._begin(mutant, tests, free.pop())
                    else:
                        done(Outcome(mutant, Verdict.UNREACHED))
                time.sleep(_POLL_S)
                for job in list(self._running):
                    outcome = self._poll(job)
                    if outcome is not None:
                        self._restore(job)
                        self._running.remove(job)
                        free.append(job.tree)
                        done(outcome)
        finally:
            for job in self._running:
                _end(job.pid)

    def _begin(self, mutant: Mutant, tests: list[str], tree: Path) -> None:
        chosen = affordable(tests, [self.record.tests[name].wall_s for name in tests], self.most_s)
        stages = [chosen[:_FIRST_STAGE], chosen[_FIRST_STAGE:]]
        path = tree / mutant.file
        job = _Job(
            mutant=mutant,
            stages=[one for one in stages if one],
            left_out=len(tests) - len(chosen),
            tree=tree,
            source=path.read_bytes(),
            times=path.stat(),
        )
        self._stamp += 2
        path.write_bytes(mutant.apply(job.source))
        os.utime(path, (self._stamp, self._stamp))
        self._start(job)
        self._running.append(job)

    def _restore(self, job: _Job) -> None:
        path = job.tree / job.mutant.file
        path.write_bytes(job.source)
        os.utime(path, ns=(job.times.st_atime_ns, job.times.st_mtime_ns))

    def _start(self, job: _Job) -> None:
        """Fork a process for the next stage."""
        times = [self.record.tests[name] for name in job.stages[0]]
        cpu_s = _LIMIT * sum(one.cpu_s for one in times) + self.start_s
        job.limit_s = _LIMIT * sum(one.wall_s for one in times) + 3 * self.start_s
        job.idle_s = _IDLE_S + max(_LIMIT * (one.wall_s - one.cpu_s) for one in times)
        sys.stdout.flush()
        sys.stderr.flush()
        job.pid = os.fork()
        if job.pid == 0:
            _run_tests(job.tree, self.root, job.stages[0], cpu_s)
        job.began_s = time.monotonic()
        job.seen = (job.began_s, 0.0)

    def _poll(self, job: _Job) -> Outcome | None:
        pid, status = os.waitpid(job.pid, os.WNOHANG)
        if pid == 0:
            if self._may_continue(job):
                return None
            _end(job.pid)
            return Outcome(job.mutant, Verdict.TIMED_OUT)
        _end_group(job.pid)
        code = os.waitstatus_to_exitcode(status)
        if code == -signal.SIGXCPU:
            return Outcome(job.mutant, Verdict.TIMED_OUT)
        if code == _FAULT:
            raise RuntimeError(f"no test was run: {(job.tree / _LOG).read_text()[-3000:]}")
        if code != pytest.ExitCode.OK:
            return Outcome(job.mutant, Verdict.KILLED, _last_line(job.tree))
        job.stages.pop(0)
        if job.stages:
            self._start(job)
            return None
        left_out = f"; {job.left_out} more tests were left out (--seconds)" if job.left_out else ""
        return Outcome(job.mutant, Verdict.SURVIVED, left_out)

    def _may_continue(self, job: _Job) -> bool:
        """Return whether a run is within its limits, and not asleep for good."""
        now_s = time.monotonic()
        if now_s - job.seen[0] > 1.0:
            cpu_s = _cpu_s(job.pid)
            if cpu_s - job.seen[1] > _IDLE_SHARE * (now_s - job.seen[0]):
                job.seen = (now_s, cpu_s)
        return now_s - job.began_s < job.limit_s and now_s - job.seen[0] < job.idle_s


def affordable(tests: Sequence[str], seconds: Sequence[float], most_s: float) -> list[str]:
    """Return the tests from the first that fit into so many seconds; the first fits always."""
    chosen: list[str] = []
    total_s = 0.0
    for name, took_s in zip(tests, seconds, strict=True):
        if chosen and total_s + took_s > most_s:
            continue
        total_s += took_s
        chosen.append(name)
    return chosen


class Chosen:
    """A pytest plugin: the named tests, in their order, and nothing else."""

    def __init__(self, names: Sequence[str]) -> None:
        self._place = {name: at for at, name in enumerate(names)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Leave out the others and put these in order."""
        others = [item for item in items if item.nodeid not in self._place]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item.nodeid in self._place]
        items.sort(key=lambda item: self._place[item.nodeid])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Name what fails, on the last line of the log."""
        if report.failed:
            Path(_KILLED_BY).write_text(report.nodeid)


_KILLED_BY = "killed-by.txt"  # in a tree
_LOG = "pytest.log"
_FAULT = 70  # exit code of a fork in which pytest did not even begin


def _run_tests(tree: Path, root: Path, names: Sequence[str], cpu_s: float) -> None:
    """Run tests in this process, a fork, and end it with pytest's exit code."""
    code = _FAULT
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (int(cpu_s), int(cpu_s) + 30))
        resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_BYTES, _MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.chdir(tree)
        os.environ.update(environment(tree, root))  # noqa: TID251
        for file in (_KILLED_BY, _LOG):
            Path(file).unlink(missing_ok=True)
        shutil.rmtree(tree / ".hypothesis", ignore_errors=True)
        log = os.open(_LOG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        ours = {"slipstream", *(path.stem for path in tree.iterdir())}
        for name in [one for one in sys.modules if one.partition(".")[0] in ours]:
            del sys.modules[name]
        others = [one for one in sys.path if one not in {"", str(root), str(root / "src")}]
        sys.path[:] = [str(tree / "src"), str(tree), *others]
        files = sorted({name.partition("::")[0] for name in names})
        words = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--hypothesis-seed=0"]
        words += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # hypothesis is there already
        code = int(pytest.main([*words, "--rootdir", str(tree), *files], plugins=[Chosen(names)]))
    except BaseException:  # noqa: BLE001 whatever it is, this fork must not continue as its parent
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _import_libraries() -> None:
    """Import once what every fork needs; none of it is ours."""
    os.environ["OMP_NUM_THREADS"] = "1"  # noqa: TID251 no threads: they do not outlive a fork
    for name in _LIBRARIES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def _processes(pid: int) -> Iterator[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        first = psutil.Process(pid)
        yield first
        yield from first.children(recursive=True)


def _cpu_s(pid: int) -> float:
    total_s = 0.0
    for process in _processes(pid):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total_s += times.user + times.system + times.children_user + times.children_system
    return total_s


def _end(pid: int) -> None:
    """Kill a run and what it started."""
    for process in [*_processes(pid)][::-1]:
        with contextlib.suppress(psutil.Error):
            process.kill()
    _end_group(pid)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def _end_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _last_line(tree: Path) -> str:
    killed_by = tree / _KILLED_BY
    return killed_by.read_text() if killed_by.exists() else "could not be imported or collected"

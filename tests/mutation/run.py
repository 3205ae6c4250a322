"""Runs mutants, each in a copied tree: nothing here writes into the repository."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import StrEnum
from importlib.util import cache_from_source
from pathlib import Path
from queue import SimpleQueue

from tests.mutation.mutants import Mutant
from tests.mutation.record import Record
from tests.mutation.trees import environment

# Limits of a run, in multiples of what its tests took when they were recorded, on the same machine
# and slowed by coverage.
_LIMIT = 5.0
_HANGS_S = 60.0  # at least, of one test
_START_S = 300.0  # in which a run imports everything
_CHECK_S = 5.0  # of tests that are run without a mutant, for each package
_FIRST_STAGE = 40  # tests: most mutants die in them, and few test files are imported
_MEMORY_BYTES = 6 << 30


class Verdict(StrEnum):
    """What came of a mutant."""

    KILLED = "killed"
    SURVIVED = "survived"
    EQUIVALENT = "equivalent"
    UNREACHED = "not executed"


@dataclass(frozen=True, slots=True)
class Outcome:
    """A mutant, what came of it, and the explanation."""

    mutant: Mutant
    verdict: Verdict
    remark: str = ""


class Runner:
    """Runs mutants, as many at once as there are trees.

    Args:
        record: which tests reach what, and how long they take.
        root: the repository.
        trees: copies of it, one for each process.
        most_s: recorded seconds of the tests that one mutant is run against.
        hangs_s: after how long a test is ended that took less than a fifth of it when recorded.
    """

    def __init__(
        self,
        record: Record,
        root: Path,
        trees: Sequence[Path],
        most_s: float,
        hangs_s: float = _HANGS_S,
    ) -> None:
        self._record, self._root, self._most_s, self._hangs_s = record, root, most_s, hangs_s
        self._reading, self._workers = trees[0], len(trees)
        self._free: SimpleQueue[Path] = SimpleQueue()
        for tree in trees:
            self._free.put(tree)

    def check(self, mutants: Sequence[Mutant]) -> None:
        """Run the tests of some mutants without a mutant.

        Raises:
            RuntimeError: they fail, so that they would kill anything.
        """
        for one in mutants:
            outcome = self._outcome(replace(one, end=one.start, new=b""), _CHECK_S)
            if outcome.verdict is Verdict.KILLED:
                place = f"{one.file}:{one.line}"
                raise RuntimeError(f"tests of {place} fail without a mutant: {outcome.remark}")

    def run(self, mutants: Sequence[Mutant], done: Callable[[Outcome], None]) -> None:
        """Run mutants; report in their order what came of each."""
        with ThreadPoolExecutor(self._workers) as pool:
            for outcome in pool.map(lambda one: self._outcome(one, self._most_s), mutants):
                done(outcome)

    def _outcome(self, mutant: Mutant, most_s: float) -> Outcome:
        tests = self._record.reaching(mutant, self._reading)
        if not tests:
            return Outcome(mutant, Verdict.UNREACHED)
        chosen = self._affordable(tests, most_s)
        tree = self._free.get()
        source = (tree / mutant.file).read_bytes()
        try:
            _write(tree / mutant.file, mutant.apply(source))
            for names in (chosen[:_FIRST_STAGE], chosen[_FIRST_STAGE:]):
                killed_by = self._run_tests(names, tree) if names else None
                if killed_by is not None:
                    return Outcome(mutant, Verdict.KILLED, killed_by)
        finally:
            _write(tree / mutant.file, source)
            self._free.put(tree)
        left_out = len(tests) - len(chosen)
        remark = f"; {left_out} more tests were left out (--seconds)" if left_out else ""
        return Outcome(mutant, Verdict.SURVIVED, remark)

    def _affordable(self, tests: Sequence[str], most_s: float) -> list[str]:
        """Return the tests from the first that fit into so many seconds; the first fits always."""
        chosen: list[str] = []
        for name in tests:
            seconds = self._record.tests[name].seconds
            if not chosen or seconds <= most_s:
                chosen.append(name)
                most_s -= seconds
        return chosen

    def _run_tests(self, names: Sequence[str], tree: Path) -> str | None:
        """Return which of these tests failed first, or how else they did not end well."""
        seconds = [self._record.tests[name].seconds for name in names]
        hangs_s = max(self._hangs_s, _LIMIT * max(seconds))
        (tree / "chosen.txt").write_text("\n".join(names))
        run = subprocess.Popen(
            [
                *("prlimit", f"--data={_MEMORY_BYTES}", "--core=0"),
                *(sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "--no-header"),
                *("-p", "no:cacheprovider", "-o", f"timeout={hangs_s}", "@chosen.txt"),
            ],
            cwd=tree,
            env=environment(tree, self._root),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            said, _ = run.communicate(timeout=_LIMIT * sum(seconds) + hangs_s + _START_S)
        except subprocess.TimeoutExpired:
            return "hangs"
        finally:
            _end_group(run)
        if run.returncode == 0:
            return None
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)
        return failed.group(1) if failed else said.strip().rpartition("\n")[2]


def _write(file: Path, source: bytes) -> None:
    """Write a source, and forget what another one was compiled to."""
    file.write_bytes(source)
    Path(cache_from_source(file)).unlink(missing_ok=True)


def _end_group(run: subprocess.Popen[str]) -> None:
    """Kill a run and what it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(run.pid, signal.SIGKILL)
    run.wait()

"""Long measurements in parts: each appends what it ends in its minutes to a file of results.

A run that a part had no time to end is a line without a result, made again by the next part.
"""

import argparse
import fcntl
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Generic, TypeVar

import msgspec

from benchmarks.recording import Line, append, lines_of

Result = TypeVar("Result")


class Run(Line, Generic[Result], frozen=True):
    """A line of the results."""

    system: str
    seed: int
    result: Result | None  # None where the part had no time to end it
    settings: str = ""  # what the command changed of the usual ones


class _MinutesOverError(Exception):
    """End of a part while a run is in hand."""


def read(path: Path, kind: type[Result], settings: str = "") -> list[Run[Result]]:
    """Return a line of each system and seed: the newest that ended, or one that did not.

    Raises:
        ValueError: a line cannot be read, or is of other settings.
    """
    newest: dict[tuple[str, int], Run[Result]] = {}
    for run in lines_of(path, Run[kind]):  # type: ignore[valid-type]
        if run.settings != settings:
            made, wanted = (text or "the usual settings" for text in (run.settings, settings))
            raise ValueError(f"{path} has runs of {made}, not of {wanted}: give another --out")
        before = newest.get((run.system, run.seed))
        if run.result is not None or before is None:
            newest[run.system, run.seed] = run
    return list(newest.values())


def ended(runs: Sequence[Run[Result]]) -> dict[str, dict[int, Result]]:
    """Return system -> seed -> result of the runs that ended."""
    results: dict[str, dict[int, Result]] = {}
    for run in runs:
        if run.result is not None:
            results.setdefault(run.system, {})[run.seed] = run.result
    return results


def paired(runs: Sequence[Run[Result]], systems: Sequence[str]) -> tuple[list[int], list[int]]:
    """Return the seeds that all of the systems ended, and the ones that were only begun."""
    done = ended(runs)
    begun = {run.seed for run in runs if run.system in systems}
    whole = begun.intersection(*(done.get(system, {}) for system in systems))
    return sorted(whole), sorted(begun - whole)


def changed(parser: argparse.ArgumentParser, arguments: argparse.Namespace, *names: str) -> str:
    """Return which of these arguments are other than usual, for ``Run.settings``."""
    given = {name: getattr(arguments, name) for name in names}
    return " ".join(
        f"--{name} {value}" for name, value in given.items() if value != parser.get_default(name)
    )


def mixed(runs: Sequence[Run[Result]], systems: Collection[str]) -> list[str]:
    """Return a line for each seed whose runs of these systems are of several machines."""
    machines: dict[int, dict[str, list[str]]] = {}
    for run in runs:
        if run.result is not None and run.origin is not None and run.system in systems:
            of_seed = machines.setdefault(run.seed, {})
            of_seed.setdefault(run.origin.machine, []).append(run.system)
    return [
        f"seed {seed} is of several machines: "
        + "; ".join(f"{', '.join(made)} of {machine}" for machine, made in of_seed.items())
        for seed, of_seed in machines.items()
        if len(of_seed) > 1
    ]


def absent(runs: Sequence[Run[Result]], jobs: Iterable[tuple[str, int]]) -> list[str]:
    """Return a line for each system with seeds that are in no figure, and those of ``mixed``.

    Args:
        runs: Lines of the results.
        jobs: System and seed of each run that is wanted.
    """
    jobs = list(jobs)
    done, begun = ended(runs), {(run.system, run.seed) for run in runs}
    missing: dict[str, list[str]] = {}
    for system, seed in jobs:
        if seed not in done.get(system, {}):
            text = f"{seed} (begun)" if (system, seed) in begun else str(seed)
            missing.setdefault(system, []).append(text)
    lines = [f"not there: {system}: {', '.join(seeds)}" for system, seeds in missing.items()]
    return lines + mixed(runs, {system for system, _ in jobs})


def turns(systems: Sequence[str], seeds: Iterable[int]) -> Iterator[tuple[str, int]]:
    """Yield all systems within a seed, in reverse for every second seed."""
    for seed in seeds:
        yield from ((system, seed) for system in systems[:: 1 if seed % 2 == 0 else -1])


def run_part(
    file: Path,
    kind: type[Result],
    minutes: float,
    jobs: Iterable[tuple[str, int]],
    work: Callable[[str, int], Result],
    *,
    packages: str = "",
    settings: str = "",
) -> None:
    """Do what the file lacks until the minutes are over.

    Args:
        file: Lines of results, appended to.
        kind: Type of a result.
        minutes: Time of this part; a run in hand at its end is stopped.
        jobs: System and seed of each run, asked for one by one.
        work: Run of a system and a seed.
        packages: Further folder of packages, whose versions a line has.
        settings: What the command changed of the usual ones.

    Raises:
        ValueError: a line cannot be read or is of other settings, a result could not be read, or
            another process adds to the file.
    """
    deadline_s = time.monotonic() + 60 * minutes
    with _alone(file):
        for system, seed in jobs:
            left_s = int(deadline_s - time.monotonic())
            if seed in ended(read(file, kind, settings)).get(system, {}):
                continue
            if left_s < 1:
                return
            result = None
            try:
                with _stopped_after(left_s):
                    result = msgspec.json.decode(msgspec.json.encode(work(system, seed)), type=kind)
            except _MinutesOverError:
                print(f"{system}, seed {seed} was not ended", flush=True)
            append(file, Run(system, seed, result, settings), packages)


@contextmanager
def _alone(file: Path) -> Iterator[None]:
    """Have one process at a time add to a file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"another process adds to {file}") from error
        yield


@contextmanager
def _stopped_after(seconds: int) -> Iterator[None]:
    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise _MinutesOverError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)

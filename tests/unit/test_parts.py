"""Measurements in parts: what a file of results holds, and what a part adds to it."""

import signal
from pathlib import Path

import msgspec

from benchmarks.parts import Run, absent, ended, paired, read, run_part, turns


def test_the_newest_ended_run_of_a_seed_counts(tmp_path: Path):
    file = tmp_path / "results.jsonl"
    assert read(file, float) == []
    runs = [Run("a", 0, None), Run("a", 0, 0.5), Run("a", 0, None), Run("b", 0, None)]
    file.write_bytes(b"".join(msgspec.json.encode(run) + b"\n" for run in runs))
    assert read(file, float) == [runs[1], runs[3]]
    assert ended(read(file, float)) == {"a": {0: 0.5}}


def test_seeds_that_were_only_begun_are_told_from_pairs():
    runs = [Run("a", 0, 1.0), Run("b", 0, 2.0), Run("a", 1, 1.0), Run("b", 2, None), Run("c", 3, 1)]
    assert paired(runs, ("a", "b")) == ([0], [1, 2])
    assert paired(runs, ("a", "d")) == ([], [0, 1])


def test_a_wanted_seed_that_is_in_no_figure_is_named():
    runs = [Run("a", 0, 1.0), Run("a", 2, None)]
    wanted = turns("ab", range(3))
    assert absent(runs, wanted) == ["not there: b: 0, 1, 2", "not there: a: 1, 2 (begun)"]


def test_systems_alternate_within_and_between_seeds():
    assert list(turns("ab", range(2))) == [("a", 0), ("b", 0), ("b", 1), ("a", 1)]


def test_a_part_does_what_the_file_lacks_and_names_what_it_had_no_time_for(tmp_path: Path):
    file, done = tmp_path / "results.jsonl", []

    def work(system: str, seed: int) -> float:
        if system == "b" and len(done) < 2:
            signal.raise_signal(signal.SIGALRM)  # minutes are over
        done.append((system, seed))
        return 0.5

    before = signal.getsignal(signal.SIGALRM)
    run_part(file, float, 90, turns("ab", range(2)), work)
    assert done == [("a", 0), ("a", 1)]
    assert paired(read(file, float), "ab") == ([], [0, 1])
    run_part(file, float, 90, turns("ab", range(2)), work)
    assert done[2:] == [("b", 0), ("b", 1)]
    assert paired(read(file, float), "ab") == ([0, 1], [])
    run_part(file, float, 0, turns("ab", range(3)), work)
    assert len(done) == 4
    assert signal.getsignal(signal.SIGALRM) == before

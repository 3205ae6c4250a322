"""Measurements in parts: what a file of results holds, and what a part adds to it."""

import argparse
import math
import signal
from pathlib import Path

import msgspec
import pytest

from benchmarks.parts import Run, absent, changed, ended, paired, read, run_part, turns
from benchmarks.recording import Origin


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


def test_runs_of_other_settings_are_refused_before_anything_runs(tmp_path: Path):
    file, parser = tmp_path / "results.jsonl", argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    usual, other = (
        changed(parser, parser.parse_args(line), "steps") for line in ([], ["--steps=3"])
    )
    assert (usual, other) == ("", "--steps 3")
    run_part(file, float, 90, [("a", 0)], lambda *_: 0.5, settings=other)
    assert ended(read(file, float, other)) == {"a": {0: 0.5}}
    with pytest.raises(ValueError, match="runs of --steps 3, not of the usual settings: give"):
        run_part(file, float, 90, [("a", 1)], lambda *_: pytest.fail("ran"), settings=usual)


def test_a_result_that_could_not_be_read_back_is_not_written(tmp_path: Path):
    file = tmp_path / "results.jsonl"
    with pytest.raises(msgspec.ValidationError):
        run_part(file, float, 90, [("a", 0)], lambda *_: math.nan)
    assert read(file, float) == []


def test_one_process_at_a_time_adds_to_a_file(tmp_path: Path):
    file = tmp_path / "results.jsonl"

    def work(*_: object) -> float:
        with pytest.raises(ValueError, match="another process adds to"):
            run_part(file, float, 90, [("b", 0)], work)
        return 0.5

    run_part(file, float, 90, [("a", 0)], work)
    assert ended(read(file, float)) == {"a": {0: 0.5}}


def test_a_seed_of_several_machines_is_named():
    here, there = (Origin(machine, "", "", "") for machine in ("here", "there"))
    runs = [Run(system, 0, 1.0, origin=here) for system in "ab"]
    runs += [Run("c", 0, 1.0, origin=there), Run("a", 1, 1.0, origin=there)]
    assert absent(runs, [("a", 0), ("b", 0)]) == []
    line = "seed 0 is of several machines: a, b of here; c of there"
    assert absent(runs, [("a", 0), ("b", 0), ("c", 0)]) == [line]

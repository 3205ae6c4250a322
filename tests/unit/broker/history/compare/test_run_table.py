"""Figures of a run, read from metrics.jsonl as it grows, or from the page's file."""

from pathlib import Path

import numpy as np

from slipstream.broker.history.columns import StoredState, write_state
from slipstream.broker.history.compare.curves import Curve
from slipstream.broker.history.compare.run_table import RunTable
from slipstream.broker.history.history import RunHistory
from slipstream.wire.messages.status import StepPoint
from tests.support.run_folders import write_run
from tests.support.wire_samples import STATUS


def read(folder: Path) -> RunTable:
    table = RunTable(folder)
    table.refresh()
    return table


def curve_of(table: RunTable, name: str) -> Curve:
    found = table.curve(name)
    assert found is not None
    return found


def test_steps_and_evaluations_are_curves_with_their_axes(tmp_path: Path):
    table = read(write_run(tmp_path / "a", steps=3, scores=[1.0]))
    assert table.names == {"reward/mean", "policy/loss", "eval/mean@1"}
    reward = curve_of(table, "reward/mean")
    assert reward.step.tolist() == [1, 2, 3]
    assert reward.wall_s.tolist() == [3, 6, 9]
    assert reward.trained_tokens.tolist() == [1000, 2000, 3000]
    assert curve_of(table, "eval/mean@1").step.tolist() == [0, 3]
    assert table.curve("nothing") is None


def test_only_what_was_appended_is_read_again_and_half_a_line_waits(tmp_path: Path):
    folder = write_run(tmp_path / "a", steps=2)
    table = read(folder)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "reward/mean": 0.5, "new": 1.0}\n{"step": 4, "rew')
    table.refresh()
    assert curve_of(table, "reward/mean").step.tolist() == [1, 2, 3]
    assert curve_of(table, "new").step.tolist() == [3]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('ard/mean": 0.75}\n')
    table.refresh()
    assert curve_of(table, "reward/mean").value.tolist()[-2:] == [0.5, 0.75]


def test_a_file_that_was_cut_is_read_anew(tmp_path: Path):
    folder = write_run(tmp_path / "a", steps=3)
    table = read(folder)
    new = folder / "new"
    new.write_text('{"step": 1, "reward/mean": 9.0}\n')
    new.replace(folder / "metrics.jsonl")
    table.refresh()
    assert curve_of(table, "reward/mean").value.tolist() == [9.0]


def test_lines_of_others_and_values_that_are_none_are_left_out(tmp_path: Path):
    folder = write_run(tmp_path / "a", steps=1)
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 2, "reward/mean": null}\n{"step": "x"}\n\xff\n[]\n')
    assert curve_of(read(folder), "reward/mean").step.tolist() == [1]


def test_a_run_without_the_file_is_read_from_its_page(tmp_path: Path):
    folder = write_run(tmp_path / "a", steps=20, scores=[1.0, 0.0])
    (folder / "metrics.jsonl").unlink()
    history = RunHistory(began_s=0.0)
    for step in (1, 20):
        history.step(StepPoint(step=step, at_s=0.0, metrics={"reward/mean": 0.5}), 10.0 * step)
    state = StoredState(at_s=0.0, status=STATUS, history=history.columns())
    write_state(folder / "dashboard" / "state.msgpack", state)
    table = read(folder)
    reward = curve_of(table, "reward/mean")
    assert (reward.step.tolist(), reward.wall_s.tolist()) == ([1, 20], [10.0, 200.0])
    assert np.isnan(reward.trained_tokens).all()
    evaluated = curve_of(table, "eval/mean@1")
    assert evaluated.step.tolist() == [0, 20]
    assert evaluated.wall_s.tolist() == [0.0, 200.0]


def test_a_folder_without_figures_has_none(tmp_path: Path):
    assert read(tmp_path).names == set()

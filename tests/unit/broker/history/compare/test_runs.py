"""Run folders in the list of the comparison page, and the scores of their final evaluations."""

import os
from pathlib import Path

import pytest

from slipstream.broker.history.compare.runs import (
    ComparedRun,
    FinalScores,
    Missing,
    named,
    runs_in,
    sampling_of,
)
from slipstream.wire.errors import ConfigError
from slipstream.wire.process.processes import locked
from tests.support.run_folders import write_lines, write_run


def test_a_row_has_state_steps_and_newest_evaluation(tmp_path: Path):
    run = ComparedRun("a", write_run(tmp_path / "a", scores=[0.0, 1.0, 1.0, 1.0]))
    row = run.row()
    assert (row.state, row.steps, row.total_steps) == ("finished", 40, 40)
    assert (row.eval_step, row.eval_mean, row.eval_first) == (40, 0.75, 0.0)
    assert (row.eval_problems, row.eval_sampling) == (4, "greedy")


def test_a_run_without_an_end_is_running_only_while_it_has_a_broker(tmp_path: Path):
    run = ComparedRun("a", write_run(tmp_path / "a", outcome="running"))
    assert run.row().state == "interrupted"
    with locked(run.folder / "broker.lock", "is its broker"):
        assert run.row().state == "running"


def test_a_folder_with_settings_alone_has_not_begun(tmp_path: Path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "resolved.toml").write_text("")
    (run,) = named(runs_in(tmp_path))
    row = run.row()
    assert (row.state, row.steps, row.eval_mean) == ("not begun", 0, None)
    assert run.final_scores() == Missing("a has no evaluation (eval.file)")


def test_scores_of_a_problem_are_the_mean_of_its_answers(tmp_path: Path):
    run = ComparedRun("a", write_run(tmp_path / "a", scores=[0.0, 1.0]))
    answers = [
        {"problem": at, "data_source": "s", "prompt": "p", "reward": reward}
        for at, reward in ((0, 0.0), (0, 1.0), (1, 1.0))
    ]
    write_lines(run.folder / "eval" / "step-000040.jsonl", answers)
    assert run.final_scores() == FinalScores(40, {("s", 0, "p"): 0.5, ("s", 1, "p"): 1.0})


def test_a_part_of_the_answers_is_no_evaluation_and_the_reason_names_the_setting(tmp_path: Path):
    run = ComparedRun("a", write_run(tmp_path / "a", scores=[0.0, 1.0, 1.0]))
    answers = run.folder / "eval" / "step-000040.jsonl"
    answers.write_text("".join(answers.read_text().splitlines(keepends=True)[:2]))
    found = run.final_scores()
    assert isinstance(found, Missing)
    assert "2 of 3 problems" in found.reason
    assert "eval.keep_answers" in found.reason
    answers.unlink()
    found = run.final_scores()
    assert isinstance(found, Missing)
    assert "no answers recorded" in found.reason


def test_runs_of_a_folder_come_newest_first_without_what_is_no_run(tmp_path: Path):
    for age, name in enumerate(("new", "old")):
        settings = write_run(tmp_path / name) / "resolved.toml"
        os.utime(settings, (1_000 - age, 1_000 - age))
    (tmp_path / "keys").mkdir()
    (tmp_path / "note.txt").write_text("")
    assert [folder.name for folder in runs_in(tmp_path)] == ["new", "old"]


def test_equal_names_get_the_folder_that_tells_them_apart(tmp_path: Path):
    folders = [write_run(tmp_path / parent / "run") for parent in ("x", "y")]
    assert [run.name for run in named(folders)] == ["x/run", "y/run"]


def test_what_is_no_run_or_named_twice_is_refused(tmp_path: Path):
    run = write_run(tmp_path / "a")
    with pytest.raises(ConfigError, match="no run folder"):
        named([run, tmp_path])
    with pytest.raises(ConfigError, match="named twice"):
        named([run, tmp_path / "x" / ".." / "a"])


@pytest.mark.parametrize(
    ("temperature", "text"),
    [("0.0", "greedy"), ("1.0", "sampled at temperature 1"), ("", ""), ('"hot"', "")],
)
def test_how_an_evaluation_chose_its_answers(temperature: str, text: str):
    assert sampling_of(temperature) == text

"""What the comparison of learning with TRL computes from a file of results."""

import json
import tomllib
from pathlib import Path

import pytest

from benchmarks.bars import Bars, NotRun
from benchmarks.learning_vs_trl import (
    CONTROL,
    Point,
    jobs_of,
    learning_bars,
    panels,
    points_of,
    ratio,
    runs_table,
    seconds_to,
    trl_bars,
    write_gym,
)
from benchmarks.parts import Run, absent
from benchmarks.run_measurement import ROOT, Reading
from benchmarks.trl_grpo import scorer
from benchmarks.vs_trl import OURS
from tests.support.chat_model import write_chat_model


def _points(*scores: float, step_s: float = 10.0) -> list[Point]:
    return [Point(n, n * step_s, 2 * n * step_s, score) for n, score in enumerate(scores)]


def test_the_second_of_a_gain_is_interpolated():
    points = _points(0.2, 0.3, 0.5, 0.1)
    assert seconds_to(points, "wall_s") == pytest.approx(15.0)
    assert seconds_to(points, "cpu_s") == pytest.approx(30.0)
    assert seconds_to(points, "wall_s", gain=0.4) is None


def test_only_seeds_that_both_ended_are_paired():
    ours = {0: _points(0.0, 0.4), 1: _points(0.0, 0.2), 2: _points(0.0, 0.2)}
    theirs = {0: _points(0.0, 0.2), 1: _points(0.0, 0.2)}
    assert ratio(ours, theirs, "wall_s") == pytest.approx(0.75)  # of 0.5 and 1
    assert ratio({2: ours[2]}, theirs, "wall_s") == NotRun("no seed was ended by both")
    flat = ours | {2: _points(0.0, 0.1)}  # short, although the other has not ended this seed
    assert ratio(flat, theirs, "wall_s") == NotRun(f"seed 2 of {OURS} did not gain 0.2")
    never = {0: _points(0.0, 0.1, 0.1)}  # takes more than the 20 s of its run
    assert ratio({0: ours[0]}, never, "wall_s") == pytest.approx(0.25)


def test_what_evaluations_took_is_left_out_and_kept():
    readings = [Reading(1, 110.0, 12.0), Reading(2, 125.0, 30.0), Reading(3, 140.0, 45.0)]
    spent = {0: (1.0, 2.0), 2: (4.0, 7.0)}
    points = points_of(readings, 100.0, {0: 0.1, 2: 0.2, 3: 0.3}, spent)
    assert points == [
        Point(0, 0, 0, 0.1),
        Point(2, 24.0, 28.0, 0.2, 1.0, 2.0),
        Point(3, 36.0, 38.0, 0.3, 4.0, 7.0),
    ]
    assert [(point.whole_wall_s, point.whole_cpu_s) for point in points[1:]] == [(25, 30), (40, 45)]


def test_the_best_way_of_the_other_is_the_baseline():
    slow, lines = [Point(0, 0, 0, 0.1), Point(1, 20.0, 40.0, 0.5, 20.0, 0.0)], list[str]()
    runs = [
        Run(OURS, 0, _points(0.1, 0.5)),
        Run("trl-padded-1", 0, slow),
        Run("trl-padded-2", 0, _points(0.1, 0.5)),
        Run("trl-padded-2", 1, None),
    ]
    best = "of trl-padded-2's"
    assert trl_bars(runs, Bars(lines.append)) == [
        f"{figure}_seconds_to_gain: 1.000 {best} with its evaluations" for figure in ("wall", "cpu")
    ]
    assert lines == [
        f"bar {figure}_seconds_to_gain: 1.000 {best}, pairs: 1 (needs <= 0.8): short"
        for figure in ("wall", "cpu")
    ]
    (note, _) = trl_bars(runs[:2], Bars(lines.append))
    assert note == "wall_seconds_to_gain: 0.250 of trl-padded-1's with its evaluations"
    assert "| trl-padded-1 | 0 | 0.100 | 0.500 | 10 | 20 | 20 | 40 | 20 | 0 |" in runs_table(runs)


def test_a_seed_that_is_in_no_figure_is_named():
    runs = [Run(OURS, 0, _points(0.1, 0.5)), Run(OURS, 2, None), Run(CONTROL, 0, None)]
    assert absent(runs, jobs_of([OURS, CONTROL])) == [
        f"not there: {CONTROL}: 0 (begun)",
        f"not there: {OURS}: 1, 2 (begun)",
    ]
    assert panels(runs[1:], [OURS], ["wall_s"]) == []
    (panel,) = panels(runs, [OURS, CONTROL], ["cpu_s"])
    assert panel.curves == {f"{OURS}, seeds: 1": [[(0.0, 0.1), (20.0, 0.5)]]}


def test_the_control_may_not_move_and_every_seed_has_to_gain():
    lines = list[str]()
    runs = [Run(OURS, n, _points(0.2, 0.5 + 0.1 * n)) for n in range(2)]
    learning_bars([*runs, Run(CONTROL, 0, _points(0.2, 0.23))], Bars(lines.append))
    assert [line.split()[1:3] for line in lines] == [
        ["lowest_start:", "0.200"],
        ["highest_start:", "0.200"],
        ["lowest_gain:", "0.300"],
        ["longest_run:", "0.167"],
        ["control_moves:", "0.030"],
    ]
    assert [line.rpartition(": ")[2] for line in lines] == ["ok"] * 4 + ["short"]


def test_both_sides_read_prompts_in_the_chat_template_and_score_by_the_settings(tmp_path: Path):
    config = tomllib.loads((ROOT / "configs" / "smollm2.toml").read_text())
    (sums,) = config["eval"]["sets"].values()
    config["data"]["sources"] = {"sums": sums | {"size": 2}}
    write_chat_model(tmp_path / "model")
    write_gym(tmp_path, config)
    rows = [json.loads(line) for line in (tmp_path / "held_out.jsonl").read_text().splitlines()]
    assert len(rows) == sums["size"]
    system = f"<|im_start|>system\n{config['data']['system_prompt']}<|im_end|>\n<|im_start|>user\n"
    assert rows[0]["prompt"].startswith(system)
    assert rows[0]["prompt"].endswith("<|im_end|>\n<|im_start|>assistant\n")
    truth = rows[0]["ground_truth"]
    score = scorer("slipstream.broker.rewards.numeric:score", {"relative": 0.01})
    assert score([f"It is {truth}.", "none"], [truth, truth]) == [1.0, 0.0]


def test_a_file_is_a_reward_on_both_sides(tmp_path: Path):
    file = tmp_path / "reward.py"
    text = "def score(data_source, solution_str, ground_truth, extra_info):\n    return {}"
    file.write_text(text.format("float(len(solution_str))"))
    assert scorer(f"{file}:score", {})(["ab"], ["1"]) == [2.0]
    other = tmp_path / "other_reward.py"
    other.write_text(text.format("float('nan')"))
    with pytest.raises(ValueError, match="gave 'ab' no reward"):
        scorer(f"{other}:score", {})(["ab"], ["1"])

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from slipstream.deploy.commands.show import show
from slipstream.wire.errors import ConfigError
from slipstream.wire.process.visible import visible

TRAINED = {
    "step": 3,
    "group_id": 7,
    "sibling": 1,
    "prompt": "3+4=",
    "answer": "7[bold]\x1b[31m",
    "reward": 0.5,
    "parts": {"format": 1.0},
    "finish_reason": "stop",
    "token_ids": [1, 2, 3, 4, 5, 6],
    "version_runs": [
        {"first_token": 2, "version": "v1.1", "step": 1},
        {"first_token": 3, "version": "v1.2", "step": 2},
    ],
    "logprob_abs_diff_by_run": [0.25, 0.0],
    "logprob_diffs": [-0.25, 0.0, 0.0, 0.0],
}
ANSWER = {
    "problem": 2,
    "sample": 0,
    "data_source": "sums",
    "prompt": "1+1=",
    "answer": "2",
    "ground_truth": "2",
    "reward": 1.0,
    "parts": {},
    "finish_reason": "stop",
    "response_tokens": 2,
    "versions": ["v1.4"],
}


def shown(folder: Path, **options: object) -> str:
    console = Console(file=io.StringIO(), width=120)
    show(folder, console, **{"count": 5, **options})  # type: ignore[arg-type]
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "rollouts").mkdir()
    rows = [TRAINED | {"step": step, "group_id": 7 + step} for step in range(4)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "rollouts/trained.jsonl").write_text(text)
    (tmp_path / "eval").mkdir()
    for step in (0, 4):
        row = ANSWER | {"answer": f"of step {step}"}
        (tmp_path / f"eval/step-{step:06d}.jsonl").write_text(json.dumps(row) + "\n")
    return tmp_path


def test_a_trajectory_is_shown_with_its_versions_and_differences(run: Path):
    text = shown(run, count=1)
    assert "step 3, group 10, sibling 1" in text
    assert "0.5 (format 1)" in text
    assert "v1.1: 1 tokens, |difference| 0.25, v1.2: 3 tokens, |difference| 0" in text
    assert "stop after 4" in text
    assert "largest |proximal - behavior| 0.25 nats" in text


def test_what_a_model_wrote_is_neither_markup_nor_obeyed_by_the_terminal(run: Path):
    text = shown(run, count=1)
    assert "7[bold]\\x1b[31m" in text
    assert "\x1b" not in text
    assert visible("a\tb\nc\x07\u202e") == "a\tb\nc\\x07\\u202e"


def test_steps_and_groups_can_be_chosen(run: Path):
    assert "group 8" in shown(run, step=1)
    assert "1 of" in shown(run, group=9)
    with pytest.raises(ConfigError, match="holds none of these"):
        shown(run, step=99)


def test_answers_of_the_newest_evaluation_or_of_one_step(run: Path):
    assert "of step 4" in shown(run, evaluation=True)
    assert "of step 0" in shown(run, evaluation=True, step=0)
    with pytest.raises(ConfigError, match=r"eval\.keep_answers"):
        shown(run, evaluation=True, step=2)


def test_run_without_recordings_names_the_setting_for_them(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"learner\.rollouts_per_step"):
        shown(tmp_path)


def test_a_damaged_row_is_named(run: Path):
    with (run / "rollouts/trained.jsonl").open("a") as file:
        file.write("{")
    with pytest.raises(ConfigError, match=r"row 5 of .*trained\.jsonl is damaged"):
        shown(run)

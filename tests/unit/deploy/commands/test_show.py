import io
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from unittest.mock import patch

import pytest

from slipstream.wire.errors import ConfigError
from slipstream.wire.files.image_folder import ImageFolder
from slipstream.wire.process.safe_text import visible
from tests.support.commands import call_command
from tests.support.drawn_images import drawn

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

OF_TURNS = TRAINED | {  # 1: prompt, 2: reply, 3: context, 9: of the second branch
    "prompt": "p",
    "answer": "not drawn",
    "reward": 1.25,
    "num_prompt_tokens": 2,
    "token_ids": [1, 1, 2, 2, 3, 2, 1, 1, 9, 2],
    "token_texts": [
        *('<function=look>"', "<eos>", "it is <7>\x1b[31m", "B"),
        *("SHARED", "SHARED", "new", "C"),
    ],
    "version_runs": [
        {"first_token": 2, "version": "v1.1", "step": 1},
        {"first_token": 3, "version": "v1.2", "step": 2},
        {"first_token": 9, "version": "v1.3", "step": 3},
    ],
    "logprob_abs_diff_by_run": [0.25, 0.5, 0.0],
    "turns": [
        {"first_token": 2, "num_tokens": 2},
        {"first_token": 5, "num_tokens": 1},
        {"first_token": 9, "num_tokens": 1},
    ],
    "turn_rewards": [0.25, 0.0, 1.0],
    "branches": [6],
}
ANSWER_OF_TURNS = ANSWER | {
    "answer": "user: 1+1=\nassistant: 3\nuser: No.\nassistant: 2",
    "replies": ["3", "2"],
    "turns": [{"first_token": 4, "num_tokens": 1}, {"first_token": 9, "num_tokens": 1}],
    "turn_rewards": [],
    "branches": [],
    "version_runs": [{"first_token": 4, "version": "v1.4"}],
}


def shown(folder: Path, **options: object) -> str:
    written = io.StringIO()
    with redirect_stdout(written), patch.dict("os.environ", COLUMNS="120"):
        call_command("show", folder, **options)
    return written.getvalue()


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
    text = shown(run, last=1)
    assert "step 3, group 10, sibling 1" in text
    assert "0.5 (format 1)" in text
    assert "v1.1: 1 tokens, |difference| 0.25, v1.2: 3 tokens, |difference| 0" in text
    assert "stop after 4" in text
    assert "largest |proximal - behavior| 0.25 nats" in text


def test_what_a_model_wrote_is_neither_markup_nor_obeyed_by_the_terminal(run: Path):
    text = shown(run, last=1)
    assert "7[bold]\\x1b[31m" in text
    assert "\x1b" not in text
    assert visible("a\tb\nc\x07\u202e") == "a\tb\nc\\x07\\u202e"


def test_steps_and_groups_can_be_chosen(run: Path):
    assert "group 8" in shown(run, step=1)
    assert "1 of" in shown(run, group=9)
    with pytest.raises(ConfigError, match="holds none of these"):
        shown(run, step=99)


def test_answers_of_the_newest_evaluation_or_of_one_step(run: Path):
    assert "of step 4" in shown(run, eval=True)
    assert "of step 0" in shown(run, eval=True, step=0)
    with pytest.raises(ConfigError, match=r"eval\.keep_answers"):
        shown(run, eval=True, step=2)


def test_run_without_recordings_names_the_setting_for_them(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"learner\.rollouts_per_step"):
        shown(tmp_path)


def test_a_damaged_row_is_named(run: Path):
    with (run / "rollouts/trained.jsonl").open("a") as file:
        file.write("{")
    with pytest.raises(ConfigError, match=r"row 5 of .*trained\.jsonl is damaged"):
        shown(run)


def lines(folder: Path, **options: object) -> list[str]:
    """Return what is in a panel."""
    return [line.strip("│ ") for line in shown(folder, last=1, **options).splitlines()]


def write_rows(run: Path, *rows: dict[str, object]) -> None:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (run / "rollouts/trained.jsonl").write_text(text)


def test_several_turns_are_drawn_one_by_one_with_what_came_between(run: Path):
    write_rows(run, OF_TURNS)
    assert lines(run)[1:17] == [
        *("prompt", "p", ""),
        "turn 1 of 3  2 tokens by v1.1, v1.2, reward 0.25, calls look",
        '<function=look>"<eos>',
        "it is <7>\\x1b[31m",
        "turn 2 of 3  1 tokens by v1.2, reward 0",
        "B",
        "branch 2 begins: its first 2 tokens are those of branch 1",
        "new",
        "turn 3 of 3  1 tokens by v1.3, reward 1",
        "C",
        "",
        "reward 1.25 (format 1)",
        "ended by stop after 4 in 3 turns and 2 branches",
        "chosen by v1.1: 1 tokens, |difference| 0.25, v1.2: 2 tokens, |difference| 0.5, "
        "v1.3: 1 tokens, |difference| 0",
    ]


def test_a_long_observation_is_cut_and_what_was_cut_is_counted(run: Path):
    texts = [*OF_TURNS["token_texts"]]  # type: ignore[misc]
    texts[2] = "BEGIN" + "x" * (8 << 20) + "END"
    write_rows(run, OF_TURNS | {"token_texts": texts})
    text = shown(run)
    assert len(text) < 8_000
    assert f"[{(8 << 20) + 8 - 2_000:,} characters are left out]" in text
    assert "BEGINx" in text
    assert "xEND" in text
    write_rows(run, OF_TURNS | {"prompt": "p" * (8 << 20)})
    assert len(shown(run)) < 60_000


def test_answers_of_several_turns_of_an_evaluation(run: Path):
    path = run / "eval/step-000004.jsonl"
    path.write_text(json.dumps(ANSWER_OF_TURNS) + "\n")
    assert lines(run, eval=True)[3:10] == [
        *("", "turn 1 of 2  1 tokens by v1.4", "3"),
        *("user: No.", "turn 2 of 2  1 tokens by v1.4", "2", ""),
    ]
    called = "user: 1+1=\nassistant: look({})\ntool: it is 2\nassistant: 2"
    replies = ["<function=look>" * 2, "2"]
    path.write_text(json.dumps(ANSWER_OF_TURNS | {"answer": called, "replies": replies}) + "\n")
    assert lines(run, eval=True)[3:8] == [
        *("", "turn 1 of 2  1 tokens by v1.4, calls look (2 times)", "<function=look>" * 2),
        *("tool: it is 2", "turn 2 of 2  1 tokens by v1.4"),
    ]
    rewritten = ANSWER_OF_TURNS | {"answer": "user: 3+\nassistant: 4", "branches": [5]}
    path.write_text(json.dumps(rewritten) + "\n")
    assert lines(run, eval=True)[3:9] == [
        *("", "user: 3+", "assistant: 4", "turn 1 of 2  1 tokens by v1.4", "3"),
        "branch 2 begins",
    ]


def test_rows_for_programs_are_whole(run: Path):
    rows = [TRAINED, OF_TURNS]
    write_rows(run, *rows)
    assert [json.loads(line) for line in shown(run, json=True).splitlines()] == rows


def test_images_are_shown_as_files_and_small_copies(run: Path, monkeypatch: pytest.MonkeyPatch):
    images = ImageFolder(run / "images")
    kept = images.keep(drawn(200, 100))
    gone, changed = "0" * 64, images.keep(drawn(seed=2))
    images.file_of(changed).write_bytes(b"other")
    row = TRAINED | {
        "images": [{"digest": digest} for digest in (kept, kept, gone, changed, "../")]
    }
    (run / "rollouts/trained.jsonl").write_text(json.dumps(row) + "\n")
    text = shown(run, last=1)
    assert text.count(f"image {images.file_of(kept)}") == 1
    assert f"image {gone[:8]}: no image" in text
    assert f"image {changed[:8]}: " in text
    assert "changed on disk" in text
    assert "../" not in text
    assert "▀" not in text, "there are no colors"
    for name, value in {"FORCE_COLOR": "1", "COLORTERM": "truecolor", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    lines = shown(run, last=1).splitlines()
    assert [line.count("▀") for line in lines if "▀" in line] == [48] * 12
    assert "\x1b[38;2;" in "".join(lines)
    monkeypatch.setitem(sys.modules, "PIL", None)
    text = shown(run, last=1)
    assert f"image {kept[:8]}: images need pillow" in text
    assert "▀" not in text

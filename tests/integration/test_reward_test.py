"""`slipstream reward test`: the answers it finds, what it prints, and its exit code."""

import json
from pathlib import Path

import pytest

from slipstream.wire.errors import ConfigError
from tests.support.bubblewrap import bubblewrap_works
from tests.support.commands import call_command
from tests.support.drawn_images import drawn

pytestmark = pytest.mark.integration


def try_reward(*settings: str, **options: object) -> int:
    return call_command("reward", "test", *settings, **options)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    problems: list[dict[str, object]] = [
        {"prompt": "1+1=", "ground_truth": "2", "data_source": "add"},
        {"prompt": "2+1=", "ground_truth": 3},
        {"prompt": "2+2=", "ground_truth": [4, "four"]},
        {"prompt": "2+3=", "ground_truth": 5, "response": "6"},
    ]
    path.write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    return path


def test_without_answers_the_truth_and_an_empty_text_are_scored(
    rows: Path, capsys: pytest.CaptureFixture[str]
):
    assert try_reward(data=rows, json=True) == 0
    printed = json.loads(capsys.readouterr().out)
    scored = [(a["row"], a["answer"], a["reward"]) for a in printed["answers"]]
    assert scored == [
        (0, "2", 1.0), (0, "", 0.0), (1, "3", 1.0), (1, "", 0.0), (2, "", 0.0), (3, "6", 0.0),
    ]  # fmt: skip
    assert printed["mean"] == pytest.approx(1 / 3)
    assert printed["functions"][0]["name"] == "slipstream.broker.rewards.exact_match:score"


def test_answers_of_a_file_are_scored_by_row(
    rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    answers = tmp_path / "answers.jsonl"
    answers.write_text('"2"\n{"response": "9"}\n{"row": 2, "solution": "four"}\n')
    assert try_reward(data=rows, n=3, answers=answers, json=True) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [(a["row"], a["reward"]) for a in printed["answers"]] == [(0, 1.0), (1, 0.0), (2, 1.0)]


def test_answers_without_a_row_are_named(
    rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    answers = tmp_path / "answers.jsonl"
    for row, why in [("4", "no row 4: .* has 4 rows"), ("-1", "no row -1"), ("true", "line 1: ")]:
        answers.write_text(f'{{"row": {row}, "response": "2"}}\n"3"\n')
        with pytest.raises(ConfigError, match=rf"--answers .*: {why}"):
            try_reward(data=rows, answers=answers)
    answers.write_text('"2"\n"9"\n')
    assert try_reward(data=rows, n=1, answers=answers) == 0
    printed = capsys.readouterr()
    assert "answers from row 1 on are not scored (--n 1)" in printed.err
    assert "1 answers, mean 1.000" in printed.out


def test_an_unavailable_score_is_shown_with_its_reason_and_fails(
    rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "mine.py").write_text(
        "def score(data_source, solution_str, ground_truth, extra_info, least=0):\n"
        "    if len(solution_str) < least: raise ValueError('too short')\n"
        "    return {'score': 1, 'length': len(solution_str)}\n"
    )
    reward = f"{tmp_path}/mine.py:score"
    words = ["reward.options.least=1"]
    assert try_reward(*words, reward=reward, data=rows, n=2) == 1
    printed = capsys.readouterr().out
    assert "4 answers, mean 1.000, 2 unavailable" in printed
    assert "unavailable 2 times: raised ValueError: too short" in printed
    assert "length 1" in printed


def test_a_function_that_is_asked_for_scores_every_data_source(
    rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "ones.py").write_text("def score(d, s, g, e): return 1\n")
    config = tmp_path / "run.toml"
    config.write_text(
        "[reward.sources.add]\nfunction = 'slipstream.broker.rewards.numeric:score'\n"
    )
    reward = f"{tmp_path}/ones.py:score"
    assert try_reward(config=config, reward=reward, data=rows, json=True) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [function["name"] for function in printed["functions"]] == [reward]
    assert printed["mean"] == 1.0


@pytest.mark.skipif(not bubblewrap_works(), reason="bubblewrap does not work here")
def test_keys_are_not_seen_and_no_folder_is_made_for_them(
    rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "peeks.py").write_text(
        "import os\n"
        "def score(d, s, g, e, *, keys, key):\n"
        "    return len(os.listdir(keys)) + len(open(key).read()) if os.path.exists(keys) else -1\n"
    )
    keys, key = tmp_path / "keys", tmp_path / "worker.key"
    words = [f"run.dir={tmp_path}", f"run.key_file={key}"]
    words += [f"reward.options.keys={keys}", f"reward.options.key={key}"]

    def mean() -> float:
        reward = f"{tmp_path}/peeks.py:score"
        assert try_reward(*words, reward=reward, data=rows, n=1, json=True) == 0
        return float(json.loads(capsys.readouterr().out)["mean"])

    assert mean() == -1.0
    keys.mkdir()
    for path in (keys / "broker.key", key):
        path.write_text("secret")
    assert mean() == 0.0


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"n": 0}, r"--n must be at least 1, got 0"),
        ({"data": "nowhere.jsonl"}, r"cannot read --data = nowhere\.jsonl"),
        ({"reward": "nowhere.py:score"}, r"cannot load reward\.function 'nowhere\.py:score'"),
        ({"answers": Path("nowhere.jsonl")}, r"cannot read --answers nowhere\.jsonl"),
    ],
)
def test_what_cannot_be_used_is_named(rows: Path, arguments: dict[str, object], why: str):
    with pytest.raises(ConfigError, match=why):
        try_reward(**{"data": rows, **arguments})


def test_a_reward_reads_the_images_of_its_prompt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    content = drawn(40, 30)
    (tmp_path / "a.png").write_bytes(content)
    row = {"prompt": [{"role": "user", "content": "<image>?"}], "images": ["a.png"]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "sizes.py").write_text(
        "import os\n\n"
        "def score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return sum(os.path.getsize(path) for path in extra_info['images'])\n"
    )
    reward = f"{tmp_path / 'sizes.py'}:score"
    assert try_reward(data=tmp_path / "rows.jsonl", reward=reward, json=True) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [answer["reward"] for answer in printed["answers"]] == [len(content)]

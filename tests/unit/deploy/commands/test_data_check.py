import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from slipstream.wire.errors import ConfigError
from tests.support.blank_model import write_blank_model
from tests.support.commands import call_command
from tests.support.drawn_images import drawn

TRUE = {"ground_truth": "2"}
CODE = "reward.function=slipstream.broker.rewards.code:score"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_blank_model(tmp_path / "model", hidden=16, layers=1)
    (tmp_path / "model" / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}={% endfor %}"
    )
    return tmp_path / "model"


def write(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def turn(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def data_check(words: Sequence[str], config: Path | None, model: str | None) -> int:
    return call_command("data", "check", *words, config=config, model=model)


def test_lengths_sources_and_the_rendered_prompt_are_shown(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
):
    rows = [
        {"prompt": turn("1" * n), "ground_truth": n, "data_source": "b" if n > 2 else "a"}
        for n in range(1, 5)
    ]
    file = write(tmp_path / "a.jsonl", *rows)
    assert data_check([file], None, str(model)) == 0
    shown = capsys.readouterr().out
    assert "min 2  median 3  p90 5  max 5" in shown
    assert "a 2, b 2" in shown
    assert "│ 1= " in shown
    assert "no bad rows" in shown
    assert max(map(len, shown.splitlines())) <= 100


def test_a_model_is_fetched_as_by_the_roles(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
):
    words = [write(tmp_path / "a.jsonl", {"prompt": turn("12"), **TRUE})]
    words.append(f"run.cache_dir={tmp_path / 'cache'}")
    assert data_check(words, None, f"file://{model}") == 0
    assert "min 3  median 3" in capsys.readouterr().out


def test_bad_and_overlong_rows_are_named_and_fail_the_check(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
):
    rows = [{"prompt": "12", **TRUE}, {"prompt": 3}, *[{"prompt": "1234", **TRUE}] * 12]
    file = write(tmp_path / "a.jsonl", *rows)
    assert data_check([file, "sampling.max_prompt_tokens=3"], None, str(model)) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "prompt must be text or a list of turns, got int" in shown
    name = f"too long: row 2 (line 3) of {file}: 4 tokens, sampling.max_prompt_tokens is 3"
    assert name.replace(" ", "") in shown.replace(" ", "")
    assert "too long: 2 more" in shown
    assert "bad rows: 13 (would end a run)" in shown
    dropping = ["sampling.max_prompt_tokens=3", "sampling.overlong_prompts=drop"]
    assert data_check([file, *dropping, "data.on_bad_row=skip"], None, str(model)) == 1
    shown = capsys.readouterr().out
    assert "12 (are dropped)" in shown
    assert "bad rows: 1 (skipped)" in shown


def test_a_runs_settings_name_all_files(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
):
    train, held_out = (
        write(tmp_path / name, {"prompt": "1", **TRUE}) for name in ("a.jsonl", "b.jsonl")
    )
    config = tmp_path / "run.toml"
    config.write_text(
        f'[run]\nmodel = "{model}"\n[data]\nfile = "{train}"\n[eval]\nfile = "{held_out}"\n'
    )
    assert data_check([], config, None) == 0
    shown = capsys.readouterr().out
    assert "data.file" in shown
    assert "eval.file" in shown
    assert "held_out 1" in shown
    with pytest.raises(ConfigError, match="give one FILE"):
        data_check([], None, None)


def test_rows_that_the_template_refuses_are_named_as_those_that_cannot_be_read(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
):
    (model / "chat_template.jinja").write_text(
        "{% if messages[0].role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}1"
    )
    refused = {"prompt": [{"role": "tool", "content": "3"}], **TRUE}
    file = write(tmp_path / "a.jsonl", {"prompt": turn("1"), **TRUE}, {"prompt": 3}, refused)
    assert data_check([file, "data.on_bad_row=skip"], None, str(model)) == 1
    shown = "".join(capsys.readouterr().out.split())
    for name in (
        f"bad: row 1 (line 2) of {file}: prompt must be text",
        f"bad: row 2 (line 3) of {file}: the chat template refuses it: no tools",
        "bad rows: 2 (skipped)",
    ):
        assert name.replace(" ", "") in shown


def test_rows_without_a_truth_name_the_columns_and_fail_the_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = write(tmp_path / "a.jsonl", *[{"prompt": f"{n}+1=", "answer": n + 1} for n in range(3)])
    assert data_check([file], None, None) == 1
    shown = capsys.readouterr().out
    assert "note: no row has a ground truth; the columns are prompt, answer: " in shown
    assert "3 of 3 rows: no ground truth that exact_match:score reads, row 0: the row has" in shown
    assert "rows that no reward reads: 3 (would be tried broker.max_attempts times" in shown
    assert data_check([file, "data.ground_truth_column=answer"], None, None) == 0
    assert "note" not in capsys.readouterr().out


def test_rows_that_cannot_be_read_may_have_a_truth(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    rows: list[dict[str, object]] = [{"prompt": "1", "ground_truth": 10**25}, {"prompt": "2"}]
    assert data_check([write(tmp_path / "a.jsonl", *rows)], None, None) == 1
    shown = capsys.readouterr().out
    assert "note: no row that can be read has a ground truth" in shown


def test_every_row_is_read_by_the_reward_of_its_data_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    tests = {"inputs": ["1"], "outputs": ["2"]}
    rows = [
        {"prompt": "1", "ground_truth": tests},
        {"prompt": "2", "ground_truth": {"inputs": ["1"]}},
        {"prompt": "3", "ground_truth": "7", "data_source": "sums"},
        {"prompt": "4", "ground_truth": "seven", "data_source": "sums"},
    ]
    file = write(tmp_path / "a.jsonl", *rows)
    numeric = "reward.sources.sums.function=slipstream.broker.rewards.numeric:score"
    assert data_check([file, CODE, numeric], None, None) == 1
    shown = capsys.readouterr().out
    assert "1 of 2 rows: no ground truth that code:score reads, row 1: raised ValueError" in shown
    assert "1 of 2 rows: no ground truth that numeric:score reads, row 3: raised" in shown
    missing = "slipstream.broker.rewards.no:score"
    part = f"reward.options.parts.a.function={missing}"
    weighted = "reward.function=slipstream.broker.rewards.weighted:Weighted"
    for words in ([f"reward.function={missing}"], [weighted, part]):
        assert data_check([file, *words], None, None) == 0
        shown = capsys.readouterr().out
        assert "note: no reward has read its rows: " in shown
        assert f"{missing!r}: ModuleNotFoundError" in shown


def test_a_reward_with_wrong_options_is_refused(tmp_path: Path):
    file = write(tmp_path / "a.jsonl", {"prompt": "1", **TRUE})
    for function, options, why in [
        ("math_answer:score", "{limit = 3}", "reward.options.limit: slipstream.broker.rewards."),
        ("code:score", "{exakt = true}", "reward.options.exakt: slipstream.broker.rewards.code:"),
        ("weighted:Weighted", "{}", "cannot be made with reward.options = {}: TypeError: "),
        ("weighted:Weighted", "{parts = {a = {weight = 'x'}}}", "reward.options.parts.a: "),
        ("judge:LlmJudge", "{template = 3}", "cannot be made with reward.options = "),
        ("numeric:scor", "{}", "cannot load reward.function "),
    ]:
        words = [f"reward.function=slipstream.broker.rewards.{function}"]
        words.append(f"reward.options={options}")
        with pytest.raises(ConfigError, match=re.escape(why)):
            data_check([file, *words], None, None)


def test_rows_that_environments_score_need_no_truth(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = write(tmp_path / "a.jsonl", {"prompt": "1"})
    acts = "environment.function=mine:Environment"
    assert data_check([file, acts, "reward.workers=0"], None, None) == 0
    assert "no reward reads" not in capsys.readouterr().out
    assert data_check([file, acts], None, None) == 0
    assert "dropped, unless the environment gives the reward" in capsys.readouterr().out


def test_prompts_of_an_odd_shape_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    answered = [*turn("2+2?"), {"role": "assistant", "content": "4"}]
    rows = [{"prompt": prompt, **TRUE} for prompt in (answered, json.dumps(turn("1")), "1")]
    assert data_check([write(tmp_path / "a.jsonl", *rows)], None, None) == 0
    shown = capsys.readouterr().out
    assert "note: 1 of 3 prompts end with a turn of the policy's own (assistant)" in shown
    assert "note: 1 of 3 prompts are a conversation as text" in shown


def test_every_image_is_read_and_damaged_ones_are_bad_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "a.png").write_bytes(drawn(40, 30))
    (tmp_path / "b.png").write_bytes(drawn(seed=2)[:-200])
    rows = [
        {"prompt": turn("?"), "images": ["a.png", "a.png"], **TRUE},
        {"prompt": turn("?"), "images": ["b.png"], **TRUE},
    ]
    assert data_check([write(tmp_path / "a.jsonl", *rows)], None, None) == 1
    shown = capsys.readouterr().out
    assert "2, 1 different ones of 0.0 MB, up to 40 x 30" in shown
    assert "row 1 (line 2)" in shown
    assert "not an image that can be read" in " ".join(shown.split())  # lines are wrapped
    assert "bad rows: 1 (would end a run)" in shown

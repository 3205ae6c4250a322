import json
from pathlib import Path

import pytest

from slipstream.deploy.commands.data_check import data_check
from slipstream.wire.errors import ConfigError
from tests.support.blank_model import write_blank_model


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


def test_lengths_sources_and_the_rendered_prompt_are_shown(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
):
    rows = [{"prompt": turn("1" * n), "data_source": "b" if n > 2 else "a"} for n in range(1, 5)]
    file = write(tmp_path / "a.jsonl", *rows)
    assert data_check([file], None, model) == 0
    shown = capsys.readouterr().out
    assert "min 2  median 3  p90 5  max 5" in shown
    assert "a 2, b 2" in shown
    assert "│ 1= " in shown
    assert "no bad rows" in shown
    assert max(map(len, shown.splitlines())) <= 100


def test_bad_and_overlong_rows_are_named_and_fail_the_check(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
):
    rows = [{"prompt": "12"}, {"prompt": 3}, *[{"prompt": "1234"}] * 12]
    file = write(tmp_path / "a.jsonl", *rows)
    assert data_check([file, "sampling.max_prompt_tokens=3"], None, model) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "prompt must be text or a list of turns, got int" in shown
    name = f"too long: row 2 (line 3) of {file}: 4 tokens, sampling.max_prompt_tokens is 3"
    assert name.replace(" ", "") in shown.replace(" ", "")
    assert "too long: 2 more" in shown
    assert "13 bad rows would end a run" in shown
    dropping = ["sampling.max_prompt_tokens=3", "sampling.overlong_prompts=drop"]
    assert data_check([file, *dropping, "data.on_bad_row=skip"], None, model) == 1
    shown = capsys.readouterr().out
    assert "12 (are dropped)" in shown
    assert "1 bad rows are skipped" in shown


def test_a_runs_settings_name_all_files(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
):
    train, held_out = (write(tmp_path / name, {"prompt": "1"}) for name in ("a.jsonl", "b.jsonl"))
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
    refused = [{"role": "tool", "content": "3"}]
    file = write(tmp_path / "a.jsonl", {"prompt": turn("1")}, {"prompt": 3}, {"prompt": refused})
    assert data_check([file, "data.on_bad_row=skip"], None, model) == 1
    shown = "".join(capsys.readouterr().out.split())
    for name in (
        f"bad: row 1 (line 2) of {file}: prompt must be text",
        f"bad: row 2 (line 3) of {file}: the chat template refuses it: no tools",
        "2 bad rows are skipped",
    ):
        assert name.replace(" ", "") in shown

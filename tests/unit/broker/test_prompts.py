from pathlib import Path

import pytest

from broker.prompts import PromptSource, load_prompts
from wire.errors import ConfigError
from wire.trajectory import Prompt

ROWS = [Prompt(prompt=str(i)) for i in range(20)]


def texts(source: PromptSource, cursors: range) -> list[str]:
    return [source.at(cursor).prompt for cursor in cursors]


def test_each_epoch_holds_every_prompt_once_in_an_order_of_its_own():
    source = PromptSource(ROWS, seed=1)
    first, second = texts(source, range(20)), texts(source, range(20, 40))
    assert sorted(first) == sorted(second) == sorted(p.prompt for p in ROWS)
    assert first != second


def test_the_order_depends_on_seed_and_cursor_alone():
    forward = texts(PromptSource(ROWS, seed=1), range(60))
    source = PromptSource(ROWS, seed=1)
    backward = [source.at(cursor).prompt for cursor in reversed(range(60))]
    assert backward[::-1] == forward
    assert texts(PromptSource(ROWS, seed=2), range(60)) != forward


def test_rows_are_read_with_their_extras_and_blank_lines_skipped(tmp_path: Path):
    path = tmp_path / "train.jsonl"
    path.write_text(
        '{"prompt": "1+1=", "ground_truth": "2", "extra_info": {"level": 3}}\n\n{"prompt": "x"}'
    )
    assert load_prompts(path, "data.file") == [
        Prompt(prompt="1+1=", ground_truth="2", extra_info={"level": 3}),
        Prompt(prompt="x"),
    ]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ('{"prompt": 3}', "str"),
        ('{"ground_truth": "2"}', "prompt"),
        ("not json", "malformed"),
        ('{"prompt": "x", "extra_info": {"deep": [1]}}', "extra_info"),
    ],
)
def test_a_bad_row_is_named_by_its_number(tmp_path: Path, row: str, why: str):
    path = tmp_path / "train.jsonl"
    path.write_text('{"prompt": "x"}\n\n' + row + "\n")
    with pytest.raises(
        ConfigError, match=rf"data\.file: row 3 of .*train\.jsonl is not a prompt: .*{why}"
    ):
        load_prompts(path, "data.file")


def test_a_missing_or_empty_file_names_the_setting(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"cannot read eval\.file = .*No such file"):
        load_prompts(tmp_path / "nothing.jsonl", "eval.file")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match=r"eval\.file = .*holds no prompts"):
        load_prompts(tmp_path / "empty.jsonl", "eval.file")

import json
import logging
from pathlib import Path

import msgspec
import pyarrow as arrow
import pytest
from pyarrow import parquet

from slipstream.broker.config import DataSection
from slipstream.broker.data.sources import load_eval_problems, load_training_prompts
from slipstream.wire.errors import ConfigError
from slipstream.wire.messages.trajectory import ChatMessage, Prompt
from slipstream.wire.settings.load import section
from slipstream.wire.settings.sections import EvalSection

VERL_ROWS = [
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"question {i}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(i)},
        "extra_info": {"split": "train", "index": i},
    }
    for i in range(3)
]


def data(**settings: object) -> DataSection:
    return section({"data": settings}, "data", DataSection)


def evaluation(**settings: object) -> EvalSection:
    return section({"eval": settings}, "eval", EvalSection)


def jsonl(path: Path, *rows: object) -> str:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def in_order(settings: DataSection) -> list[Prompt]:
    source = load_training_prompts(settings, seed=0)
    return [source.at(i) for i in range(source.num_rows)]


def test_jsonl_rows_are_read_with_their_extras_and_blank_lines_skipped(tmp_path: Path):
    file = jsonl(
        tmp_path / "train.jsonl",
        {"prompt": "1+1=", "ground_truth": "2", "extra_info": {"deep": [1]}},
        "",
        {"prompt": "x"},
    )
    assert in_order(data(file=file, shuffle=False)) == [
        Prompt(prompt="1+1=", ground_truth="2", extra_info={"deep": [1]}, row=0),
        Prompt(prompt="x", row=2),
    ]


def test_verls_parquet_files_are_read_as_they_are(tmp_path: Path):
    path = tmp_path / "train.parquet"
    parquet.write_table(arrow.Table.from_pylist(VERL_ROWS), path)
    prompts = in_order(data(file=str(path), shuffle=False))
    assert [p.ground_truth for p in prompts] == ["0", "1", "2"]
    assert prompts[2] == Prompt(
        prompt=(ChatMessage("user", "question 2"),),
        ground_truth="2",
        data_source="openai/gsm8k",
        ability="math",
        extra_info={"split": "train", "index": 2},
        row=2,
    )
    assert msgspec.json.decode(msgspec.json.encode(prompts[2]), type=Prompt) == prompts[2]


def bad_text() -> arrow.Array:
    parts = [(0).to_bytes(4, "little") + (1).to_bytes(4, "little") + (2).to_bytes(4, "little")]
    return arrow.StringArray.from_buffers(2, *map(arrow.py_buffer, [*parts, b"a\xff"]))


ODD = {
    "nanoseconds": lambda: arrow.array([0, 1], arrow.timestamp("ns")),
    "duration": lambda: arrow.array([0, 1], arrow.duration("ns")),
    "no text": bad_text,
    "date": lambda: arrow.array([0, 10**8], arrow.date32()),
    "zone": lambda: arrow.array([None, 1], arrow.timestamp("us", "Foo/Bar")),
}


@pytest.mark.parametrize("odd", ODD)
def test_values_that_python_has_not_are_a_bad_row_where_they_are_read(tmp_path: Path, odd: str):
    file = str(tmp_path / "train.parquet")
    columns = {"prompt": ["x", "y"], "ground_truth": ["1", "2"], "created": ODD[odd]()}
    parquet.write_table(arrow.table(columns), file)
    assert [one.ground_truth for one in in_order(data(file=file, shuffle=False))] == ["1", "2"]
    with pytest.raises(ConfigError, match=r"truth_column = 'answer': .*prompt, ground_truth, crea"):
        load_training_prompts(data(file=file, ground_truth_column="answer"), seed=0)
    with pytest.raises(ConfigError, match=r"data\.file: row \d of .*: created"):
        load_training_prompts(data(file=file, ground_truth_column="created"), seed=0)


@pytest.mark.parametrize(
    ("content", "way"),
    [
        ('[{"prompt": "x"}, {"prompt": "y"}]', r"jq -c '\.\[\]' FILE"),
        ('[\n  {"prompt": "x"},\n  {"prompt": "y"}\n]', r"jq -c '\.\[\]' FILE"),
        ('{\n  "prompt": "x"\n}\n', r"jq -c \. FILE"),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9\n", "git lfs pull"),
        ("<!doctype html>\n<html></html>", r"/resolve/"),
        ("\x1f\x8b\b", "gunzip it"),
    ],
    ids=["array", "pretty array", "pretty", "pointer", "page", "gzip"],
)
@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".gz", ".parquet"])
def test_files_of_another_kind_are_refused_with_the_way_out(
    tmp_path: Path, content: str, way: str, suffix: str
):
    path = tmp_path / f"train{suffix}"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(ConfigError, match=rf"data\.file.*{way}"):
        load_training_prompts(data(file=str(path)), seed=0)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"prompt": 3}, "prompt must be text or a list of turns, got int"),
        ({"ground_truth": "2"}, "no prompt"),
        ("not json", "malformed"),
        ("[1]", "not a JSON object"),
    ],
)
def test_a_bad_row_is_named_by_its_line_or_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, row: object, why: str
):
    file = jsonl(tmp_path / "train.jsonl", {"prompt": "x"}, "", row, {"prompt": "y"})
    with pytest.raises(ConfigError, match=rf"^data\.file: row 2 \(line 3\) of .*jsonl: .*{why}"):
        load_training_prompts(data(file=file), seed=0)
    with caplog.at_level(logging.WARNING):
        source = load_training_prompts(data(file=file, on_bad_row="skip"), seed=0)
    assert (source.num_rows, source.num_skipped) == (2, 1)
    assert why in caplog.text


def test_a_column_that_no_row_has_is_a_wrong_setting(tmp_path: Path):
    file = jsonl(tmp_path / "train.jsonl", {"question": "x", "answer": "y"})
    for on_bad_row in ("error", "skip"):
        with pytest.raises(
            ConfigError, match=r"data\.prompt_column = 'prompt': .*; it has question, answer"
        ):
            load_training_prompts(data(file=file, on_bad_row=on_bad_row), seed=0)
    assert in_order(data(file=file, prompt_column="question"))[0].prompt == "x"


def test_a_column_of_truths_that_no_row_has_is_a_wrong_setting(tmp_path: Path):
    file = jsonl(tmp_path / "train.jsonl", {"prompt": "x", "answer": "y"}, {"prompt": "z"})
    with pytest.raises(ConfigError, match=r"data\.ground_truth_column = 'truth': .*prompt, answer"):
        load_training_prompts(data(file=file, ground_truth_column="truth"), seed=0)
    prompts = in_order(data(file=file, ground_truth_column="answer", shuffle=False))
    assert [prompt.ground_truth for prompt in prompts] == ["y", None]
    assert [prompt.ground_truth for prompt in in_order(data(file=file))] == [None, None]
    gym = {"add": {"reasoning_gym": "basic_arithmetic", "size": 1}}
    assert in_order(data(sources=gym, ground_truth_column="answer"))[0].ground_truth is not None


def test_an_integer_that_does_not_travel_names_its_row(tmp_path: Path):
    rows = [{"prompt": "x", "ground_truth": "7"}, {"prompt": "y", "ground_truth": 10**25}]
    file = jsonl(tmp_path / "train.jsonl", *rows)
    with pytest.raises(ConfigError, match=r"row 1 \(line 2\) .*: ground_truth holds an integer of"):
        load_training_prompts(data(file=file), seed=0)
    alone = jsonl(tmp_path / "alone.jsonl", rows[0])
    kept = load_training_prompts(data(file=file, on_bad_row="skip"), seed=0)
    assert kept.fingerprint() == load_training_prompts(data(file=alone), seed=0).fingerprint()


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path: Path):
    path, line = tmp_path / "train.jsonl", json.dumps({"prompt": "x"})
    path.write_text(line, encoding="utf-8-sig")
    assert [prompt.prompt for prompt in in_order(data(file=str(path)))] == ["x"]
    for encoding in ("utf-16", "utf-16-be"):
        path.write_text("\ufeff" * (encoding == "utf-16-be") + line, encoding=encoding)
        with pytest.raises(ConfigError, match=r"is UTF-16, expected UTF-8: iconv -f UTF-16"):
            load_training_prompts(data(file=str(path)), seed=0)


@pytest.mark.parametrize("name", ["empty.jsonl", "empty.parquet"])
def test_a_file_without_rows_names_the_setting(tmp_path: Path, name: str):
    path = tmp_path / name
    if name.endswith("parquet"):
        parquet.write_table(arrow.table({"prompt": arrow.array([], arrow.string())}), path)
    else:
        path.write_text("\n")
    with pytest.raises(ConfigError, match=r"data\.file = .* holds no prompts"):
        load_training_prompts(data(file=str(path)), seed=0)


def test_a_file_that_cannot_be_read_names_the_setting(tmp_path: Path):
    for name in ("nothing.jsonl", "nothing.parquet"):
        with pytest.raises(ConfigError, match=r"cannot read data\.file = .*No such file"):
            load_training_prompts(data(file=str(tmp_path / name)), seed=0)
    (tmp_path / "a.parquet").write_text("not parquet at all")
    with pytest.raises(ConfigError, match=r"data\.file = .*a\.parquet is not valid parquet"):
        load_training_prompts(data(file=str(tmp_path / "a.parquet")), seed=0)
    with pytest.raises(ConfigError, match=r"end in \.jsonl or \.parquet, got '\.csv'"):
        load_training_prompts(data(file="a.csv"), seed=0)


def test_sources_are_named_mixed_and_limited(tmp_path: Path):
    easy = jsonl(tmp_path / "easy.jsonl", *[{"prompt": f"e{i}"} for i in range(9)])
    hard = jsonl(tmp_path / "hard.jsonl", {"prompt": "h", "data_source": "its own"})
    sources = {
        "easy": {"file": easy, "max_rows": 2, "as_chat": True, "system_prompt": "Hi"},
        "hard": {"file": hard},
    }
    prompts = in_order(data(sources=sources, shuffle=False, as_chat=False))
    assert [p.data_source for p in prompts] == ["easy", "easy", "its own"]
    assert prompts[0].prompt == (ChatMessage("system", "Hi"), ChatMessage("user", "e0"))
    assert prompts[2].prompt == "h"


def test_settings_that_contradict_each_other_are_refused():
    for settings, why in [
        ({}, r"neither data\.file nor data\.sources is set"),
        ({"file": "a.jsonl", "sources": {"x": {"file": "b.jsonl"}}}, "exclude each other"),
        ({"sources": {"x": {}}}, r"data\.sources\.x needs either file or reasoning_gym"),
        (
            {"sources": {"x": {"file": "a.jsonl", "weight": 1}, "y": {"file": "b.jsonl"}}},
            r"data\.sources\.y\.weight is not set",
        ),
    ]:
        with pytest.raises(ConfigError, match=why):
            load_training_prompts(data(**settings), seed=0)


def test_held_out_problems_are_named_by_their_set_and_keep_their_order(tmp_path: Path):
    file = jsonl(tmp_path / "a.jsonl", {"prompt": "x"}, {"prompt": "y", "data_source": "own"})
    one = load_eval_problems(evaluation(file=file), data(as_chat=True))
    assert [p.data_source for p in one] == ["held_out", "own"]
    assert one[0].prompt == (ChatMessage("user", "x"),)
    sets = {
        "b": {"file": file, "max_rows": 1},
        "a": {"reasoning_gym": "basic_arithmetic", "size": 2},
    }
    several = load_eval_problems(evaluation(sets=sets), data())
    assert [p.data_source for p in several] == ["b", "a", "a"]
    assert load_eval_problems(evaluation(), data()) == []
    with pytest.raises(ConfigError, match=r"eval\.sets\.b\.weight"):
        load_eval_problems(evaluation(sets={"b": {"file": file, "weight": 1}}), data())


ONE_DIGIT = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def test_what_is_held_out_of_a_generator_is_none_of_what_it_trains_on():
    """There are 200 sums and differences of two digits."""
    sums = {"reasoning_gym": "chain_sum", "options": ONE_DIGIT}
    training = data(sources={"a": {**sums, "size": 150, "seed": 1}})
    trained = {prompt.text for prompt in in_order(training)}
    held_out = {"sums": {**sums, "size": 40, "seed": 2}}
    alone = load_eval_problems(evaluation(sets=held_out), data())
    assert trained & {prompt.text for prompt in alone}
    apart = load_eval_problems(evaluation(sets=held_out), training)
    assert len(apart) == 40
    assert not trained & {prompt.text for prompt in apart}
    kept = [prompt.text for prompt in alone if prompt.text not in trained]
    assert [prompt.text for prompt in apart][: len(kept)] == kept
    other = load_eval_problems(
        evaluation(sets=held_out), data(sources={"a": {"reasoning_gym": "gcd", "size": 5}})
    )
    assert other == alone
    every = data(sources={"a": {**sums, "size": 5000, "seed": 1}})
    with pytest.raises(
        ConfigError, match=r"eval\.sets\.sums: 40 problems of chain_sum .* train on"
    ):
        load_eval_problems(evaluation(sets=held_out), every)

import json
from pathlib import Path

import pytest

from slipstream.wire.errors import ConfigError
from slipstream.wire.models.tokenizer_hash import numbered_tokens, tokenizer_hash

CONTENT = {
    "version": "1.0",
    "truncation": None,
    "added_tokens": [{"id": 2, "content": "<eos>"}],
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": ["a b"]},
}


def write(folder: Path, content: object, **style: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(content, **style))  # type: ignore[arg-type]
    return folder


def test_layout_truncation_and_the_way_merges_are_written_make_no_difference(tmp_path: Path):
    other = {
        "model": {"merges": [["a", "b"]], "vocab": {"b": 1, "a": 0}, "type": "BPE"},
        "truncation": {"max_length": 8},
        "added_tokens": CONTENT["added_tokens"],
        "version": "1.0",
    }
    first = tokenizer_hash(write(tmp_path / "a", CONTENT))
    assert first == tokenizer_hash(write(tmp_path / "b", other, indent=2))
    assert len(first) == 32


def test_anything_that_changes_token_ids_changes_the_hash(tmp_path: Path):
    for change in [
        {"added_tokens": [{"id": 3, "content": "<eos>"}]},
        {"model": {"type": "BPE", "vocab": {"a": 1, "b": 0}, "merges": ["a b"]}},
        {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}},
    ]:
        changed = tokenizer_hash(write(tmp_path / "b", CONTENT | change))
        assert changed != tokenizer_hash(write(tmp_path / "a", CONTENT))


def test_a_folder_without_a_readable_tokenizer_names_the_setting(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"no tokenizer\.json in .*\(run\.model\)"):
        tokenizer_hash(tmp_path)
    for text in ("{", "[" * 100_000):
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(ConfigError, match=r"not valid JSON \(run\.model\)"):
            tokenizer_hash(tmp_path)
        assert numbered_tokens(tmp_path) == {}

"""Models that are known by their names on the hub are those of the shelf, with its answers."""

import json
from pathlib import Path

import pytest

from slipstream.deploy.preflight.check.facts import ok
from slipstream.deploy.preflight.check.run_folder import judge_listed
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.fetched import Fetch, found_model
from slipstream.wire.models.hf_config import load_hf_config
from slipstream.wire.models.shelf import Listed, shelf
from tests.support.shelf import REFUSED, SHELF


def test_every_model_of_the_shelf_is_listed_with_what_its_config_says(tmp_path: Path):
    expected = {}
    for name, (billions, config, _) in SHELF.items():
        (tmp_path / "config.json").write_text(json.dumps(config))
        model_type = load_hf_config(tmp_path).model_type
        expected[name] = Listed(model_type=model_type, billions=billions)
    refused = {name: Listed(model_type=one, why=why) for name, (one, why) in REFUSED.items()}
    assert shelf() == expected | refused
    assert len(SHELF) >= 40


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_listed_as_refused_is_refused(tmp_path: Path, name: str):
    model_type, _ = REFUSED[name]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(ConfigError, match=f"has model_type '{model_type}'; supported are"):
        load_hf_config(tmp_path)


def test_a_model_of_the_hub_is_answered_for_before_anything_is_fetched(tmp_path: Path):
    fetch = Fetch("google/gemma-3-27b-it", "run.model", tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"cannot be trained: two rotary bases.*\(run\.model\)"):
        found_model(fetch, with_weights=False)
    assert not fetch.cache.exists()
    known = "Qwen/Qwen3.5-4B is known: qwen3_5_text, 4 billion parameters, can be trained"
    assert judge_listed({"model": "Qwen/Qwen3.5-4B"}) == [ok("model", known, "run.model")]
    with pytest.raises(ConfigError, match="it hears and sees"):
        judge_listed({"model": "Qwen/Qwen3-Omni-30B-A3B-Instruct"})
    for other in ("someone/else", "/a/folder", 3):
        assert judge_listed({"model": other}) == []

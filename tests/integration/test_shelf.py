"""Published configs are read as transformers reads them, and what it writes of them, too."""

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.wire.models.config_keys import IGNORED_KEYS
from slipstream.wire.models.hf_config import HfConfig, load_hf_config
from tests.support.ranks.run import outputs, start
from tests.support.shelf import SHELF

pytestmark = pytest.mark.integration
# What trainers and older releases left in configs of models that were trained further.
LEFT_BEHIND = {
    "_attn_implementation_autoset": True,
    "_flash_attn_2_enabled": True,
    "_name_or_path": "/data/base",
    "cls_token_id": 1,
    "do_sample": True,
    "gradient_checkpointing": False,
    "max_length": 20,
    "max_sequence_length": 2048,
    "min_p": 0.1,
    "model_max_length": 4096,
    "neftune_noise_alpha": 5,
    "top_k": 50,
    "unsloth_fixed": True,
}


def folder_of(root: Path, name: str) -> Path:
    return root / name.replace("/", "--")


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a folder of each model."""
    root = tmp_path_factory.mktemp("shelf") / "models"
    for name, (_, config, _) in SHELF.items():
        folder_of(root, name).mkdir(parents=True)
        (folder_of(root, name) / "config.json").write_text(json.dumps(config | LEFT_BEHIND))
    return root


@pytest.fixture(scope="module")
def of_transformers(shelf: Path) -> dict[str, Any]:
    (printed,) = outputs([start(shelf.parent, "integration.transformers_configs", shelf)])
    found: dict[str, Any] = json.loads(printed)
    return found


def ours(hf: HfConfig) -> dict[str, object]:
    return {
        "hidden": hf.hidden_size,
        "inner": hf.intermediate_size,
        "layers": hf.num_hidden_layers,
        "heads": hf.num_attention_heads,
        "groups": hf.num_query_groups,
        "vocabulary": hf.vocab_size,
        "positions": hf.max_position_embeddings,
        "eps": hf.rms_norm_eps,
        "tied": hf.tie_word_embeddings,
        "theta": hf.rotary_base,
        "rope": hf.rope.scaling,
        "factor": hf.rope.factor,
        "turning": hf.rotary_share,
        "chosen": hf.experts_per_token,
    }


@pytest.mark.parametrize("name", SHELF)
def test_a_config_is_read_as_transformers_reads_it(
    shelf: Path, of_transformers: dict[str, Any], name: str
):
    hf = load_hf_config(folder_of(shelf, name))
    assert ours(hf) == of_transformers[folder_of(shelf, name).name]
    for kind in ("written", "whole"):
        again = load_hf_config(folder_of(Path(f"{shelf}-{kind}"), name))
        assert ours(again) == ours(hf)
        assert again.num_parameters == hf.num_parameters
        assert again.attention_scale == hf.attention_scale


def test_keys_of_generation_change_nothing(of_transformers: dict[str, Any]):
    keys = {key for key in of_transformers["of generation"] if not key.startswith("_")}
    assert "min_p" in keys
    assert keys <= IGNORED_KEYS

"""config.json of models that see images, in each form in which they are published."""

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.wire.errors import ConfigError
from slipstream.wire.models.hf_config import HfConfig, load_hf_config, name_alone
from tests.support.shelf import SHELF

WINDOWED, STACKED = "Qwen/Qwen2.5-VL-7B-Instruct", "Qwen/Qwen3-VL-4B-Instruct"


def read(folder: Path, config: dict[str, Any]) -> HfConfig:
    (folder / "config.json").write_text(json.dumps(config))
    return load_hf_config(folder)


def changed(name: str, part: str, **values: object) -> dict[str, Any]:
    config = SHELF[name].config
    return config | {part: config[part] | values} if part else config | values


def test_a_config_of_one_level_is_that_of_two(tmp_path: Path):
    """The hub has one level of Qwen2.5-VL, transformers 5 writes two."""
    flat = dict(SHELF[WINDOWED].config)
    around = {key: flat.pop(key) for key in [*flat] if "vision" in key or "_token_id" in key}
    text = flat | {"model_type": "qwen2_5_vl_text"}
    nested = around | {"model_type": "qwen2_5_vl", "text_config": text}
    ours = read(tmp_path, SHELF[WINDOWED].config)
    assert read(tmp_path, nested) == ours
    assert ours.vision is not None
    assert (ours.vision.head, ours.vision.window, ours.vision.channels) == (80, 4, 1176)
    assert ours.image_token == 151655


def test_channels_turn_by_frame_row_and_column_in_sections_or_in_turn(tmp_path: Path):
    axes = read(tmp_path, SHELF[WINDOWED].config).rotary_axes
    assert axes == (0,) * 16 + (1,) * 24 + (2,) * 24
    axes = read(tmp_path, SHELF[STACKED].config).rotary_axes
    assert axes == (0, 1, 2) * 20 + (0,) * 4


def test_tensors_have_one_name_under_both_that_they_are_published_by():
    assert name_alone("model.visual.merger.norm.weight") == "visual.merger.norm.weight"
    assert name_alone("visual.merger.norm.weight") == "visual.merger.norm.weight"
    assert name_alone("model.language_model.norm.weight") == "model.norm.weight"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (changed(STACKED, "", vision_config=None), "must have the keys of a vision tower"),
        (changed(STACKED, "vision_config", gates=3), "gates = 3 is not a key"),
        (changed(STACKED, "vision_config", window_size=112), "window_size = 112 is not a key"),
        (changed(STACKED, "vision_config", hidden_act="silu"), "hidden_act of vision_config"),
        (changed(STACKED, "vision_config", out_hidden_size=8), "must be hidden_size = 2560, got 8"),
        (changed(STACKED, "vision_config", num_heads=3), "multiple of 4 channels"),
        (changed(STACKED, "vision_config", num_position_embeddings=50), "must be a square, got 50"),
        (changed(STACKED, "vision_config", depth=17), "names block 17 of 17"),
        (changed(STACKED, "vision_config", deepstack_visual_indexes=[5, 5]), "must rise"),
        (changed(STACKED, "vision_config", depth="two"), "vision_config: Expected `int`"),
        (changed(WINDOWED, "vision_config", window_size=20), "has no whole token, got 20"),
        (
            changed(WINDOWED, "rope_scaling", mrope_section=[16, 24, 23]),
            "three numbers with the sum 64",
        ),
        (changed(WINDOWED, "rope_scaling", mrope_interleaved=True), "must be false"),
        (
            changed(
                STACKED,
                "text_config",
                rope_scaling={"mrope_section": [24, 20, 20], "rope_type": "default"},
            ),
            "mrope_interleaved must be true",
        ),
    ],
)
def test_what_is_not_computed_is_refused(tmp_path: Path, config: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, config)

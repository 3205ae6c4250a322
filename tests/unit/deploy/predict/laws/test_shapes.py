"""Shapes that are shipped, and those of folders."""

from pathlib import Path

import pytest

from slipstream.deploy.predict.laws.shapes import shape_folder, shipped_names
from slipstream.wire.errors import ConfigError
from slipstream.wire.models.flops import num_multiplied_parameters
from slipstream.wire.models.hf_config import load_hf_config


@pytest.mark.parametrize(
    ("name", "billions", "met"),
    [("Qwen3-30B-A3B", 30.5, 3.0), ("Qwen3-235B-A22B", 235.1, 21.5), ("DeepSeek-V3", 671.0, 36.6)],
)
def test_shipped_shapes_have_the_published_parameters(name: str, billions: float, met: float):
    hf = load_hf_config(shape_folder(name))
    assert hf.num_parameters / 1e9 == pytest.approx(billions, abs=0.05)
    # Published counts of a token's parameters (3, 22, 37) have the embedding.
    assert num_multiplied_parameters(hf) / 1e9 == pytest.approx(met, abs=0.1)
    assert name in shipped_names()


def test_a_folder_and_its_config_are_the_same_shape(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    assert shape_folder(str(tmp_path)) == tmp_path
    assert shape_folder(str(tmp_path / "config.json")) == tmp_path


def test_without_a_config_the_shipped_names_are_told(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"--model is .*expected a folder .*DeepSeek-V3"):
        shape_folder(str(tmp_path))

"""Configs of published models are read: their sizes are those of their pages."""

import json
from pathlib import Path

import pytest

from slipstream.wire.models.hf_config import load_hf_config
from tests.support.shelf import SHELF


@pytest.mark.parametrize("name", SHELF)
def test_a_published_config_has_the_parameters_of_its_page(tmp_path: Path, name: str):
    billions, config, within = SHELF[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    hf = load_hf_config(tmp_path)
    count = hf.num_parameters + hf.num_tower_parameters
    assert count / 1e9 == pytest.approx(billions, rel=within)

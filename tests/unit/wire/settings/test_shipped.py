"""Settings that ship are found by the name that documents give them, from any folder."""

from pathlib import Path

import pytest

from slipstream.wire.settings.shipped import CONFIGS, settings_file

ROOT = Path(__file__).parents[4]


def test_the_settings_that_ship_are_those_of_the_repository():
    assert CONFIGS.resolve() == ROOT / "configs"


def test_a_shipped_settings_file_is_found_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    assert settings_file("configs/smollm2.toml") == CONFIGS / "smollm2.toml"
    for other in ("configs/none.toml", "smollm2.toml", "other/smollm2.toml"):
        assert settings_file(other) == Path(other)
    own = tmp_path / "configs" / "smollm2.toml"
    own.parent.mkdir()
    own.touch()
    assert settings_file("configs/smollm2.toml") == Path("configs/smollm2.toml")

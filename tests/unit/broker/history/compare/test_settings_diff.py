"""Settings that differ between runs, by their full names."""

from pathlib import Path

from slipstream.broker.history.compare.settings_diff import (
    SettingDifference,
    differences,
    read_settings,
)
from tests.support.run_folders import write_run


def test_nested_settings_have_full_names_and_plain_values(tmp_path: Path):
    run = write_run(tmp_path / "a", settings='[algo.loss]\nname = "grpo"\nclip = [0.2, 0.28]\n')
    settings = read_settings(run)
    assert settings["learner.lr"] == "0.0001"
    assert settings["algo.loss.name"] == '"grpo"'
    assert settings["algo.loss.clip"] == "[0.2, 0.28]"


def test_only_what_differs_is_named_and_not_what_every_run_has_of_its_own(tmp_path: Path):
    a = read_settings(write_run(tmp_path / "a", settings="[data]\nseed = 1\n"))
    b = read_settings(write_run(tmp_path / "b", lr=0.0))
    assert differences([a, b]) == [
        SettingDifference("learner.lr", ("0.0001", "0.0")),
        SettingDifference("data.seed", ("1", None)),
    ]
    assert differences([a, a]) == []
    assert differences([]) == []


def test_settings_that_cannot_be_read_are_none(tmp_path: Path):
    assert read_settings(tmp_path) == {}
    (tmp_path / "resolved.toml").write_bytes(b"\xff = [")
    assert read_settings(tmp_path) == {}

"""`slipstream keys`, as a person uses it."""

import json
from pathlib import Path

import pytest

from slipstream.wire.errors import ConfigError
from tests.support.commands import call_command


def run(action: str, *names: str, folder: Path | None = None, role: str = "generator") -> int:
    return call_command("keys", action, *names, role=role, keys=folder)


def test_a_key_is_made_listed_and_revoked(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run("make", "gpu7", "gpu8", folder=tmp_path) == 0
    printed = capsys.readouterr().out
    assert str(tmp_path / "clients" / "gpu7.key") in printed
    assert "run.key_file=gpu8.key" in printed
    assert run("revoke", "gpu7", folder=tmp_path) == 0
    capsys.readouterr()
    assert call_command("keys", "list", keys=tmp_path, json=True) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in listed["authorized"]] == ["gpu8"]
    assert [one["name"] for one in listed["revoked"]] == ["gpu7"]
    assert "secret" not in json.dumps(listed)


def test_keys_of_a_run_are_in_the_folder_of_its_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    config = tmp_path / "run.toml"
    config.write_text(f'run.dir = "{tmp_path}/all"\n')
    assert call_command("keys", "make", "a", role="operator", config=config) == 0
    assert (tmp_path / "all" / "keys" / "clients" / "a.key").exists()
    config.write_text(f'broker.keys = "{tmp_path}/elsewhere"\n')
    assert call_command("keys", "make", "a", role="operator", config=config) == 0
    assert (tmp_path / "elsewhere" / "authorized" / "a.toml").exists()
    capsys.readouterr()


def test_a_role_that_there_is_not_is_refused_with_those_that_there_are(tmp_path: Path):
    with pytest.raises(ConfigError, match="--role king: expected one of generator, learner"):
        run("make", "a", folder=tmp_path, role="king")
    with pytest.raises(ConfigError, match="give the host"):
        run("make", folder=tmp_path)

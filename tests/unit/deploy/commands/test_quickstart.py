import argparse
from pathlib import Path

import pytest

from slipstream.deploy.commands.quickstart import ADDITION, add_arguments, copy_policy, main
from slipstream.deploy.examples.addition import SHIPPED_POLICY
from slipstream.wire.errors import ConfigError


def test_the_policy_is_copied_whole(tmp_path: Path):
    out = tmp_path / "new" / "model"
    copy_policy(ADDITION, out)
    wanted = {path.name: path.read_bytes() for path in SHIPPED_POLICY.iterdir()}
    assert {path.name: path.read_bytes() for path in out.iterdir()} == wanted


def test_nothing_is_replaced_by_the_policy(tmp_path: Path):
    (tmp_path / "mine").touch()
    for there in (tmp_path, tmp_path / "mine"):
        with pytest.raises(ConfigError, match="exists already"):
            copy_policy(ADDITION, there)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_settings_beside_a_policy_to_copy_are_refused(tmp_path: Path):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = ["--policy", str(tmp_path / "model")]
    with pytest.raises(ConfigError, match="leave settings"):
        main(parser.parse_args([*words, "learner.lr=0"]))
    assert not any(tmp_path.iterdir())
    assert main(parser.parse_args([*words, "--agent"])) == 0
    assert (tmp_path / "model" / "chat_template.jinja").is_file()

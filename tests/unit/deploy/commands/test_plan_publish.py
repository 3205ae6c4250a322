"""The costs of a publish as they are printed."""

import argparse
import json
from pathlib import Path

import pytest

from slipstream.deploy.commands.plan import command
from slipstream.weightbus.transports import TRANSPORTS
from slipstream.wire.errors import ConfigError


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    parser.set_defaults(parser=parser)
    return command.main(parser.parse_args(words))


def test_without_sizes_a_few_are_printed(capsys: pytest.CaptureFixture[str]):
    assert run("--publish", "--nics", "1") == 0
    printed = capsys.readouterr().out
    split = (line.rsplit(maxsplit=5) for line in printed.splitlines()[1:])
    rows = {name: figures for name, *figures in split}
    assert rows["until the last engine has it, s"] == ["2.44", "21.5", "71.6", "205", "102"]
    assert rows["an engine's load, s"] == ["0.25", "2.2", "7.34", "21", "10.5"]
    assert rows["commands to agents"] == ["64"] * 5


def test_options_and_settings_describe_the_hosts(capsys: pytest.CaptureFixture[str]):
    sizes = ["--publish", "--version-gb", "1", "--version-gb", "2", "--json"]
    hosts = ["--learner-hosts", "1", "--engine-hosts", "4", "--nics", "1", "--nic-gb-s", "0.125"]
    assert run(*sizes, *hosts, "weightbus.fanout=1") == 0
    first, second = json.loads(capsys.readouterr().out)
    assert (first["name"], second["name"]) == ("1 GB", "2 GB")
    assert first["cost"]["relayed_bytes"] == 1e9
    assert second["cost"]["forwarded_bytes"] == 6e9
    assert first["cost"]["receive_s"] == pytest.approx(8 + 3 * 16 * 64 * 2**20 / 0.125e9)


@pytest.mark.parametrize("transport", ["auto", *TRANSPORTS])
def test_a_transport_that_writes_live_is_not_staged(
    transport: str, capsys: pytest.CaptureFixture[str]
):
    words = ["--publish", "--version-gb", "1", "--json", f'weightbus.transport="{transport}"']
    assert run(*words) == 0
    (column,) = json.loads(capsys.readouterr().out)
    writes_live = transport == "collective"
    assert (column["cost"]["commands"] > 2 * 64) == writes_live


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("--publish --version-gb 1 --version-gb 0", "--version-gb"),
        ("--publish --version-gb inf", "--version-gb"),
        ("--publish --nics 0", "--nics"),
        ("--publish --delta 0", "--delta"),
        ("--publish --delta nan", "--delta"),
        ("--publish weightbus.fanout=-1", "weightbus.fanout"),
        ("--publish weightbus.transport=smoke", "weightbus.transport"),
    ],
)
def test_numbers_that_no_network_has_are_refused(words: str, name: str):
    with pytest.raises(ConfigError, match=name):
        run(*words.split())


def test_the_file_may_be_among_the_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "run.toml").write_text('[weightbus]\ntransport = "collective"\n')
    assert run(str(tmp_path / "run.toml"), "--publish", "--version-gb", "1", "--json") == 0
    (column,) = json.loads(capsys.readouterr().out)
    assert column["cost"]["commands"] > 2 * 32

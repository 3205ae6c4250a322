"""The costs of a publish as they are printed."""

import argparse
import json

import pytest

from slipstream.deploy.commands import weights
from slipstream.wire.errors import ConfigError


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    weights.add_arguments(parser)
    return parser.parse_args(words)


def test_without_options_three_sizes_are_printed(capsys: pytest.CaptureFixture[str]):
    assert weights.main(arguments()) == 0
    printed = capsys.readouterr().out
    rows = {line[:33].strip(): line[33:].split() for line in printed.splitlines()}
    assert rows["until the last engine has it, s"] == ["0.64", "18.8", "53.7", "26.8"]
    assert rows["an engine's pause, s"] == ["0.04", "1.18", "3.35", "1.68"]
    assert rows["commands to agents"] == ["64"] * 4


def test_options_describe_the_hosts(capsys: pytest.CaptureFixture[str]):
    words = "--gigabytes 1 2 --learner-hosts 1 --engine-hosts 4 --nic-gb-s 0.125 --fanout 1 --json"
    assert weights.main(arguments(*words.split())) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert (first["name"], second["name"]) == ("1 GB", "2 GB")
    assert first["cost"]["relayed_bytes"] == 1e9
    assert second["cost"]["forwarded_bytes"] == 6e9
    assert first["cost"]["receive_s"] == pytest.approx(8 + 3 * 4 * 64 * 2**20 / 0.125e9)


def test_numbers_that_are_none_of_a_network_are_refused():
    for words, name in [
        ("--gigabytes 1 0", "--gigabytes"),
        ("--nics 0", "--nics"),
        ("--fanout -1", "--fanout"),
        ("--delta 0", "--delta"),
        ("--delta nan", "--delta"),
        ("--gigabytes 1 inf", "--gigabytes"),
        ("--bucket-mib inf", "--bucket-mib"),
    ]:
        with pytest.raises(ConfigError, match=name):
            weights.columns(arguments(*words.split()))

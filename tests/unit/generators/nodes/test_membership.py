import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.generators.config import GeneratorSettings
from slipstream.generators.nodes.membership import place_of
from slipstream.weightbus.hosts.membership import HostPlace
from slipstream.wire.errors import ConfigError
from slipstream.wire.settings.rendezvous import Address
from tests.support.blank_model import write_blank_model
from tests.support.generator_settings import generator_settings_of

WHERE = "10.0.0.1:29500"
FAR = {"broker": "tcp://head:5555", "key_file": "gpu-7.key"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


def settings_of(
    model: Path, run: dict[str, Any] = FAR, nodes: int = 2, **sections: dict[str, Any]
) -> GeneratorSettings:
    generators = {"nodes": nodes, "sglang": {"tp_size": 2}} | sections.pop("generators", {})
    return generator_settings_of(model, run=run, generators=generators, **sections)


def test_a_command_line_names_a_place(model: Path):
    settings, address = settings_of(model), Address("10.0.0.1", 29500)
    assert place_of(settings, None, WHERE) == HostPlace(0, 2, 1, address)
    assert place_of(settings, 1, WHERE) == HostPlace(1, 2, 1, address)
    assert place_of(settings_of(model, nodes=1), None, None) is None


def test_options_that_do_not_fit_are_refused(model: Path):
    for run, nodes, follow, where, why in [
        (FAR, 1, None, WHERE, r"--rendezvous is for an engine on several hosts, .*nodes is 1"),
        (FAR, 1, 1, WHERE, r"--follow is for an engine on several hosts, .*nodes is 1"),
        (FAR, 2, None, None, r"generators\.nodes = 2 needs --rendezvous HOST:PORT"),
        (FAR, 2, 2, WHERE, r"--follow is 2, expected 1 to 1 \(generators\.nodes = 2\)"),
        (FAR, 2, 0, WHERE, r"--follow is 0, expected 1 to 1"),
        ({}, 2, None, WHERE, r"generators\.nodes = 2 needs run\.broker"),
        ({"broker": "tcp://h:1"}, 2, 1, WHERE, r"generators\.nodes = 2 needs run\.key_file"),
        (FAR, 2, None, "0.0.0.0:1", "--rendezvous is '0.0.0.0:1': name the address of node 0"),
    ]:
        settings = settings_of(model, run, nodes)
        with pytest.raises(ConfigError, match=why):
            place_of(settings, follow, where)


def test_what_an_engine_on_several_hosts_cannot_do_is_refused(model: Path):
    for sections, why in [
        ({"generators": {"nodes": 3}}, r"tp_size = 2 is not a multiple of generators\.nodes = 3"),
        (
            {"weightbus": {"transport": "disk"}},
            r'transport = "disk" with generators\.nodes = 2: every host .* set "tcp"',
        ),
        ({"weightbus": {"transport": "collective"}}, r'transport = "collective" with generators'),
        (
            {"lora": {"rank": 4, "targets": ["o_proj"]}},
            r"lora\.rank with generators\.nodes = 2: .* \"merged\"",
        ),
        (
            {"generators": {"sglang": {"tp_size": 2, "nnodes": 2}}},
            r"sglang\.nnodes follows from other settings",
        ),
    ]:
        with pytest.raises(ConfigError, match=why):
            settings_of(model, **sections)


def test_attention_groups_on_several_hosts_are_refused(tmp_path: Path):
    write_blank_model(tmp_path, hidden=16, layers=1)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "qwen3"}))
    groups = {"sglang": {"tp_size": 2, "attn_dp_size": 2}}
    with pytest.raises(
        ConfigError, match=r"attn_dp_size must be 1 with .*nodes = 2, got 2: .* pickled"
    ):
        settings_of(tmp_path, generators=groups)

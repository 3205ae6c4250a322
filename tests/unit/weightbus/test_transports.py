"""The registry of transports is the only place that names them."""

import ast
from pathlib import Path

import pytest

from slipstream.weightbus.config import weightbus_section
from slipstream.weightbus.relay.transports.base import transport_class
from slipstream.weightbus.transports import AUTO, FALLBACK, TRANSPORTS, TransportEntry, chosen
from slipstream.wire.errors import ConfigError
from slipstream.wire.messages.weightbus import PUBLISH_PHASES

ROOT = Path(__file__).parents[3]
HOMES = ("weightbus/transports.py", "weightbus/relay/transports/")


def _compared_names(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    compared = [node for node in ast.walk(tree) if isinstance(node, ast.Compare | ast.match_case)]
    inside = (part for node in compared for part in ast.walk(_condition(node)))
    return {str(part.value) for part in inside if isinstance(part, ast.Constant)} & set(TRANSPORTS)


def _condition(node: ast.Compare | ast.match_case) -> ast.AST:
    return node.pattern if isinstance(node, ast.match_case) else node


def test_no_module_outside_the_transports_compares_a_transport_name():
    found = {
        str(path.relative_to(ROOT)): names
        for package in ("weightbus", "generators", "learner", "wire")
        for path in sorted((ROOT / package).rglob("*.py"))
        if not str(path.relative_to(ROOT)).startswith(HOMES) and (names := _compared_names(path))
    }
    assert found == {}


@pytest.mark.parametrize("name", TRANSPORTS)
def test_registered_class_has_the_name_and_phases_that_records_show(name: str):
    found = transport_class(TRANSPORTS[name])
    assert found.name == name
    assert {found.prepare_phase, found.load_phase} <= set(PUBLISH_PHASES)


def test_fallback_serves_one_engine_and_is_open_to_hosts_far_away():
    assert not transport_class(TRANSPORTS[FALLBACK]).shares_group
    assert TRANSPORTS[FALLBACK].why_not_from_afar("127.0.0.1") == ""


def test_path_that_leads_to_another_class_is_refused():
    with pytest.raises(TypeError, match="is no transport"):
        transport_class(TransportEntry("slipstream.weightbus.relay.member:Member"))


def test_setting_accepts_registered_transports_and_lists_them_when_it_refuses_one():
    for name in TRANSPORTS:
        assert weightbus_section({"weightbus": {"transport": name}}).transport == name
    with pytest.raises(ConfigError) as caught:
        weightbus_section({"weightbus": {"transport": "carrier-pigeon"}})
    assert str(caught.value) == (
        "weightbus.transport is 'carrier-pigeon', expected one of auto, collective, tcp, disk"
    )


def test_collective_needs_an_address_of_this_host_for_engines_on_others():
    entry = TRANSPORTS["collective"]
    assert "weightbus.host is 127.0.0.1" in entry.why_not_from_afar("127.0.0.1")
    assert entry.why_not_from_afar("10.0.0.1") == ""


def test_auto_takes_the_shortest_pause():
    assert chosen(AUTO) == "tcp"
    assert chosen("disk") == "disk"
    assert weightbus_section({}).transport == AUTO

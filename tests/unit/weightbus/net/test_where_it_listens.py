"""Addresses of the weight bus: what is refused, and which interface collectives take."""

import socket

import pytest

from slipstream.learner.publish.relay_process import RelayLaunch
from slipstream.weightbus.config import weightbus_section
from slipstream.weightbus.net.interfaces import interface_variables
from slipstream.wire.errors import ConfigError
from slipstream.wire.settings.load import Table


def listening(address: str, setting: str = "listen") -> Table:
    return {"weightbus": {setting: address}}


@pytest.mark.parametrize(
    ("listen", "why"),
    [
        ("10.0.0.1:5600", "expected tcp://ADDRESS:PORT"),
        ("tcp://10.0.0.1", "expected tcp://ADDRESS:PORT"),
        ("tcp://10.0.0.1:65535", "a port up to 65534"),
        ("tcp://0.0.0.0:5600", "name the address at which generators find this host"),
        ("tcp://0:5600", "expected an IPv4 address"),
        ("tcp://*:5600", "expected an IPv4 address"),
        ("tcp://head:5600", "a name may mean several"),
        ("tcp://[::1]:5600", "expected an IPv4 address"),
    ],
)
@pytest.mark.parametrize("setting", ["listen", "forward"])
def test_an_address_that_others_could_not_connect_to_is_refused(
    listen: str, why: str, setting: str
):
    with pytest.raises(ConfigError, match=why) as refused:
        weightbus_section(listening(listen, setting))
    assert f"weightbus.{setting}" in str(refused.value)


@pytest.mark.parametrize("listen", ["", "tcp://10.0.0.1:5600", "tcp://127.0.0.1:0"])
def test_an_address_is_taken(listen: str):
    assert weightbus_section(listening(listen)).listen == listen


def test_loopback_ignores_interfaces_in_the_environment():
    outside = {"GLOO_SOCKET_IFNAME": "eth0"}
    found = interface_variables("127.0.0.1", outside)
    assert found == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


def test_an_address_of_this_host_leads_over_its_interface_unless_the_user_chose_another():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # nothing is sent
        except OSError:
            pytest.skip("this machine has no network")
        own = probe.getsockname()[0]
    found = interface_variables(own, {})
    assert set(found) == {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}
    assert set(found.values()) <= {name for _, name in socket.if_nameindex()} - {"lo"}
    assert interface_variables(own, {"GLOO_SOCKET_IFNAME": "x"}).keys() == {"NCCL_SOCKET_IFNAME"}


def test_an_address_that_leads_nowhere_sets_nothing():
    assert interface_variables("no such host", {}) == {}


def test_a_relay_does_not_inherit_what_the_learner_chose_for_itself(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    launch = RelayLaunch()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert "GLOO_SOCKET_IFNAME" not in launch.environment

import socket

import pytest

from slipstream.weightbus.net.listening import endpoint_of, listen_at
from slipstream.wire.errors import ConfigError
from slipstream.wire.settings.rendezvous import Address


def test_a_socket_listens_on_one_address_alone():
    with listen_at("127.0.0.1", named="--rendezvous") as listener:
        host, port = listener.getsockname()
        assert host == "127.0.0.1"
        socket.create_connection((host, port), timeout=5).close()


def test_an_address_of_another_machine_is_refused_with_its_setting():
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1 \(weightbus\.host\): it is not an addr"):
        listen_at("192.0.2.1", named="weightbus.host")


def test_zeromq_gets_numbers_in_the_place_of_names():
    for address, endpoint in [
        (Address("127.0.0.1", 29500), "tcp://127.0.0.1:29500"),
        (Address("::1", 29500), "tcp://[::1]:29500"),
    ]:
        assert endpoint_of(address, named="--rendezvous") == endpoint


def test_what_is_no_name_is_refused_with_its_option():
    name = "a" * 64
    with pytest.raises(ConfigError, match=rf"^{name}:1 \(--rendezvous\) is no address: no host"):
        endpoint_of(Address(name, 1), named="--rendezvous")

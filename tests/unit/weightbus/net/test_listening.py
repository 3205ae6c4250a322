import socket

import pytest

from slipstream.weightbus.net.listening import listen_at
from slipstream.wire.errors import ConfigError


def test_a_socket_listens_on_one_address_alone():
    with listen_at("127.0.0.1", named="--rendezvous") as listener:
        host, port = listener.getsockname()
        assert host == "127.0.0.1"
        socket.create_connection((host, port), timeout=5).close()
        with pytest.raises(ConfigError, match=rf"port {port} \(--rendezvous\): another process"):
            listen_at(host, port, named="--rendezvous")


def test_an_address_of_another_machine_is_refused_with_its_setting():
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1 \(weightbus\.host\): it is not an addr"):
        listen_at("192.0.2.1", named="weightbus.host")

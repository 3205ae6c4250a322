import os
import socket
from collections.abc import Iterator

import pytest

from tests.support.listening import Listener, listeners_of, parsed_table

HEADER = (
    "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt uid timeout ino\n"
)


@pytest.fixture
def bound() -> Iterator[socket.socket]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener


def test_a_listener_of_this_process_is_found_by_its_port(bound: socket.socket):
    port = bound.getsockname()[1]
    mine = [one for one in listeners_of([os.getpid()]) if one.port == port]
    assert [(one.address, one.on_loopback) for one in mine] == [("127.0.0.1", True)]


@pytest.mark.parametrize(
    ("digits", "address", "on_loopback"),
    [
        ("0100007F", "127.0.0.1", True),
        ("00000000", "0.0.0.0", False),  # noqa: S104 what it distinguishes
        ("0200000A", "10.0.0.2", False),
        ("00000000000000000000000001000000", "::1", True),
        ("00000000000000000000000000000000", "::", False),
        ("0000000000000000FFFF00000100007F", "127.0.0.1", True),
    ],
)
def test_addresses_of_the_kernel_s_table(digits: str, address: str, on_loopback: bool):
    line = (
        f"   0: {digits}:1F90 {digits}:0000 0A 00000000:00000000 00:00000000 00000000  0  0 77 1\n"
    )
    assert parsed_table(HEADER + line) == {"77": (address, 8080)}
    assert Listener("x", address, 8080).on_loopback is on_loopback


def test_what_is_connected_does_not_listen():
    line = "   0: 0100007F:1F90 0100007F:0050 01 00000000:00000000 00:00000000 00000000 0 0 77 1\n"
    assert parsed_table(HEADER + line) == {}

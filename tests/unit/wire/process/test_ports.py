import socket
from pathlib import Path

from slipstream.wire.process.ports import free_port


def test_a_port_is_free_and_none_that_a_connection_may_get(tmp_path: Path):
    (tmp_path / "range").write_text("25000\t60999\n")
    ports = {free_port(given_ports=tmp_path / "range") for _ in range(50)}
    assert len(ports) > 40
    assert all(20_000 <= port < 25_000 for port in ports)
    with socket.socket() as server:
        server.bind(("127.0.0.1", ports.pop()))


def test_a_range_that_leaves_no_room_is_not_followed(tmp_path: Path):
    for text in ("1024 65000", "", "nonsense"):
        (tmp_path / "range").write_text(text)
        assert 20_000 <= free_port(given_ports=tmp_path / "range") < 32_768

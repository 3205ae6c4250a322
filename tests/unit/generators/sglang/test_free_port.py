import socket
from pathlib import Path

import pytest

from slipstream.generators.sglang import start_order
from slipstream.generators.sglang.start_order import free_port


def test_a_port_is_free_and_none_that_a_connection_may_get(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    (tmp_path / "range").write_text("25000\t60999\n")
    monkeypatch.setattr(start_order, "_PORT_RANGE", tmp_path / "range")
    ports = {free_port() for _ in range(50)}
    assert len(ports) > 40
    assert all(20_000 <= port < 25_000 for port in ports)
    with socket.socket() as server:
        server.bind(("127.0.0.1", ports.pop()))


def test_a_range_that_leaves_no_room_is_not_followed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    for text in ("1024 65000", "", "nonsense"):
        (tmp_path / "range").write_text(text)
        monkeypatch.setattr(start_order, "_PORT_RANGE", tmp_path / "range")
        assert 20_000 <= free_port() < 32_768

import pytest

from slipstream.wire.errors import ConfigError
from slipstream.wire.settings.rendezvous import Address, parse_rendezvous


def test_an_address_is_read_and_shown_alike():
    for text, address in [
        ("10.0.0.1:29400", Address("10.0.0.1", 29400)),
        ("head:1", Address("head", 1)),
        ("[fd00::1]:65535", Address("fd00::1", 65535)),
    ]:
        assert parse_rendezvous(text) == address
        assert str(address) == text


def test_what_is_no_address_of_a_node_is_refused():
    for text, why in [
        ("10.0.0.1", "expected HOST:PORT"),
        (":29400", "expected HOST:PORT"),
        ("head:http", "expected HOST:PORT"),
        ("head:²", "expected HOST:PORT"),
        ("head:0", "expected a port from 1 to 65535, got 0"),
        ("head:65536", "expected a port from 1 to 65535, got 65536"),
        ("fd00::1:29400", "an IPv6 address stands in brackets"),
        ("[head]:29400", "an IPv6 address stands in brackets"),
        ("[fd00:zz]:29400", "'fd00:zz' is no IPv6 address"),
        ("0.0.0.0:29400", "name the address of node 0"),
        ("[::]:29400", "name the address of node 0"),
    ]:
        with pytest.raises(ConfigError, match="--rendezvous is ") as refusal:
            parse_rendezvous(text)
        assert why in str(refusal.value)
        assert repr(text) in str(refusal.value)

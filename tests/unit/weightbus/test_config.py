"""Settings of the weight bus that depend on each other."""

import pytest

from slipstream.weightbus.config import weightbus_section
from slipstream.wire.errors import ConfigError

TIMES = ("timeout_s", "receive_timeout_s", "member_silence_s", "linger_s")


def test_what_goes_unencrypted_has_digests_that_strangers_cannot_fit():
    for bulk, fanout, digests, kind in [
        ("encrypted", 0, "auto", "xxh3"),
        ("encrypted", 1, "auto", "blake2b"),
        ("plain", 0, "auto", "keyed"),
        ("plain", 1, "auto", "blake2b"),
        ("encrypted", 0, "xxh3", "xxh3"),
        ("plain", 0, "keyed", "keyed"),
        ("encrypted", 0, "blake2b", "blake2b"),
    ]:
        table = {"bulk": bulk, "digests": digests, "fanout": fanout}
        section = weightbus_section({"weightbus": table})
        assert section.digest_kind == kind
    with pytest.raises(ConfigError, match=r'digests = "xxh3" with weightbus.bulk = "plain"'):
        weightbus_section({"weightbus": {"bulk": "plain", "digests": "xxh3"}})


@pytest.mark.parametrize("digests", ["xxh3", "keyed"])
def test_chains_have_digests_that_no_generator_can_fit(digests: str):
    table = {"digests": digests, "fanout": 2}
    with pytest.raises(ConfigError, match=rf'digests = "{digests}" with weightbus.fanout = 2'):
        weightbus_section({"weightbus": table})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in TIMES for value in (0, -1.0, 1e30, float("inf"), float("nan"))),
        ("connections", -1),
        ("connections", 257),
        ("listen", "tcp://10.0.0.1:\u0663"),
        ("listen", "tcp://10.0.0.1:70000"),
        ("forward", "tcp://0.0.0.0:0"),
        ("forward", "tcp://10.0.0.1:-1"),
    ],
)
def test_what_no_library_can_take_is_refused_in_one_line(name: str, value: object):
    with pytest.raises(ConfigError, match=name) as refusal:
        weightbus_section({"weightbus": {name: value}})
    assert "\n" not in str(refusal.value)


def test_times_and_connections_may_be_as_large_as_libraries_take():
    table = dict.fromkeys(TIMES, 1e9) | {"connections": 256}
    assert weightbus_section({"weightbus": table}).timeout_s == 1e9

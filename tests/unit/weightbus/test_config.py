"""Settings of the weight bus that depend on each other."""

import pytest

from slipstream.weightbus.config import weightbus_section
from slipstream.wire.errors import ConfigError

TIMES = ("timeout_s", "receive_timeout_s", "member_silence_s", "linger_s")


def test_what_goes_unencrypted_has_digests_that_strangers_cannot_fit_unless_others_were_chosen():
    for bulk, fanout, digests, kind, takes_plain in [
        ("encrypted", 0, "auto", "xxh3", False),
        ("encrypted", 1, "auto", "blake2b", True),
        ("plain", 0, "auto", "keyed", True),
        ("plain", 1, "auto", "blake2b", True),
        ("encrypted", 0, "xxh3", "xxh3", True),
        ("plain", 0, "xxh3", "xxh3", True),
        ("plain", 0, "keyed", "keyed", True),
        ("encrypted", 0, "blake2b", "blake2b", True),
    ]:
        table = {"bulk": bulk, "digests": digests, "fanout": fanout}
        section = weightbus_section({"weightbus": table})
        assert section.digest_kind == kind
        assert section.takes_plain is takes_plain


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
        ("connections", 10**30),
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

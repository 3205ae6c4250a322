"""Settings of the weight bus that depend on each other."""

import pytest

from slipstream.weightbus.config import weightbus_section


@pytest.mark.parametrize(
    ("bulk", "fanout", "digests", "kind", "takes_plain"),
    [
        ("encrypted", 0, "auto", "xxh3", False),
        ("encrypted", 1, "auto", "xxh3", False),
        ("plain", 0, "auto", "keyed", True),
        ("plain", 1, "auto", "blake2b", True),
        ("encrypted", 0, "xxh3", "xxh3", True),
        ("plain", 0, "xxh3", "xxh3", True),
        ("plain", 1, "keyed", "keyed", True),
        ("encrypted", 0, "blake2b", "blake2b", True),
    ],
)
def test_what_goes_unencrypted_has_digests_that_strangers_cannot_fit_unless_others_were_chosen(
    bulk: str, fanout: int, digests: str, kind: str, takes_plain: bool
):
    table = {"bulk": bulk, "digests": digests, "fanout": fanout}
    section = weightbus_section({"weightbus": table})
    assert section.digest_kind == kind
    assert section.takes_plain is takes_plain

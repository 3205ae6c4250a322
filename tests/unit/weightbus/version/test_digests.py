"""Digests say how they were computed, and are checked that way."""

import pytest

from slipstream.weightbus.version.digests import DigestKind, digest_of, kind_of
from slipstream.weightbus.version.disk import check_digest
from slipstream.wire.errors import PublishError

DATA = memoryview(bytes(range(256)))


@pytest.mark.parametrize(("kind", "chars"), [("xxh3", 32), ("blake2b", 8 + 64)])
def test_a_digest_is_checked_as_it_was_computed(kind: DigestKind, chars: int):
    digest = digest_of(DATA, kind)
    assert len(digest) == chars
    assert kind_of(digest) == kind
    check_digest("weight", digest, DATA)
    with pytest.raises(PublishError, match=f"weight arrived with digest .*, expected {digest}"):
        check_digest("weight", digest, DATA[1:])


def test_no_digest_stands_for_the_other():
    with pytest.raises(PublishError):
        check_digest("weight", digest_of(DATA, "blake2b").removeprefix("blake2b:"), DATA)
    with pytest.raises(PublishError):
        check_digest("weight", "blake2b:" + digest_of(DATA, "xxh3"), DATA)

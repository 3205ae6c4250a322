"""Digests say how they were computed, and are checked that way."""

import pytest

from slipstream.weightbus.version.digests import DigestKind, difference, digest_of, kind_of
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


def test_a_keyed_digest_is_good_for_its_bytes_alone_and_is_never_shown():
    digest, other = digest_of(DATA, "keyed"), digest_of(DATA, "keyed")
    assert kind_of(digest) == "keyed"
    assert digest != other, "a key for every tensor"
    for one in (digest, other):
        check_digest("weight", one, DATA)
    _, seed, tag = digest.split(":")
    wrong = (DATA[1:], memoryview(bytes([1, *DATA[1:]])), memoryview(b""), memoryview(bytes(256)))
    for data in wrong:
        with pytest.raises(PublishError, match="weight arrived with other bytes") as refused:
            check_digest("weight", digest, data)
        assert seed not in str(refused.value)
        assert tag not in str(refused.value)
    for forged in (f"keyed:{seed}:", f"keyed:{other.split(':')[1]}:{tag}", "keyed:", "keyed::"):
        with pytest.raises(PublishError):
            check_digest("weight", forged, DATA)


def test_a_keyed_digest_of_many_chunks_is_that_of_the_whole():
    data = memoryview(bytes(range(256)) * (40 << 12))  # 40 MiB
    digest = digest_of(data, "keyed")
    assert difference(data, digest) == ""
    assert difference(data[:-1], digest)
    assert difference(memoryview(bytes(data[:-1]) + b"\0"), digest)


def test_no_digest_stands_for_the_other():
    with pytest.raises(PublishError):
        check_digest("weight", digest_of(DATA, "blake2b").removeprefix("blake2b:"), DATA)
    with pytest.raises(PublishError):
        check_digest("weight", "blake2b:" + digest_of(DATA, "xxh3"), DATA)

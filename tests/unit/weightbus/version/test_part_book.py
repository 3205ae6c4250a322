"""Whom a part lets fetch, as heads come and go."""

from slipstream.weightbus.version.part_book import KnownKeys, digest_of_keys

KEYS, MORE = {"a": "gpu-1"}, {"a": "gpu-1", "b": "gpu-2"}
DIGEST = digest_of_keys(KEYS)
LINGER_S = 60.0


def known() -> KnownKeys:
    keys = KnownKeys(linger_s=LINGER_S)
    assert keys.heard(DIGEST, KEYS, 0.0)
    return keys


def test_keys_have_one_digest_in_any_order_and_another_for_another_name():
    assert digest_of_keys(MORE) == digest_of_keys(dict(reversed(MORE.items())))
    assert len({digest_of_keys(k) for k in ({}, KEYS, MORE, {"a": "gpu-2"})}) == 4


def test_nobody_is_known_before_a_head_says_who():
    keys = KnownKeys(linger_s=LINGER_S)
    assert keys.lapses_in_s(0.0) is None
    assert not keys.heard("", None, 0.0), "a head that knows nobody itself"
    assert not keys.heard(DIGEST, None, 0.0), "a head that takes us to have them"
    assert keys.digest == ""


def test_keys_stay_as_long_as_a_head_confirms_them_without_sending_them_again():
    keys = known()
    for now_s in (50.0, 100.0, 150.0):
        assert not keys.heard(DIGEST, None, now_s)
        assert keys.lapses_in_s(now_s) == LINGER_S
    assert keys.lapses_in_s(200.0) == 10.0


def test_a_head_that_has_other_keys_or_none_yet_confirms_nothing():
    keys = known()
    assert not keys.heard(digest_of_keys(MORE), None, 50.0)
    assert not keys.heard("", None, 55.0)
    assert keys.lapses_in_s(61.0) == -1.0
    keys.lapse()
    assert keys.lapses_in_s(61.0) is None
    assert not keys.heard(DIGEST, None, 62.0), "it has forgotten them"
    assert keys.heard(digest_of_keys(MORE), MORE, 63.0)
    assert keys.digest == digest_of_keys(MORE)


def test_keys_that_are_not_those_of_the_digest_are_not_taken():
    assert not KnownKeys(linger_s=LINGER_S).heard(DIGEST, MORE, 0.0)

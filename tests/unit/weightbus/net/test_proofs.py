"""What a member proves to a plain door: with its own pair, to that door, for that request."""

import pytest
import zmq
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from zmq.utils import z85

from slipstream.weightbus.net.proofs import (
    DoorRefusals,
    ProofsAtDoor,
    proof_at_door,
    proof_of_member,
)
from slipstream.weightbus.net.traffic import Traffic
from slipstream.wire.errors import ConfigError

REQUEST = b"bucket 3 of v1.7"


def pair() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def test_keys_of_curve_are_keys_of_x25519():
    for _ in range(20):
        public, secret = pair()
        same = X25519PrivateKey.from_private_bytes(z85.decode(secret)).public_key()
        assert same.public_bytes_raw() == z85.decode(public)


def test_both_sides_compute_the_same():
    (public, secret), (door, door_secret) = pair(), pair()
    ours = proof_of_member(public=public, secret=secret, door=door)
    theirs = proof_at_door(public=door, secret=door_secret, member=public)
    assert ours.password == theirs.password
    assert theirs.holds(REQUEST, ours.of(REQUEST))
    assert theirs.holds(memoryview(REQUEST), memoryview(ours.of(REQUEST)))


def test_a_proof_is_of_one_request_one_member_and_one_door():
    (public, secret), (door, door_secret), (other, other_secret) = pair(), pair(), pair()
    mac = proof_of_member(public=public, secret=secret, door=door).of(REQUEST)
    here = proof_at_door(public=door, secret=door_secret, member=public)
    assert not here.holds(REQUEST + b"0", mac)
    assert not here.holds(REQUEST, mac[:-1])
    assert not here.holds(REQUEST, bytes([mac[0] ^ 1, *mac[1:]]))
    assert not here.holds(REQUEST, bytes.fromhex(here.password)), "that of a connection"
    elsewhere = proof_at_door(public=other, secret=other_secret, member=public)
    of_another = proof_at_door(public=door, secret=door_secret, member=other)
    assert not elsewhere.holds(REQUEST, mac)
    assert not of_another.holds(REQUEST, mac)


def test_who_knows_public_keys_alone_proves_nothing():
    (public, _), (door, door_secret), (thief, thief_secret) = pair(), pair(), pair()
    claimed = proof_of_member(public=public, secret=thief_secret, door=door)
    proofs = ProofsAtDoor(
        public=door, secret=door_secret, is_admitted=lambda key: key in {public, thief}
    )
    assert not proofs.may_connect(public, claimed.password)
    assert not proofs.sent(public, REQUEST, claimed.of(REQUEST))


def test_a_member_connects_while_it_is_admitted():
    (public, secret), (door, door_secret) = pair(), pair()
    admitted = {public}
    proofs = ProofsAtDoor(public=door, secret=door_secret, is_admitted=admitted.__contains__)
    password = proof_of_member(public=public, secret=secret, door=door).password
    assert proofs.may_connect(public, password)
    assert not proofs.may_connect(public, "")
    assert not proofs.may_connect(public, password[:-1] + "\N{REPLACEMENT CHARACTER}")
    admitted.clear()
    assert not proofs.may_connect(public, password)


def test_what_is_no_key_proves_nothing_and_crashes_nothing():
    for key in ["", "short", "k" * 39 + "~", "\N{SNOWMAN}" * 40, "0" * 40, "#" * 40]:
        door, door_secret = pair()
        proofs = ProofsAtDoor(public=door, secret=door_secret, is_admitted=lambda _: True)
        assert not proofs.may_connect(key, "password")
        assert not proofs.sent(key, REQUEST, b"mac")
        public, secret = pair()
        with pytest.raises(ConfigError, match="is no public key"):
            proof_of_member(public=public, secret=secret, door=key)


def test_refusals_are_counted_all_and_logged_once_a_minute(caplog: pytest.LogCaptureFixture):
    traffic, now = Traffic(), [0.0]
    refusals = DoorRefusals(traffic, now=lambda: now[0])
    for second in range(150):
        now[0] = float(second)
        refusals.add("a request of a stranger")
    assert traffic.unproved_requests == 150
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        f"refused: a request of a stranger ({count} since the last such line)"
        for count in (1, 60, 60)
    ]

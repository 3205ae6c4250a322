"""Keys proved without encryption: a request at such a door carries a MAC and can be read.

The keys are those of CURVE. X25519 derives a secret from a member's pair and a door's pair, and
this keys the MACs, so no other secret is needed. A door makes a new pair at each start: a proof for
one door proves nothing to another.
"""

import hashlib
import hmac
import logging
import struct
import time
from collections.abc import Callable
from functools import lru_cache

from typing_extensions import override
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils import z85

from slipstream.weightbus.net.traffic import Traffic
from slipstream.wire.errors import ConfigError
from slipstream.wire.messages.codec import Frame
from slipstream.wire.process.rate_limited_log import RateLimitedLog

_log = logging.getLogger(__name__)
_BYTES = 32
_CONTEXT = b"slipstream-bulk"  # separates this key from other uses of the pairs
_CONNECTION, _REQUEST = b"connection", b"request"
_MAX_MEMBERS = 4_096  # members with a kept key; others are derived again


class Proof:
    """MACs that only a member and a door can compute, from their two key pairs."""

    def __init__(self, shared: bytes, *, member: str, door: str) -> None:
        """Derive the key of the MACs.

        ``shared`` is the result of X25519 for either secret and the other public key; keys are Z85.
        """
        material = shared + member.encode() + door.encode()
        self._key = hashlib.blake2b(material, digest_size=_BYTES, person=_CONTEXT).digest()
        self.password = self._mac(b"", _CONNECTION).hex()
        """Password of a connection, which strangers cannot open."""

    def of(self, request: Frame) -> bytes:
        """Return the MAC of a request."""
        return self._mac(request, _REQUEST)

    def holds(self, request: Frame, mac: Frame) -> bool:
        """True if ``mac`` is that of a request."""
        return hmac.compare_digest(self.of(request), bytes(mac))

    def _mac(self, data: Frame, what: bytes) -> bytes:
        return hashlib.blake2b(data, key=self._key, digest_size=_BYTES, person=what).digest()


def proof_of_member(*, public: str, secret: str, door: str) -> Proof:
    """Return the proof of a member's pair (Z85) to the door with a public key.

    Raises:
        ConfigError: one of them is not a key.
    """
    return Proof(_shared(secret, door), member=public, door=door)


def proof_at_door(*, public: str, secret: str, member: str) -> Proof:
    """Return the proof of a member with a public key to the door of this pair (Z85).

    Raises:
        ConfigError: one of them is not a key.
    """
    return Proof(_shared(secret, member), member=member, door=public)


def _shared(secret: str, public: str) -> bytes:
    # Import here: most runs have no plain door.
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

    try:
        ours = X25519PrivateKey.from_private_bytes(z85.decode(secret))
        theirs = X25519PublicKey.from_public_bytes(z85.decode(public))
        return ours.exchange(theirs)
    except (ValueError, KeyError, struct.error) as error:
        raise ConfigError(f"{public!r} is no public key: nothing can be proved to it") from error


class ProofsAtDoor:
    """Proofs of members at one door."""

    def __init__(self, *, public: str, secret: str, is_admitted: Callable[[str], bool]) -> None:
        """``is_admitted`` is called each time with a public key."""
        self._is_admitted = is_admitted

        @lru_cache(maxsize=_MAX_MEMBERS)
        def proof(member: str) -> Proof | None:
            try:
                return proof_at_door(public=public, secret=secret, member=member)
            except ConfigError:
                return None

        self._proof = proof

    def may_connect(self, member: str, password: str) -> bool:
        """True if the holder of this key may connect."""
        if not self._is_admitted(member) or (proof := self._proof(member)) is None:
            return False
        return hmac.compare_digest(proof.password.encode(), password.encode())

    def sent(self, member: str, request: Frame, mac: Frame) -> bool:
        """True if the holder of this key, admitted or not, sent a request."""
        proof = self._proof(member)
        return proof is not None and proof.holds(request, mac)


class Authenticator(AsyncioAuthenticator):
    """Decides about connections that prove a key, by CURVE or by a MAC as the password of PLAIN.

    pyzmq takes a function for CURVE, and for PLAIN a table of passwords alone.
    """

    may_connect: Callable[[str, str], bool] = staticmethod(lambda _key, _password: False)
    """Decides about a key and the password that came with it."""

    @override
    def _authenticate_plain(self, domain: str, username: str, password: str) -> tuple[bool, bytes]:
        is_known = self.may_connect(username, password)
        return is_known, b"OK" if is_known else b"Unknown key"


class DoorRefusals:
    """Counts refusals without an answer, and logs them once a minute at most."""

    def __init__(
        self, traffic: Traffic | None = None, *, now: Callable[[], float] = time.monotonic
    ) -> None:
        """Count in ``traffic``; ``now`` returns monotonic seconds."""
        self._traffic = traffic or Traffic()
        self._rarely = RateLimitedLog(_log, now=now)

    def add(self, what: str) -> None:
        """Count one refusal; ``what`` is logged, with the number since the last line."""
        self._traffic.unproved_requests += 1
        if num := self._rarely.num_due():
            _log.warning("refused: %s (%d since the last such line)", what, num)

"""Keys proved without encryption: what goes over such a door carries a MAC and can be read.

The keys are those of CURVE. What a member's pair and a door's have in common, by X25519, keys the
MACs, so there is no other secret. A door makes its pair anew at each start: what was proved to one
proves nothing to another.
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
from slipstream.wire.process.rarely import Rarely

_log = logging.getLogger(__name__)
_BYTES = 32
_CONTEXT = b"slipstream-bulk"  # of the key, not of any other use of the pairs
_CONNECTION, _REQUEST = b"connection", b"request"
_MAX_MEMBERS = 4_096  # whose keys are kept; others are derived again


class Proof:
    """What the holders of two key pairs, a member's and a door's, can compute and nobody else."""

    def __init__(self, shared: bytes, *, member: str, door: str) -> None:
        """Derive the key of the MACs.

        Args:
            shared: what X25519 makes of either secret and the other public key.
            member: public key (Z85) of the member.
            door: public key (Z85) of the door.
        """
        material = shared + member.encode() + door.encode()
        self._key = hashlib.blake2b(material, digest_size=_BYTES, person=_CONTEXT).digest()
        self.password = self._mac(b"", _CONNECTION).hex()
        """Of a connection: strangers get none."""

    def of(self, request: Frame) -> bytes:
        """Return the MAC of a request."""
        return self._mac(request, _REQUEST)

    def holds(self, request: Frame, mac: Frame) -> bool:
        """True if ``mac`` is that of a request."""
        return hmac.compare_digest(self.of(request), bytes(mac))

    def _mac(self, data: Frame, what: bytes) -> bytes:
        return hashlib.blake2b(data, key=self._key, digest_size=_BYTES, person=what).digest()


def proof_of_member(*, public: str, secret: str, door: str) -> Proof:
    """Return what proves a member's pair (Z85) to the door with a public key.

    Raises:
        ConfigError: one of them is no key.
    """
    return Proof(_shared(secret, door), member=public, door=door)


def proof_at_door(*, public: str, secret: str, member: str) -> Proof:
    """Return what a member with a public key proves to the door of this pair (Z85).

    Raises:
        ConfigError: one of them is no key.
    """
    return Proof(_shared(secret, member), member=member, door=public)


def _shared(secret: str, public: str) -> bytes:
    # Imported here, as most runs have no plain door.
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

    try:
        ours = X25519PrivateKey.from_private_bytes(z85.decode(secret))
        theirs = X25519PublicKey.from_public_bytes(z85.decode(public))
        return ours.exchange(theirs)
    except (ValueError, KeyError, struct.error) as error:
        raise ConfigError(f"{public!r} is no public key: nothing can be proved to it") from error


class ProofsAtDoor:
    """What members prove to one door."""

    def __init__(self, *, public: str, secret: str, is_admitted: Callable[[str], bool]) -> None:
        """``is_admitted`` decides about a public key, each time."""
        self._is_admitted = is_admitted

        @lru_cache(maxsize=_MAX_MEMBERS)
        def proof(member: str) -> Proof | None:
            try:
                return proof_at_door(public=public, secret=secret, member=member)
            except ConfigError:
                return None

        self._proof = proof

    def may_connect(self, member: str, password: str) -> bool:
        """True if a connection may be made by who holds this key."""
        if not self._is_admitted(member) or (proof := self._proof(member)) is None:
            return False
        return hmac.compare_digest(proof.password.encode(), password.encode())

    def sent(self, member: str, request: Frame, mac: Frame) -> bool:
        """True if the holder of this key, admitted or not, made a request."""
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


class Refusals:
    """Counts what is refused without an answer, and logs it once a minute at most."""

    def __init__(
        self, traffic: Traffic | None = None, *, now: Callable[[], float] = time.monotonic
    ) -> None:
        """Count in ``traffic``; ``now`` returns monotonic seconds."""
        self._traffic = traffic or Traffic()
        self._rarely = Rarely(_log, now=now)

    def add(self, what: str) -> None:
        """Count one; ``what`` is logged, with how many there were since."""
        self._traffic.unproved_requests += 1
        if num := self._rarely.num_due():
            _log.warning("refused: %s (%d since the last such line)", what, num)

"""Hostile frames, made of real messages, and what is to become of each.

A sequence is a few messages that one client sends one after the other. ``Mutator`` damages real
ones or sends them where they do not belong. ``verdict`` states from outside what the broker has to
count each message as, or that it may act on it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Literal, TypeAlias

import msgspec

from slipstream.broker.server.limits import MAX_FRAMES, max_body_bytes, max_bytes
from slipstream.broker.server.permissions import ALLOWED
from slipstream.wire.errors import ProtocolError
from slipstream.wire.messages.broker import Hello, Role, StoreImage, SubmitTrajectory
from slipstream.wire.messages.codec import decode_request
from slipstream.wire.messages.images import digest_of
from slipstream.wire.messages.pieces import joined, most_pieces

Frames: TypeAlias = list[bytes]  # of one message: id, session, body, attached
Verdict = Literal["malformed", "forbidden", "hello_first", "allowed"]
MAX_MESSAGE_BYTES = 1_000_000
_MAX_ID_BYTES = 64
_SURROGATE = "SURROGATE"
_HOSTILE: tuple[object, ...] = (
    *(float("nan"), float("inf"), float("-inf"), 1e308, -1.0, 0.5, -0.0),
    *(-1, 0, 1, 7, 2**31, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)),
    *(None, True, False, b"", b"\xff" * 9, "", "\0", "\0" * 99, "a\nb\x1b[2J", _SURROGATE),
    *("x" * 300, "x" * 20_000, "e\u0301\u202e", "admin", "@", "nan", "1e999"),
    *([], {}, [[]], [None], [1] * 2_000, [-1] * 50, {"x": {}}, {"": float("nan")}, [2**64 - 1]),
    *({f"name {i}": 1e308 for i in range(200)}, {"tokens": float("inf")}, {"tokens": -1e308}),
)
_LENGTHS = (b"\xdd", b"\xdf", b"\xc6", b"\xdb", b"\xc9")  # list, map, bytes, text, extension


@dataclass(slots=True)
class Attacker:
    """One connection: what it may use of its own, and what it knows of others."""

    role: Role | None  # of its hello
    session: bytes = b""
    others: list[bytes] = field(default_factory=list)  # sessions of other connections, and old ones


class Mutator:
    """Makes sequences out of real messages (body, attached frames)."""

    def __init__(self, random: Random, corpus: Sequence[tuple[bytes, Frames]]) -> None:
        self._random = random
        self._corpus = corpus
        self._next_id = 0
        self._fit: dict[Role, Sequence[tuple[bytes, Frames]]] = {}

    def sequence(self, attacker: Attacker) -> list[Frames]:
        """Return the messages of one sequence."""
        roll = self._random.random()
        if roll < 0.05:
            return [self.message(attacker)] * self._random.randint(2, 12)
        if roll < 0.1:
            first, second = self.message(attacker), self.message(attacker)
            return [second, first, second, first]
        return [self.message(attacker) for _ in range(self._random.randint(1, 3))]

    def message(self, attacker: Attacker) -> Frames:
        """Return one message, damaged in one or a few ways or not at all."""
        body, attached = self._random.choice(self._corpus)
        if attacker.role is not None and self._random.random() < 0.6:
            body, attached = self._random.choice(self._fit_for(attacker.role))
        self._next_id += 1
        frames = [b"f" + self._next_id.to_bytes(7, "big"), attacker.session, body, *attached]
        for _ in range(self._random.choice((0, 1, 1, 1, 2, 4))):
            how = self._random.choice(_WAYS)
            how(self, frames, attacker)
        return frames

    def _fit_for(self, role: Role) -> Sequence[tuple[bytes, Frames]]:
        """Return the messages that a role may send."""
        if role not in self._fit:
            kinds = ((decode_request(one[0]), one) for one in self._corpus)
            self._fit[role] = [one for request, one in kinds if role in ALLOWED[type(request)]]
        return self._fit[role]

    def body(self) -> bytes:
        """Return one damaged body."""
        frames = [b"", b"", self._random.choice(self._corpus)[0]]
        for _ in range(self._random.choice((1, 1, 2, 5))):
            self._random.choice(_BODY_WAYS)(self, frames, Attacker(None))
        return frames[2] if len(frames) > 2 else b""

    # ---- bytes ---------------------------------------------------------------

    def _any_frame(self, frames: Frames) -> int:
        if len(frames) > 2 and self._random.random() < 0.85:
            return 2
        return self._random.randrange(len(frames)) if frames else 0

    def bytes_damaged(self, frames: Frames, _: Attacker) -> None:
        """Flip, insert, delete or repeat bytes, or cut the end off."""
        if not frames:
            return
        random, which = self._random, self._any_frame(frames)
        data = bytearray(frames[which])
        at = random.randrange(len(data) + 1)
        span = random.choice((1, 1, 2, 8, 64))
        match random.randrange(5):
            case 0 if at < len(data):
                data[at] ^= 1 << random.randrange(8)
            case 1:
                data[at:at] = random.randbytes(span)
            case 2:
                del data[at : at + span]
            case 3:
                data[at:at] = data[at : at + span] * random.choice((1, 3))
            case _:
                del data[at:]
        frames[which] = bytes(data)

    def spliced(self, frames: Frames, _: Attacker) -> None:
        """Continue with another message from somewhere in the middle."""
        if len(frames) > 2:
            other, _attached = self._random.choice(self._corpus)
            head = self._random.randrange(len(frames[2]) + 1)
            frames[2] = frames[2][:head] + other[self._random.randrange(len(other) + 1) :]

    def bombed(self, frames: Frames, _: Attacker) -> None:
        """Nest deeply, or declare a length that is not there."""
        if len(frames) < 3:
            return
        random = self._random
        if random.random() < 0.3:
            depth = random.choice((100, 2_000, 30_000))
            bomb = random.choice((b"\x91", b"\x81\xa1x")) * depth + b"\x01"
        else:
            bomb = random.choice(_LENGTHS) + random.choice((b"\xff", b"\x7f")) + b"\xff" * 3
        at = random.randrange(len(frames[2]) + 1)
        frames[2] = frames[2][:at] + bomb + frames[2][at if random.random() < 0.5 else at + 1 :]

    # ---- fields --------------------------------------------------------------

    def retyped(self, frames: Frames, _: Attacker) -> None:
        """Put something else into a field, add one, or take one away."""
        if len(frames) < 3:
            return
        try:
            message = msgspec.msgpack.decode(frames[2])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return
        places = list(_places(message))
        if not places:
            return
        holder, key = self._random.choice(places)
        if self._random.random() < 0.08 and isinstance(holder, dict):
            del holder[key]
        else:
            holder[key] = self._random.choice(_HOSTILE)
        try:
            body = msgspec.msgpack.encode(message)
        except (RecursionError, OverflowError, ValueError, TypeError):
            return
        frames[2] = body.replace(_SURROGATE.encode(), b"\xed\xa0\x80" * 3)

    # ---- frames --------------------------------------------------------------

    def reframed(self, frames: Frames, _: Attacker) -> None:
        """Swap, drop, add, empty or blow up frames."""
        random = self._random
        at = random.randrange(len(frames) + 1)
        match random.randrange(6):
            case 0 if len(frames) > 1:
                other = random.randrange(len(frames))
                at = min(at, len(frames) - 1)
                frames[at], frames[other] = frames[other], frames[at]
            case 1 if len(frames) > 1:
                del frames[min(at, len(frames) - 1)]
            case 2:
                frames[at:at] = [random.randbytes(random.choice((0, 1, 16, 500)))]
            case 3:
                frames.extend([b""] * random.choice((1, 2, 5, 40)))
            case 4 if frames:
                frames[min(at, len(frames) - 1)] = b""
            case _ if random.random() < 0.1 and frames:
                frames[min(at, len(frames) - 1)] = bytes(random.choice((70_000, 300_000)))
            case _:
                pass

    def identity(self, frames: Frames, attacker: Attacker) -> None:
        """Come with a session that is another's, old, or unknown."""
        if len(frames) > 1:
            random = self._random
            made_up = (b"", random.randbytes(16), bytes(16), attacker.session[:15], b"x" * 5_000)
            frames[1] = random.choice([*attacker.others, *made_up])


def _places(value: object) -> "list[tuple[dict[object, object] | list[object], object]]":
    """Return every (container, key) inside of a decoded message."""
    found: list[tuple[dict[object, object] | list[object], object]] = []
    todo = [value]
    while todo:
        one = todo.pop()
        if isinstance(one, dict):
            found += [(one, key) for key in one]
            todo += one.values()
        elif isinstance(one, list):
            found += [(one, at) for at in range(len(one))]
            todo += one
    return found


_Way: TypeAlias = Callable[[Mutator, Frames, Attacker], None]
_BODY_WAYS: tuple[_Way, ...] = (
    Mutator.bytes_damaged,
    Mutator.bytes_damaged,
    Mutator.spliced,
    Mutator.bombed,
    Mutator.retyped,
    Mutator.retyped,
)
_WAYS: tuple[_Way, ...] = (
    *_BODY_WAYS,
    *(Mutator.retyped, Mutator.retyped, Mutator.retyped),
    *(Mutator.reframed, Mutator.identity),
)


def verdict(frames: Frames, attacker: Attacker) -> Verdict:
    """Return what the broker has to take a message for."""
    most = most_pieces(MAX_MESSAGE_BYTES, MAX_FRAMES)
    if not 3 <= len(frames) <= most or len(frames[0]) > _MAX_ID_BYTES:
        return "malformed"
    known = bool(attacker.session) and frames[1] == attacker.session
    role = attacker.role if known else None
    if sum(map(len, frames)) > max_bytes(role, MAX_MESSAGE_BYTES):
        return "malformed"
    try:
        whole = joined(frames[2:])
        if len(whole) + 2 > MAX_FRAMES or len(whole[0]) > max_body_bytes(role, MAX_MESSAGE_BYTES):
            return "malformed"
        request = decode_request(whole[0])
    except ProtocolError:
        return "malformed"
    attached = len(whole) - 1
    if isinstance(request, Hello):
        return "malformed" if attached else "allowed"
    if role is None:
        return "hello_first"
    if role not in ALLOWED[type(request)]:
        return "forbidden"
    if isinstance(request, StoreImage):
        is_whole = attached == 1 and digest_of(bytes(whole[1])) == request.digest
        return "allowed" if is_whole else "malformed"
    expected = 2 if isinstance(request, SubmitTrajectory) else 0
    return "allowed" if attached == expected else "malformed"

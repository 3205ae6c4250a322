"""Pure: messages in a form in which histories of a conversation can be compared, and their size."""

import hashlib
from collections.abc import Mapping, Sequence

import msgspec

from slipstream.wire.messages.trajectory import Json

_LONG_KEY = 32  # characters; shorter ones count with their values
_DIGEST_BYTES = 20


def numbered(messages: Sequence[Mapping[str, Json]]) -> list[dict[str, Json]]:
    """Return messages in a form that does not depend on the ids of their tool calls.

    Ids of calls are numbers of nine characters, which templates of Mistral require; a result has
    the id of its call, or of the call in its place. Objects have their keys in order.
    """
    alike: list[dict[str, Json]] = []
    numbers: dict[Json, int] = {}
    num_results = 0
    for original in messages:
        message: dict[str, Json] = msgspec.json.decode(encoded(original))
        if "tool_calls" in message:
            calls = message["tool_calls"]
            numbers = {call["id"]: number for number, call in enumerate(calls) if call["id"]}
            num_results = 0
            for number, call in enumerate(calls):
                call["id"] = f"{number:09d}"
        elif message["role"] == "tool":
            number = numbers.get(message.get("tool_call_id"), num_results)
            message["tool_call_id"] = f"{number:09d}"
            num_results += 1
        alike.append(message)
    return alike


def digests_of(messages: Sequence[Mapping[str, Json]]) -> list[bytes]:
    """Return the digests of the first message, of the first two, and so on."""
    digests = [b""]
    for message in messages:
        digests.append(next_digest(digests[-1], message))
    return digests[1:]


def next_digest(before: bytes, message: Mapping[str, Json]) -> bytes:
    """Return the digest of a history with one more message."""
    return hashlib.blake2b(before + encoded(message), digest_size=_DIGEST_BYTES).digest()


def encoded(value: Json) -> bytes:
    """Return a value as JSON, with the keys of objects in order."""
    return msgspec.json.encode(value, order="deterministic")


def num_replies(messages: Sequence[Mapping[str, Json]]) -> int:
    """Return the number of replies in a history."""
    return sum(message["role"] == "assistant" for message in messages)


def num_characters(value: Json) -> int:
    """Return how many characters the texts in a value have; each other value counts as one.

    Long keys of objects count too.
    """
    total, waiting = 0, [value]
    while waiting:
        total += 1
        match waiting.pop():
            case str(text):
                total += max(0, len(text) - 1)
            case list(items) | tuple(items):
                waiting += items
            case dict(entries):
                total += sum(len(key) for key in entries if len(key) > _LONG_KEY)
                waiting += entries.values()
            case _:
                pass
    return total

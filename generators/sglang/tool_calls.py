"""Calls of tools in a reply, read by SGLang's parsers so that no character of it is lost.

A parser says which calls a text has. Where each of them stands is found by asking it about parts of
the text; all that is in no call remains text, also what looks like a call and cannot be read.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Collection
from functools import partial
from typing import NamedTuple

import msgspec

from slipstream.wire.messages.trajectory import Json
from slipstream.wire.unreadable import UNREADABLE

_WORD = re.compile(r"\w+")
_ENDS = re.compile(r"[\"'})\]\s]*")  # of JSON that a parser closes by itself
_TAG = re.compile(r"<[^<>]*>")
_NAME = re.compile(r"[\w.\-]+")
_MOST_NAMES = 256  # that an unread part may hold
_MOST_READ = 1 << 20  # characters that a parser is asked about for one reply, of all its parts
_EACH_READ = 2_000  # characters that take as long as to ask at all
# Words that formats write around a name and its arguments.
_FORMAT = re.compile(
    "_?(analysis|args?|arguments?|array|assistant|bool(ean)?|calls?|commentary|constrain|false|float|"
    "functions?|id|index|int(eger)?|invoke|json|key|message|name|null|number|object|"
    "param(eter)?s?|string|to|tools?|true|type|value|xml|_)+",
    re.IGNORECASE,
)


class Call(NamedTuple):
    """A call as a parser reads it."""

    name: str
    arguments: str  # JSON

    @property
    def is_whole(self) -> bool:
        """True if it has a name, and its arguments are an object."""
        try:
            msgspec.json.decode(self.arguments or "{}", type=dict[str, Json])
        except (msgspec.MsgspecError, *UNREADABLE):
            return False
        return bool(self.name)


class Reading(NamedTuple):
    """A reply: each character is in ``text``, in a call, or a mark of the format around one."""

    text: str
    calls: list[Call]
    unread: list[str]  # parts of ``text`` that look like calls and are none


class _ReadEnoughError(Exception):
    """A reply has so many calls that to find their places would take too long."""


class Marks(NamedTuple):
    """What a format writes around calls: it says nothing."""

    opening: Collection[str]
    closing: Collection[str]


Read = Callable[[str, Collection[str]], list[Call]]
"""A parser: the calls of a text, of the known tools and those of further names."""


def read_reply(
    text: str, read: Read, looks_like_call: Callable[[str], bool], marks: Marks
) -> Reading:
    """Return the calls of a reply and all the rest of it.

    One with so many calls that to find their places would take long remains text as a whole,
    beside its calls.

    Args:
        text: the reply.
        read: its parser, which may leave out calls of names that it does not know.
        looks_like_call: whether a text has a mark of a call.
        marks: of the format.
    """
    left = _MOST_READ

    def bounded(part: str, names: Collection[str]) -> list[Call]:
        nonlocal left
        left -= len(part) + _EACH_READ
        if left < 0:
            raise _ReadEnoughError
        return read(part, names)

    try:
        return _read_twice(text, bounded, looks_like_call, marks)
    except _ReadEnoughError:
        return Reading(text, [call for call in read(text, ()) if call.is_whole], [])


def _read_twice(
    text: str, read: Read, looks_like_call: Callable[[str], bool], marks: Marks
) -> Reading:
    """Read a reply, and once more with the names in what remains unread."""
    found = _reading(text, lambda part: read(part, ()), looks_like_call, marks)
    names = list(dict.fromkeys(_NAME.findall("".join(found.unread))))[:_MOST_NAMES]
    if names:
        more = _reading(text, lambda part: read(part, names), looks_like_call, marks)
        if len(more.calls) > len(found.calls):
            return more
    return found


def _reading(
    text: str,
    read: Callable[[str], list[Call]],
    looks_like_call: Callable[[str], bool],
    marks: Marks,
) -> Reading:
    calls, parts, more = list[Call](), list[str](), list[str]()
    after = 0
    for call, start, end in _places(text, read, marks):
        if call.is_whole:
            calls.append(call)
            before = text[after : max(after, start)]
            named = [f"{mark}{call.name}" for mark in marks.opening]
            parts.append(_without(before, (*marks.opening, *named), str.endswith))
            if not _says_all(call, text[start:end]):
                more.append(text[start:end])
                parts.append(text[start:end])
            rest = text[end:]
            if (ends := _ENDS.match(rest)) and any(
                map(rest[ends.end() :].startswith, marks.closing)
            ):
                rest = rest[ends.end() :]
            rest = _without(rest, marks.closing, str.startswith)
            after = len(text) - len(rest)
    parts.append(text[after:])
    kept = [part for part in parts if part.strip()] if calls else parts
    unread = [part for part in kept if looks_like_call(part) and part not in more]
    return Reading("".join(kept), calls, unread)


def _without(text: str, marks: Collection[str], has: Callable[[str, str], bool]) -> str:
    """Return a text without the marks, and blanks between them, at one of its ends."""
    is_end = has is str.endswith
    while True:
        bare = text.rstrip() if is_end else text.lstrip()
        mark = max((one for one in marks if has(bare, one)), key=len, default="")
        if not mark:
            return text
        text = bare[: -len(mark)] if is_end else bare[len(mark) :]


def _places(
    text: str, read: Callable[[str], list[Call]], marks: Marks
) -> list[tuple[Call, int, int]]:
    """Return calls with their first and last places; one that shares them with another has none.

    A call ends where it is first read, and begins where it is last read. Places beside a mark are
    asked first: between them a parser need not read more the more it is given.
    """
    opened = sorted({at for mark in marks.opening for at in _all(mark, text)}, reverse=True)
    closed = sorted({at + len(mark) for mark in marks.closing for at in _all(mark, text)})
    calls = read(text)
    found: list[tuple[Call, int, int]] = []
    before = 0
    for count in range(1, len(calls) + 1):
        wanted, head = calls[:count], text[:before]

        def has(start: int, end: int, wanted: list[Call] = wanted, head: str = head) -> bool:
            return read(head + text[start:end])[: len(wanted)] == wanted

        near = [one for one in closed if one >= before]
        last = next((one for one in near if has(before, one)), len(text))
        end = before + bisect_left(range(before, last), True, key=partial(has, before))
        start = next((one for one in opened if before <= one < end and has(one, end)), -1)
        if start < 0:
            fails = partial(_fails, has, end)
            start = max(before, before - 1 + bisect_left(range(before, end), True, key=fails))
        found.append((calls[count - 1], start, end))
        before = end
    return found


def _fails(has: Callable[[int, int], bool], end: int, start: int) -> bool:
    return not has(start, end)


def _all(mark: str, text: str) -> list[int]:
    return [one.start() for one in re.finditer(re.escape(mark), text)]


def _says_all(call: Call, written: str) -> bool:
    """Return whether a call has all the words that are written where it stands."""
    decoded = msgspec.json.decode(call.arguments or "{}")
    said = f"{call.name} {call.arguments} {decoded}"
    found = set(_WORD.findall(_TAG.sub(" ", written)))
    words = {one for one in found if any(map(str.isalpha, one)) and not _FORMAT.fullmatch(one)}
    return words <= set(_WORD.findall(said))

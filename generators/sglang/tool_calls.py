"""Calls of tools in a reply, read by SGLang's parsers so that no character of it is lost.

A parser returns the calls of a text. The place of each call is found by parsing parts of the text;
the rest remains text, even where it looks like a call that cannot be read.
"""

import json
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from functools import partial
from itertools import chain
from typing import NamedTuple

import msgspec

from slipstream.wire.messages.trajectory import Json
from slipstream.wire.unreadable import UNREADABLE

_ENDS = re.compile(r"[\"'})\]\s]*")  # end of JSON that a parser closes by itself
_NAME = re.compile(r"[\w.\-]+")
_MOST_NAMES = 256  # names in unread parts that are tried
_MOST_READ = 1 << 21  # characters parsed for one reply, all its parts together
_EACH_READ = 2_000  # characters that take as long as a call of the parser
# A word or symbol; brackets, quotes and such belong to the format.
_PIECE = re.compile(r"\w+|[^\w\s{}\[\]()<>\"',:=/|\\]")
SEPARATORS = ",; \t\r\n"
_LITERALS = {"true", "false", "null"}
# Parts of a call that make no difference: ids, types, recipients.
_UNSAID = (
    r'"(?:tool_call_)?id": *"\w*"|"type": *"function"|:\d+(?=<\|tool_call_argument_begin)|'
    r'string="(?:true|false)"|index="\d+"|type="(?:string|number|integer|boolean|object|array|null)"|'
    r"<\|start\|>assistant|<\|channel\|>commentary| to=(?:functions\.|tools\b)|<\|constrain\|>json|"
    r"(?<=>)functions\.|function(?=<｜tool▁sep｜>)"  # noqa: RUF001 marks of a format
)


class ReadCall(NamedTuple):
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


class ReplyParts(NamedTuple):
    """A reply: each character is in ``text``, in a call, or a mark of the format around a call."""

    text: str
    calls: list[ReadCall]
    unread: list[str]  # parts of ``text`` that look like calls and cannot be read


class _ReadEnoughError(Exception):
    """Finding the places of all calls in a reply would take too long."""


class Marks(NamedTuple):
    """Marks that a format writes around calls, without a meaning of their own."""

    opener: str  # outermost mark
    opening: Collection[str]
    closing: Collection[str]


Read = Callable[[str, Collection[str]], list[ReadCall]]
"""A parser: returns the calls of a text, of known tools and of tools with further names."""


def read_reply(
    text: str, read: Read, looks_like_call: Callable[[str], bool], marks: Marks
) -> ReplyParts:
    """Return the calls of a reply and the rest of its text.

    If finding the places of the calls would take too long, the text remains whole.

    Args:
        text: The reply.
        read: Parser, which may leave out calls with unknown names.
        looks_like_call: Returns True for a text with a mark of a call.
        marks: Marks of the format.
    """
    left = _MOST_READ

    def bounded(part: str, names: Collection[str]) -> list[ReadCall]:
        nonlocal left
        left -= len(part) + _EACH_READ
        if left < 0:
            raise _ReadEnoughError
        return read(part, names)

    try:
        return _read_twice(text, bounded, looks_like_call, marks)
    except _ReadEnoughError:
        return ReplyParts(text, [call for call in read(text, ()) if call.is_whole], [])


def _read_twice(
    text: str, read: Read, looks_like_call: Callable[[str], bool], marks: Marks
) -> ReplyParts:
    """Read a reply, then again with the names in its unread parts."""
    reply = _reading(text, lambda part: read(part, ()), looks_like_call, marks)
    names = list(dict.fromkeys(_NAME.findall("".join(reply.unread))))[:_MOST_NAMES]
    if names:
        more = _reading(text, lambda part: read(part, names), looks_like_call, marks)
        if len(more.calls) > len(reply.calls):
            return more
    return reply


class _Part(NamedTuple):
    text: str  # empty for a call that holds every word of it
    call: ReadCall | None = None


def _reading(
    text: str,
    read: Callable[[str], list[ReadCall]],
    looks_like_call: Callable[[str], bool],
    marks: Marks,
) -> ReplyParts:
    parts = _most(text, read, marks)
    calls = [part.call for part in parts if part.call is not None]
    kept = [part for part in parts if part.text.strip(SEPARATORS) or not calls]
    opens = [bool(marks.opener) and part.text.rstrip().endswith(marks.opener) for part in kept[:-1]]
    unread = [
        part.text
        for part, opens_the_next in zip(kept, [*opens, False], strict=False)
        if part.call is None and not opens_the_next and looks_like_call(part.text)
    ]
    return ReplyParts("".join(part.text for part in kept), calls, unread)


def _most(text: str, read: Callable[[str], list[ReadCall]], marks: Marks) -> list[_Part]:
    """Return the parts of a text, read from mark to mark where that gives more calls.

    Many parsers read nothing if one call is broken, or read only the first of several sections.
    """
    whole = _parts(text, read, marks)
    first, *sections = _split(text, marks.opener)
    inside = re.match(rf"({re.escape(marks.opener)}\s*)(<[^<>\s]+)", "".join(sections))
    if len(sections) > max(1, _num_calls(whole)):
        each = (_most(section, read, marks) for section in sections)
        apart = [*_parts(first, read, marks), *chain(*each)]
    elif len(sections) == 1 and inside is not None:  # calls that one mark opens together
        head, *pieces = _split(sections[0], inside[2])
        if len(pieces) <= max(1, _num_calls(whole)):
            return whole
        each = (_parts(piece, lambda part: read(head + part), marks) for piece in pieces)
        apart = [_Part(first + head), *chain(*each)]
    else:
        return whole
    return apart if _num_calls(apart) > _num_calls(whole) else whole


def _split(text: str, mark: str) -> list[str]:
    """Return the text before the first such mark, and the text that each begins."""
    first, *others = text.split(mark)
    return [first, *(mark + other for other in others)]


def _num_calls(parts: list[_Part]) -> int:
    return sum(part.call is not None for part in parts)


def _parts(text: str, read: Callable[[str], list[ReadCall]], marks: Marks) -> list[_Part]:
    """Return calls and the text between them, in order."""
    parts: list[_Part] = []
    after = 0
    for call, start, end, says_all in _places(text, read, marks):
        if call.is_whole:
            before = text[after : max(after, start)]
            named = [f"{mark}{call.name}" for mark in marks.opening]
            parts.append(_Part(_without(before, (*marks.opening, *named), str.endswith)))
            parts.append(_Part("" if says_all else text[start:end], call))
            rest = text[end:]
            if (ends := _ENDS.match(rest)) and any(
                map(rest[ends.end() :].startswith, marks.closing)
            ):
                rest = rest[ends.end() :]
            rest = _without(rest, marks.closing, str.startswith)
            after = len(text) - len(rest)
    return [*parts, _Part(text[after:])]


def _without(text: str, marks: Collection[str], has: Callable[[str, str], bool]) -> str:
    """Return a text without marks, and blanks between them, at one of its ends."""
    is_end = has is str.endswith
    while True:
        bare = text.rstrip() if is_end else text.lstrip()
        mark = max((mark for mark in marks if has(bare, mark)), key=len, default="")
        if not mark:
            return text
        text = bare[: -len(mark)] if is_end else bare[len(mark) :]


def _places(
    text: str, read: Callable[[str], list[ReadCall]], marks: Marks
) -> list[tuple[ReadCall, int, int, bool]]:
    """Return calls with their first and last places, and whether the call holds every word there.

    A call ends where it is first read, and begins where it is last read. Places next to a mark are
    tried first: between marks a longer text need not give more calls.
    """
    opened = sorted({at for mark in marks.opening for at in _all(mark, text)}, reverse=True)
    closed = sorted({at + len(mark) for mark in marks.closing for at in _all(mark, text)})
    calls = read(text)
    found: list[tuple[ReadCall, int, int, bool]] = []
    before = 0
    for count in range(1, len(calls) + 1):
        wanted, head = calls[:count], text[:before]
        if before and read(text[before:]) == calls[count - 1 :]:
            wanted, head = wanted[-1:], ""  # readable without the calls before it
        is_same = partial(_is_same, read, wanted, head)

        def has(start: int, end: int, is_same: Callable[[str], bool] = is_same) -> bool:
            return is_same(text[start:end])

        near = [at for at in closed if at >= before]
        last = next((at for at in near if has(before, at)), len(text))
        end = before + bisect_left(range(before, last), True, key=partial(has, before))
        start = next((at for at in opened if before <= at < end and has(at, end)), -1)
        if start < 0:
            fails = partial(_fails, has, end)
            start = max(before, before - 1 + bisect_left(range(before, end), True, key=fails))
        call = calls[count - 1]
        says_all = call.is_whole and _says_all(call, text[start:end], is_same, marks)
        found.append((call, start, end, says_all))
        before = end
    return found


def _is_same(
    read: Callable[[str], list[ReadCall]], wanted: list[ReadCall], head: str, part: str
) -> bool:
    return read(head + part)[: len(wanted)] == wanted


def _fails(has: Callable[[int, int], bool], end: int, start: int) -> bool:
    return not has(start, end)


def _all(mark: str, text: str) -> list[int]:
    return [match.start() for match in re.finditer(re.escape(mark), text)]


def _says_all(call: ReadCall, written: str, is_same: Callable[[str], bool], marks: Marks) -> bool:
    """Return True if a call holds every word of the text that it was read from.

    Each word that is neither in the call nor a mark is replaced: if the call stays the same
    (``is_same``), reading it loses that word.
    """
    known = sorted([*marks.opening, *marks.closing], key=len, reverse=True)
    unsaid = "|".join([_UNSAID, *map(re.escape, known)])
    bare = re.sub(unsaid, lambda match: " " * len(match[0]), written)
    pieces = list(_PIECE.finditer(bare))
    written_words = Counter(piece[0] for piece in pieces)
    decoded = msgspec.json.decode(call.arguments or "{}")
    forms = call.arguments, " ".join(_texts(decoded)), json.dumps(decoded)
    left = min(
        (written_words - Counter(_PIECE.findall(f"{call.name} {form}")) for form in forms),
        key=Counter.total,
    )
    return not any(
        is_same(written[: piece.start()] + _other(piece[0]) + written[piece.end() :])
        for piece in pieces
        if piece[0] in left
    )


def _texts(value: Json) -> Iterator[str]:
    """Yield the keys and values within a value, as text."""
    match value:
        case dict():
            for key, inner in value.items():
                yield key
                yield from _texts(inner)
        case list():
            for inner in value:
                yield from _texts(inner)
        case str():
            yield value
        case _:
            yield msgspec.json.encode(value).decode()


def _other(word: str) -> str:
    """Return another word of the same kind: a number, a literal of JSON, a symbol or a name."""
    if word[0].isdigit():
        return "2" if word == "1" else "1"
    if word in _LITERALS:
        return "false" if word == "true" else "true"
    return f"{word}z" if word[0].isalnum() or word[0] == "_" else "~"

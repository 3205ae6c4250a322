"""Values of a row as JSON holds them, and errors of rows. Pure."""

from collections.abc import Mapping, Sequence
from datetime import date, datetime, time
from typing import Any

from slipstream.wire.messages.trajectory import Json

_LEAST_INTEGER, _MOST_INTEGER = -(2**63), 2**64 - 1  # limits of MessagePack


class BadRowError(Exception):
    """Raised for a row that is no prompt, or no demonstration, with the reason."""


_SCALARS: tuple[type[bool | int | float | str], ...] = (bool, int, float, str)


def plain(value: Any, where: str) -> Json:  # noqa: ANN401 anything that a file holds
    """Return a value as JSON holds it: scalars and arrays of numpy or arrow become Python's.

    Raises:
        BadRowError: it cannot be written as JSON, or is an integer that MessagePack does not hold.
    """
    if isinstance(value, int) and not _LEAST_INTEGER <= value <= _MOST_INTEGER:
        raise BadRowError(f"{where} holds an integer of more than 64 bits: write it as text")
    if value is None or type(value) in _SCALARS:
        return value
    for scalar in _SCALARS:  # subclasses, such as numpy's text and double numbers
        if isinstance(value, scalar):
            return scalar(value)
    if isinstance(value, Mapping):
        return {str(key): plain(inner, where) for key, inner in value.items()}
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, Sequence | set | frozenset) and not isinstance(value, bytes | bytearray):
        return [plain(inner, where) for inner in value]
    for name in ("tolist", "as_py"):  # numpy's arrays and scalars, arrow's scalars
        convert = getattr(value, name, None)
        if callable(convert):
            return plain(convert(), where)
    raise BadRowError(f"{where} holds {kind_of(value)}, which JSON does not know: write it as text")


def kind_of(value: object) -> str:
    """Return what a value is, for messages."""
    names = {type(None): "nothing", str: "text", dict: "an object", list: "a list"}
    return names.get(type(value), type(value).__name__)

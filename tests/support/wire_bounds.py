"""Fields of messages: those without a bound, and values just past the bound of each other one."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from msgspec import inspect

_NUMBERS = (inspect.IntType, inspect.FloatType)
_TEXTS = (inspect.StrType, inspect.BytesType, inspect.MemoryViewType)
_LARGEST_BYTES = 1 << 28  # as of the largest message, by default
_HEADS = {  # the byte of msgpack that begins a collection whose length takes 4 bytes
    inspect.VarTupleType: b"\xdd",
    inspect.ListType: b"\xdd",
    inspect.DictType: b"\xdf",
}
_SMALL: dict[type[inspect.Type], object] = {
    inspect.FloatType: 1.0,
    inspect.BytesType: b"",
    inspect.MemoryViewType: b"",
    inspect.BoolType: False,
    inspect.NoneType: None,
}
_CLOSED = (
    *(inspect.StructType, inspect.UnionType, inspect.TupleType),
    *(inspect.BoolType, inspect.NoneType, inspect.LiteralType),
)


def unbounded(kind: inspect.Type, where: str, seen: set[type]) -> Iterator[str]:
    """Yield the places of a type, as Struct.field, that hold anything, however large."""
    if isinstance(kind, _NUMBERS):
        is_bounded = kind.le is not None and kind.ge is not None
    elif isinstance(kind, _TEXTS) or type(kind) in _HEADS:
        is_bounded = kind.max_length is not None  # type: ignore[attr-defined]  # all have it
    else:
        is_bounded = isinstance(kind, _CLOSED)
    if not is_bounded:
        yield where
    if isinstance(kind, inspect.StructType):
        if kind.cls in seen:
            return
        seen.add(kind.cls)
    for suffix, part, _ in _parts(kind):
        yield from unbounded(part, suffix if suffix[:1].isalpha() else where, seen)


def past_bounds(kind: inspect.Type, where: str = "") -> Iterator[tuple[str, object]]:
    """Yield places and a value, fit for an encoder, that passes one bound and comes first."""
    if isinstance(kind, _NUMBERS):
        step = 1 if isinstance(kind, inspect.IntType) else math.inf
        for bound, way in ((kind.le, step), (kind.ge, -step)):
            if bound is not None:
                yield where, bound + way
    elif isinstance(kind, _TEXTS):
        if kind.max_length is not None and kind.max_length < _LARGEST_BYTES:
            one = "x" if isinstance(kind, inspect.StrType) else b"x"
            yield where, one * (kind.max_length + 1)
    elif type(kind) in _HEADS and (most := kind.max_length) is not None:  # type: ignore[attr-defined]
        # The head alone tells its size.
        yield where, msgspec.Raw(_HEADS[type(kind)] + (most + 1).to_bytes(4, "big"))
    for suffix, part, whole in _parts(kind):
        for place, value in past_bounds(part, f"{where} {suffix}"):
            yield place, whole(value)


def _parts(kind: inspect.Type) -> Iterator[tuple[str, inspect.Type, Callable[[object], object]]]:
    """Yield the parts of a type: Struct.field or what it is, its type, and what makes a whole."""
    match kind:
        case inspect.StructType(cls=cls, fields=fields):
            for i, field in enumerate(fields):
                name, before = f"{cls.__name__}.{field.name}", fields[:i]
                yield name, field.type, lambda value, f=field, b=before: _struct(kind, b, f, value)
        case inspect.UnionType(types=types):
            for one in types:
                yield "", one, lambda value: value
        case inspect.VarTupleType(item_type=item) | inspect.ListType(item_type=item):
            yield "[]", item, lambda value: [value]
        case inspect.DictType(key_type=key, value_type=item):
            yield "[key]", key, lambda value: {value: _sample(item)}
            yield "[]", item, lambda value: {_sample(key): value}
        case inspect.TupleType(item_types=items):
            for i, one in enumerate(items):
                before = [*map(_sample, items[:i])]
                after = [*map(_sample, items[i + 1 :])]
                yield f"[{i}]", one, lambda value, b=before, a=after: [*b, value, *a]


def _struct(
    kind: inspect.StructType, before: tuple[inspect.Field, ...], field: inspect.Field, value: object
) -> object:
    if kind.array_like:
        return [*(_sample(one.type) for one in before), value]
    tag = {kind.tag_field: kind.tag} if kind.tag_field else {}
    return {**tag, field.encode_name: value}


def _sample(kind: inspect.Type) -> Any:  # noqa: ANN401 of any type
    """Return a small value of a type, fit for an encoder."""
    match kind:
        case inspect.IntType():
            return max(1, kind.ge or 0)
        case inspect.StrType():
            return "a"
        case inspect.LiteralType(values=values):
            return values[0]
        case inspect.UnionType(types=types):
            return _sample(types[0])
        case inspect.TupleType(item_types=items):
            return [*map(_sample, items)]
        case inspect.StructType(array_like=True, fields=fields):
            return [_sample(field.type) for field in fields]
        case _:
            return _SMALL.get(type(kind), {})

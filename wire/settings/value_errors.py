"""Says in words which value of a section is wrong, what was expected, and perhaps meant."""

import difflib
import json
import re
import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

_CAPITALS = {"True": "true", "False": "false"}
_NOTHING = {"None", "none", "null", "Null", "nil", "~"}
# What other trainers write for "never" or "all of them", by setting: here it is another value.
_MINUS_ONE = {
    "sampling.top_k": "0 is the whole vocabulary",
    "eval.top_k": "0 is the whole vocabulary",
    "eval.every_steps": "0 is never",
    "checkpoint.every_steps": "0 is never",
    "checkpoint.keep_last": "0 keeps all",
    "run.steps": "for no limit give a number that run.epochs reaches first",
}
_ALTERNATIVES = re.compile(r"\^\(([\w\-|]+)\)\$")
_CONSOLE = "the terminal is always written to: name trackers alone, or none with []"


def wrong_value(
    values: Mapping[str, Any], kind: type[msgspec.Struct], where: str, error: str
) -> str:
    """Return what is wrong with a section that cannot be decoded.

    ``error`` is the text of the decoder, for errors that are not about single values.
    """
    for name, value, hint in _leaves(values, kind, where):
        try:
            msgspec.convert(value, hint)
        except msgspec.ValidationError:
            return _said(name, value, hint)
    missing = re.fullmatch(r"Object missing required field `(\w+)`.*", error)
    return f"{where}.{missing[1]} must be given" if missing else f"section [{where}]: {error}"


def _leaves(values: object, hint: Any, where: str) -> Iterator[tuple[str, object, Any]]:  # noqa: ANN401
    """Yield the single values of a section: name, value, and what it must be."""
    bare = _bare(hint)
    options = get_args(bare) if get_origin(bare) in {types.UnionType, Union} else (bare,)
    struct = next((option for option in options if _is_struct(option)), None)
    if struct is not None and isinstance(values, dict):
        hints = get_type_hints(struct, include_extras=True)
        names = {field.encode_name: field.name for field in msgspec.structs.fields(struct)}
        for key, value in values.items():
            if key in names:
                yield from _leaves(value, hints[names[key]], f"{where}.{key}")
        return
    origin, inner = get_origin(bare), get_args(bare)
    if origin is dict and isinstance(values, dict):
        for key, value in values.items():
            yield from _leaves(value, inner[1], f"{where}.{key}")
        return
    yield where, values, hint


def _is_struct(hint: object) -> bool:
    return isinstance(hint, type) and issubclass(hint, msgspec.Struct)


def _bare(hint: Any) -> Any:  # noqa: ANN401 any type hint
    return _bare(hint.__origin__) if get_origin(hint) is Annotated else hint


def _said(name: str, value: object, hint: object) -> str:
    meant = _meant(name, value, hint)
    return f"{name} must be {expected(hint)}, got {shown(value)}{f': {meant}' if meant else ''}"


def shown(value: object) -> str:
    """Return a value as TOML writes it, about."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else f"{text[:77]}..."


def expected(hint: object) -> str:
    """Return in words what a setting takes."""
    bounds = ""
    if choices := _choices(hint):
        return f"one of {', '.join(map(shown, choices))}" if len(choices) > 1 else shown(*choices)
    if get_origin(hint) is Annotated:
        inner, *metas = get_args(hint)
        bounds = " and ".join(
            bound for meta in metas if isinstance(meta, msgspec.Meta) for bound in _bounds(meta)
        )
        return " ".join(filter(None, (expected(inner), bounds)))
    origin, inner = get_origin(hint), get_args(hint)
    if origin in {types.UnionType, Union}:
        return " or ".join(expected(option) for option in inner if option is not type(None))
    if origin in {tuple, list, frozenset, set}:
        several = [kind for kind in inner if kind is not Ellipsis]
        if origin is tuple and Ellipsis not in inner and len(several) > 1:
            each = list(dict.fromkeys(map(expected, several)))
            return f"a list of {len(several)}, each {' or '.join(each)}"
        return f"a list, each {expected(several[0])}" if several else "a list"
    if origin is dict or _is_struct(hint):
        return "a table"
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    return next((said for kind, said in words.items() if kind is hint), str(hint))


def _choices(hint: object) -> tuple[object, ...]:
    """Return the values that a setting may have, if they are few."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    for meta in get_args(hint)[1:] if get_origin(hint) is Annotated else ():
        pattern = meta.pattern if isinstance(meta, msgspec.Meta) else None
        if pattern and (one_of := _ALTERNATIVES.fullmatch(pattern)):
            return tuple(one_of[1].split("|"))
    return ()


def _bounds(meta: msgspec.Meta) -> Iterator[str]:
    if meta.ge is not None:
        yield f"of at least {meta.ge:g}"
    if meta.gt is not None:
        yield f"above {meta.gt:g}"
    if meta.le is not None:
        yield f"of at most {meta.le:g}"
    if meta.lt is not None:
        yield f"below {meta.lt:g}"
    if meta.min_length is not None:
        yield f"of at least {meta.min_length} in length"
    if meta.max_length is not None:
        yield f"of at most {meta.max_length} in length"
    if meta.pattern is not None:
        yield f"that matches {meta.pattern}"


def _meant(name: str, value: object, hint: object) -> str:
    """Return what was meant, where a habit from elsewhere is known."""
    if value == -1 and name in _MINUS_ONE:
        return _MINUS_ONE[name]
    if name == "logging.trackers" and "console" in (value if isinstance(value, list) else [value]):
        return _CONSOLE
    if not isinstance(value, str):
        return ""
    if value in _CAPITALS:
        return f"write {_CAPITALS[value]}, in small letters"
    if value in _NOTHING:
        return "leave the setting out for its default"
    choices = {choice.lower(): choice for choice in _choices(hint) if isinstance(choice, str)}
    if close := difflib.get_close_matches(value.lower(), choices, n=1, cutoff=0.5):
        return f"did you mean {shown(choices[close[0]])}?"
    if get_origin(_bare(hint)) in {tuple, list}:
        return f"write [{shown(value)}]"
    return ""

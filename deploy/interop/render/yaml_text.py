"""YAML in block style, of plain values; the reader gets back exactly what was given."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import TypeAlias

Yaml: TypeAlias = "str | int | float | bool | Sequence[Yaml] | Mapping[str, Yaml] | None"
_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
_LAST_OF_JSON = 0xFFFF  # beyond it JSON has two escapes for one character
_TRUTHS = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}  # words of YAML's own


def documents(*values: Yaml, head: str = "") -> str:
    """Return values as documents of one file, under a comment."""
    comment = "".join(f"# {line}".rstrip() + "\n" for line in head.splitlines())
    return comment + "---\n".join("\n".join(_lines(value)) + "\n" for value in values)


def _lines(value: Yaml) -> list[str]:
    if isinstance(value, Mapping) and value:
        return [line for key, inner in value.items() for line in _entry(_scalar(key), inner)]
    if isinstance(value, Sequence) and not isinstance(value, str) and value:
        return [line for inner in value for line in _item(inner)]
    return [_scalar(value)]


def _entry(key: str, value: Yaml) -> list[str]:
    if isinstance(value, str) and _is_block(value):
        return [f"{key}: |", *(f"  {line}" if line else "" for line in value.split("\n")[:-1])]
    if isinstance(value, Mapping) and value:
        return [f"{key}:", *(f"  {line}" if line else "" for line in _lines(value))]
    if isinstance(value, Sequence) and not isinstance(value, str) and value:
        return [f"{key}:", *(f"  {line}" if line else "" for line in _lines(value))]
    return [f"{key}: {_scalar(value)}"]


def _item(value: Yaml) -> list[str]:
    if isinstance(value, Sequence) and not isinstance(value, str) and value:
        return ["-", *(f"  {line}" if line else "" for line in _lines(value))]
    first, *rest = _lines(value)
    return [f"- {first}", *(f"  {line}" if line else "" for line in rest)]


def _is_block(text: str) -> bool:
    """True if a text can be written unchanged, line by line."""
    lines = text.split("\n")
    return (
        len(lines) > 1
        and not lines[-1]
        and bool(lines[-2])
        and bool(lines[0])
        and not lines[0].startswith(" ")
        and all(line.isprintable() and line.isascii() for line in lines)
    )


def _scalar(value: Yaml) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _TRUTHS:
        return value
    if isinstance(value, str):
        return f'"{"".join(map(_character, value))}"'
    return json.dumps(value)


def _character(one: str) -> str:
    """Return a character between double quotes, as in JSON, but without pairs of surrogates."""
    return json.dumps(one)[1:-1] if ord(one) <= _LAST_OF_JSON else f"\\U{ord(one):08X}"

"""Texts with named holes, such as `{{ name }}`, in the folder templates/.

A hole in the place of a value of YAML takes any value, quoted. A hole within other text takes a
plain word. So no value can break a text or add to it.
"""

import json
import re
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import TypeAlias

Value: TypeAlias = "str | int | Sequence[Value] | Mapping[str, Value] | None"
_FOLDER = files("slipstream.deploy.interop.render") / "templates"
_HOLE = re.compile(r"\{\{ (\w+) \}\}")
_IN_TEXT = re.compile(rf"(?<=[^\s\[{{]){_HOLE.pattern}|{_HOLE.pattern}(?=[^\s,\]}}])")
_LAST_ON_LINE = re.compile(rf"( *(?:- )*)(.*: )?{_HOLE.pattern}")
_PLAIN_WORD = re.compile(r"[A-Za-z0-9._/-]+")
_BLOCK = re.compile(r"[!-~][ -~]*\n(([ -~]*\n)*[ -~]+\n)?")  # readable unquoted, line by line


class FilledText(str):
    """Lines that fill a hole of another text as they are."""

    __slots__ = ()


def fill(file: str, **values: Value) -> FilledText:
    """Return the text of a file in templates/ with its holes filled.

    Raises:
        ValueError: Holes and values have different names, or a value within text is no plain word.
    """
    return filled((_FOLDER / file).read_text("utf-8"), values)


def filled(template: str, values: Mapping[str, Value]) -> FilledText:
    """Return a text with its holes filled; lines with a hole for None are left out.

    Raises:
        ValueError: See ``fill``.
    """
    if names := {*_HOLE.findall(template)} ^ values.keys():
        raise ValueError(f"holes without a value, or values without a hole: {sorted(names)}")
    return FilledText("".join(_line(line, values) for line in template.splitlines()))


def assignments(**values: object) -> FilledText:
    """Return lines of shell that set variables."""
    lines = [f"{name}={shlex.quote(str(value))}\n" for name, value in values.items()]
    return FilledText("".join(lines))


def _line(line: str, values: Mapping[str, Value]) -> str:
    if any(values[name] is None for name in _HOLE.findall(line)):
        return ""
    if last := _LAST_ON_LINE.fullmatch(line):
        start, key, name = last.groups(default="")
        value = values[name]
        inside = " " * len(start) + ("  " if key else "")
        if isinstance(value, list) and value:
            value = FilledText("".join(f"- {_quoted(item)}\n" for item in value))
        if isinstance(value, FilledText):
            text = _indented(value, inside)
            return f"{start}{key.rstrip()}\n{text}" if key else start + text[len(start) :]
        if isinstance(value, str) and _BLOCK.fullmatch(value):
            return f"{start}{key}|\n{_indented(value, inside)}"
    line = _IN_TEXT.sub(lambda hole: _plain(values[hole[1] or hole[2]]), line)
    return _HOLE.sub(lambda hole: _quoted(values[hole[1]]), line) + "\n"


def _indented(text: str, inside: str) -> str:
    return textwrap.indent(text, inside, lambda line: line != "\n")


def _quoted(value: Value) -> str:
    """Return a value as JSON that is YAML too: in ASCII, and without pairs of surrogates."""
    text = json.dumps(value, ensure_ascii=False)
    return re.sub(r"[^ -~]", lambda match: f"\\U{ord(match[0]):08X}", text)


def _plain(value: Value) -> str:
    if not _PLAIN_WORD.fullmatch(text := str(value)):
        raise ValueError(f"within text only letters, digits and ._/- are possible, got {text!r}")
    return text

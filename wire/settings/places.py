"""Finds the place of a setting: its line in the file, or the command line."""

import re
from collections.abc import Sequence
from pathlib import Path

from slipstream.wire.settings.load import SECTIONS

_HEADER = re.compile(r"\s*\[\s*([^\[\]]+?)\s*\]\s*(?:#.*)?$")
_KEY = re.compile(r"\s*([A-Za-z0-9_\-\"'.]+)\s*=")
_SETTING = re.compile(rf"\b(?:{'|'.join(SECTIONS)})(?:\.[A-Za-z0-9_\-]+)+")


def with_place(message: str, path: Path | None, overrides: Sequence[str] = ()) -> str:
    """Return a message with the place of the first setting in it that somebody wrote.

    Overrides of the command line win over the file.
    """
    text = ""
    if path is not None:
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError):
            text = ""
    given = {override.partition("=")[0].strip() for override in overrides}
    for setting in _SETTING.findall(message):
        if setting in given:
            return f"{message} (on the command line)"
        if line := line_of(text, setting):
            place = f"{path}, line {line}"
            return message if place in message else f"{message} ({place})"
    return message


def line_of(text: str, setting: str) -> int:
    """Return the line of a setting in a TOML file, or 0."""
    section, found = "", 0
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _HEADER.match(line):
            section = _plain(header[1])
            if section == setting:
                return number
        elif key := _KEY.match(line):
            name = ".".join(filter(None, (section, _plain(key[1]))))
            if name == setting:
                return number
            if setting.startswith(f"{name}.") and not found:
                found = number  # an inline table that holds it
    return found


def _plain(key: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in key.split("."))

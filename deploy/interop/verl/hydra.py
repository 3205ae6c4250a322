"""verl's configuration as Hydra is given it: overrides of a command, or a YAML file. Pure."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from slipstream.wire.errors import ConfigError

MOST_DEPTH = 40  # brackets inside each other
MOST_LENGTH = 1 << 16  # characters of a script or value
Value = None | bool | int | float | str | list["Value"] | dict[str, "Value"]

_PROGRAM = re.compile(r"(.*[./])?main_(ppo|dapo|\w+)(\.py)?")
_OVERRIDE = re.compile(r"(\+{0,2}|~)([A-Za-z_][\w.@/:-]*)(=.*)?", re.DOTALL)
_INT = re.compile(r"[+-]?\d[\d_]*")
_FLOAT = re.compile(r"[+-]?(\d[\d_]*\.?\d*|\.\d+)(e[+-]?\d+)?|[+-]?(inf|nan)", re.IGNORECASE)
_MOST_DIGITS = 64  # digits of a number; anything longer is text
_SCALARS = (bool, int, float, str)
_ONE_MORE_WORD = frozenset(
    {"-cn", "-cp", "-cd", "--config-name", "--config-path", "--config-dir", "-p", "--package"}
)


@dataclass(frozen=True, slots=True)
class HydraSettings:
    """Keys of verl with their values, in the order in which they were given."""

    values: dict[str, Value]
    deleted: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()  # parts of the input that were not read


def overrides_of(words: Sequence[str]) -> HydraSettings:
    """Return what the words after verl's program set.

    Raises:
        ConfigError: A word is no override, or beyond a bound.
    """
    values: dict[str, Value] = {}
    deleted: list[str] = []
    rest = iter(words)
    for word in rest:
        if word.startswith("-"):
            name, equals, text = word.partition("=")
            if not equals and name in _ONE_MORE_WORD:
                text = next(rest, "")
            values[name] = text
            continue
        match = _OVERRIDE.fullmatch(word)
        if match is None or (match[1] != "~" and match[3] is None):
            raise ConfigError(
                f"{word!r} is no setting of verl: expected key=value, +key=value or ~key, as in "
                "data.train_batch_size=1024"
            )
        key = match[2]
        if match[1] == "~":
            values.pop(key, None)
            deleted.append(key)
            continue
        try:
            values[key] = parsed(match[3][1:])
        except ValueError as error:
            raise ConfigError(f"{key}: {error}") from error
    flat = {name: leaf for key, value in values.items() for name, leaf in _leaves(key, value)}
    return HydraSettings(flat, tuple(deleted))


def joined(first: HydraSettings, second: HydraSettings) -> HydraSettings:
    """Return the keys of both; the second's win."""
    values = {key: value for key, value in first.values.items() if key not in second.deleted}
    return HydraSettings(
        {**values, **second.values},
        (*first.deleted, *second.deleted),
        (*first.remarks, *second.remarks),
    )


def after_program(words: Sequence[str]) -> list[str] | None:
    """Return the words after verl's program in a command, or None for another program."""
    for place, word in enumerate(words):
        if _PROGRAM.fullmatch(word):
            return list(words[place + 1 :])
    return None


def of_file(tree: object, where: str) -> HydraSettings:
    """Return what a YAML file sets.

    Args:
        tree: Content of the file, as YAML reads it.
        where: The file, for errors.

    Raises:
        ConfigError: The content is no table.
    """
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{where} holds no table of settings, got {type(tree).__name__}")
    remarks = []
    if "defaults" in tree:
        remarks.append(
            "defaults: the files that it names are not read. The whole configuration is printed by "
            "verl's command with --cfg job --resolve"
        )
    values: dict[str, Value] = {}
    for key, value in tree.items():
        if key not in {"defaults", "hydra"}:
            values |= dict(_leaves(str(key), value))
    references = [key for key, value in values.items() if isinstance(value, str) and "${" in value]
    for key in references:
        del values[key]
    if references:
        remarks.append(
            f"{len(references)} values are references (${{...}}), such as that of {references[0]}, "
            "and are taken as not set: verl's command prints them with --cfg job --resolve"
        )
    return HydraSettings(values, remarks=tuple(remarks))


def _leaves(key: str, value: object) -> Iterator[tuple[str, Value]]:
    """Yield the values of a table and of the tables inside it by their dotted keys."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _leaves(f"{key}.{name}", inner)
    elif isinstance(value, Mapping):
        yield key, {}
    elif isinstance(value, list | tuple):
        yield key, [item if isinstance(item, _SCALARS) else str(item) for item in value]
    elif value is None or isinstance(value, _SCALARS):
        yield key, value
    else:
        yield key, str(value)


def parsed(text: str) -> Value:
    """Return the value that Hydra reads in the text after an equals sign.

    Raises:
        ValueError: The text is too long, or its brackets are too deep inside each other.
    """
    if len(text) > MOST_LENGTH:
        raise ValueError(f"{len(text)} characters are no value: {MOST_LENGTH} at most")
    value, rest = _value(text.strip(), "")
    return value if not rest.strip() else text.strip()


def _value(text: str, ends: str, depth: int = 0) -> tuple[Value, str]:
    """Return the value at the beginning of a text, and what follows it."""
    if depth > MOST_DEPTH:
        raise ValueError(f"brackets are more than {MOST_DEPTH} deep inside each other")
    text = text.lstrip()
    if text[:1] == "[":
        return _list(text[1:], depth + 1)
    if text[:1] == "{":
        return _table(text[1:], depth + 1)
    if text[:1] in {"'", '"'}:
        end = text.find(text[0], 1)
        if end > 0:
            return text[1:end], text[end + 1 :]
    end = next((i for i, char in enumerate(text) if char in ends), len(text))
    return _scalar(text[:end].strip()), text[end:]


def _list(text: str, depth: int) -> tuple[Value, str]:
    values: list[Value] = []
    while text.lstrip() and not text.lstrip().startswith("]"):
        value, text = _value(text, ",]", depth)
        values.append(value)
        text = text.lstrip().removeprefix(",")
    return values, text.lstrip()[1:]


def _table(text: str, depth: int) -> tuple[Value, str]:
    values: dict[str, Value] = {}
    while text.lstrip() and not text.lstrip().startswith("}"):
        key, text = _value(text, ":,}", depth)
        value: Value = None
        if text.lstrip().startswith(":"):
            value, text = _value(text.lstrip()[1:], ",}", depth)
        values[str(key)] = value
        text = text.lstrip().removeprefix(",")
    return values, text.lstrip()[1:]


def _scalar(text: str) -> Value:
    plain = text.lower()
    if plain in {"null", "none", "~", ""}:
        return None if plain != "" else ""
    if plain in {"true", "false"}:
        return plain == "true"
    if len(text) <= _MOST_DIGITS:
        with suppress(ValueError):  # 1__0
            if _INT.fullmatch(text):
                return int(text)
            if _FLOAT.fullmatch(text):
                return float(text)
    return text

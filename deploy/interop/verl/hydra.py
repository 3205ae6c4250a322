"""verl's configuration as Hydra is given it: overrides of a command, or a YAML file. Pure."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from slipstream.deploy.interop.verl.shell import MOST_DEPTH, MOST_LENGTH, unknown_names
from slipstream.wire.errors import ConfigError

Value = None | bool | int | float | str | list["Value"] | dict[str, "Value"]

_PROGRAM = re.compile(r"(.*[./])?main_(ppo|dapo|\w+)(\.py)?")
_OVERRIDE = re.compile(r"(\+{0,2}|~)([A-Za-z_][\w.@/:-]*)(=.*)?", re.DOTALL)
_INT = re.compile(r"[+-]?\d[\d_]*")
_FLOAT = re.compile(r"[+-]?(\d[\d_]*\.?\d*|\.\d+)(e[+-]?\d+)?|[+-]?(inf|nan)", re.IGNORECASE)
_MOST_DIGITS = 64  # of a number; what is longer is text
_ONE_MORE_WORD = frozenset(
    {"-cn", "-cp", "-cd", "--config-name", "--config-path", "--config-dir", "-p", "--package"}
)


@dataclass(frozen=True, slots=True)
class Given:
    """Keys of verl with their values, in the order in which they were given."""

    values: dict[str, Value]
    deleted: tuple[str, ...] = ()
    unreadable: tuple[tuple[str, str], ...] = ()  # key and why its value is not known
    ignored: tuple[str, ...] = ()  # remarks on what was not read


def overrides_of(words: Sequence[str]) -> Given:
    """Return what the words after verl's program set.

    Raises:
        ConfigError: a word is no override, with an example of one, or beyond a bound, named.
    """
    values: dict[str, Value] = {}
    deleted: list[str] = []
    unreadable: dict[str, str] = {}
    rest = iter(words)
    for word in rest:
        if word.startswith("-"):
            name, equals, text = word.partition("=")
            if not equals and name in _ONE_MORE_WORD:
                text = next(rest, "")
            values[name] = text
            continue
        match = _OVERRIDE.fullmatch(word)
        if match is None and (names := unknown_names(word)):
            unreadable["(further words)"] = ", ".join(names)
            continue
        if match is None or (match[1] != "~" and match[3] is None):
            raise ConfigError(
                f"{word!r} is no setting of verl: expected key=value, +key=value or ~key, as in "
                "data.train_batch_size=1024"
            )
        key = match[2]
        unreadable.pop(key, None)
        if match[1] == "~":
            values.pop(key, None)
            deleted.append(key)
        elif names := unknown_names(word):
            unreadable[key] = ", ".join(names)
        else:
            try:
                values[key] = parsed(match[3][1:])
            except ValueError as error:
                raise ConfigError(f"{key}: {error}") from error
    flat = {name: one for key, value in values.items() for name, one in _leaves(key, value)}
    return Given(flat, tuple(deleted), tuple(unreadable.items()))


def after_program(words: Sequence[str]) -> list[str] | None:
    """Return the words after verl's program in a command; None if it starts another one."""
    for place, word in enumerate(words):
        if _PROGRAM.fullmatch(word):
            return list(words[place + 1 :])
    return None


def of_file(tree: object, where: str) -> Given:
    """Return what a YAML file sets.

    Args:
        tree: as YAML reads it.
        where: the file, for errors.

    Raises:
        ConfigError: it is no table.
    """
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{where} holds no table of settings, got {type(tree).__name__}")
    ignored = []
    if "defaults" in tree:
        ignored.append(
            "defaults: the files that it names are not read. The whole configuration is printed by "
            "verl's command with --cfg job --resolve"
        )
    values: dict[str, Value] = {}
    for key, value in tree.items():
        if key not in {"defaults", "hydra"}:
            values |= dict(_leaves(str(key), value))
    references = [key for key, value in values.items() if _refers(value)]
    for key in references:
        del values[key]
    if references:
        ignored.append(
            f"{len(references)} values are references (${{...}}), such as that of {references[0]}, "
            "and are taken as not set: verl's command prints them with --cfg job --resolve"
        )
    return Given(values, ignored=tuple(ignored))


def _refers(value: Value) -> bool:
    return isinstance(value, str) and "${" in value


def _leaves(key: str, value: object) -> Iterator[tuple[str, Value]]:
    """Yield the values of a table and of the tables inside it by their dotted keys."""
    if isinstance(value, Mapping) and value:
        for name, one in value.items():
            yield from _leaves(f"{key}.{name}", one)
    elif isinstance(value, Mapping):
        yield key, {}
    elif isinstance(value, list | tuple):
        yield key, [one if isinstance(one, bool | int | float | str) else str(one) for one in value]
    elif value is None or isinstance(value, bool | int | float | str):
        yield key, value
    else:
        yield key, str(value)


def parsed(text: str) -> Value:
    """Return the value that Hydra reads in the text after an equals sign.

    Raises:
        ValueError: it is too long, or its brackets are too deep inside each other.
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

"""One TOML file describes a run; every role reads it and decodes its own sections.

Sections are frozen msgspec structs that live in their role's ``config.py``. Unknown keys are
refused with the nearest known key named; every setting has one default, in its struct.
"""

import difflib
import tomllib
import types
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from slipstream.wire.errors import ConfigError
from slipstream.wire.settings.value_errors import wrong_value

S = TypeVar("S", bound=msgspec.Struct)
Table = dict[str, Any]

SECTIONS = (
    "run",
    "data",
    "sampling",
    "broker",
    "generators",
    "reward",
    "environment",
    "learner",
    "lora",
    "serve",
    "algo",
    "weightbus",
    "eval",
    "checkpoint",
    "logging",
    "profile",
    "deploy",
    "tenants",
)
_VERL_SECTIONS = {
    "actor_rollout_ref",
    "algorithm",
    "critic",
    "custom_reward_function",
    "reward_model",
    "trainer",
}
_OF_VERL = "; it is one of verl's: slipstream import-verl translates its commands"


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every section."""


def load_table(path: Path | None, overrides: Sequence[str] = ()) -> Table:
    """Return the file's sections with ``section.key=value`` overrides applied; None is no file.

    Raises:
        ConfigError: the file cannot be read or parsed, or names an unknown section.
    """
    table: Table = {}
    try:
        if path is not None:
            with path.open("rb") as file:
                table = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"cannot read the run's settings {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    apply_overrides(table, overrides)
    where = f" in {path}" if path is not None else ""
    for name, section in table.items():
        if name not in SECTIONS:
            meant = _OF_VERL if name in _VERL_SECTIONS else _nearest(name, SECTIONS)
            raise ConfigError(f"unknown section [{name}]{where}{meant}")
        if not isinstance(section, dict):
            raise ConfigError(f"{name} must be a section, got {section!r}{where}")
        _refuse_nul(section, name)
    return table


def _refuse_nul(value: object, name: str) -> None:
    """Refuse a character that no path, name or argument of a process can hold."""
    if isinstance(value, str) and "\0" in value:
        raise ConfigError(f"{name} must hold no NUL character, got {value!r}")
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _refuse_nul(inner, f"{name}.{key}")
    elif isinstance(value, list):
        for inner in value:
            _refuse_nul(inner, name)


def section(table: Mapping[str, Any], name: str, kind: type[S]) -> S:
    """Decode one section; a missing one is all defaults.

    Raises:
        ConfigError: an unknown key or a value of the wrong type or out of bounds.
    """
    values = table.get(name, {})
    _refuse_unknown(values, kind, name)
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(wrong_value(values, kind, name, str(error))) from error


def to_table(struct: msgspec.Struct) -> Table:
    """Return a struct as plain values that TOML can hold (unset optional values left out)."""
    plain: Table = msgspec.to_builtins(struct)
    return _without_none(plain)


def _without_none(table: Table) -> Table:
    return {
        key: _without_none(value) if isinstance(value, dict) else value
        for key, value in table.items()
        if value is not None
    }


def apply_overrides(table: Table, overrides: Sequence[str]) -> None:
    """Put ``section.key=value`` into a table.

    Raises:
        ConfigError: one is not of this form.
    """
    for override in overrides:
        _apply_override(table, override)


def _apply_override(table: Table, override: str) -> None:
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or len(keys) < 2 or not all(keys):
        raise ConfigError(f"override {override!r} is not of the form section.key=value")
    target = table
    for key in keys[:-1]:
        target = target.setdefault(key, {})
        if not isinstance(target, dict):
            raise ConfigError(f"override {override!r}: {key} is not a section")
    target[keys[-1]] = _parse_value(text.strip())


def _parse_value(text: str) -> object:
    """Return the TOML value of ``text``; anything else is taken as a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return text


_COPIES = "ranks that hold the same weights always do so"
_GONE = dict.fromkeys(("learner.distributed_optimizer", "learner.overlap_grad_reduce"), _COPIES)
"""Settings of earlier versions, and why nothing takes their place."""


@cache
def _fields(kind: type[msgspec.Struct]) -> tuple[dict[str, object], list[str]]:
    """Return the types and the names of a section's settings."""
    return get_type_hints(kind), [field.encode_name for field in msgspec.structs.fields(kind)]


def _refuse_unknown(values: Mapping[str, Any], kind: type[msgspec.Struct], where: str) -> None:
    hints, known = _fields(kind)
    for key, value in values.items():
        if key not in known:
            if why := _GONE.get(f"{where}.{key}"):
                raise ConfigError(f"{where}.{key} is gone: {why}; remove the line")
            raise ConfigError(f"unknown setting {where}.{key}{_nearest(key, known)}")
        hint = hints.get(key)
        inner = _struct_in(hint)
        if inner is not None and isinstance(value, dict):
            tables = value if get_origin(hint) is dict else {"": value}
            for name, table in tables.items():
                if isinstance(table, dict):
                    _refuse_unknown(table, inner, ".".join(filter(None, (where, key, name))))


def _struct_in(hint: object) -> type[msgspec.Struct] | None:
    """Return the struct of a type hint: itself, an option of it, or a table of it."""
    options = get_args(hint) if get_origin(hint) in {types.UnionType, dict} else (hint,)
    for option in options:
        if isinstance(option, type) and issubclass(option, msgspec.Struct):
            return option
    return None


def _nearest(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; known are {', '.join(sorted(known))}"

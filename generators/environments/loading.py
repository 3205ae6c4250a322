"""Find an environment by its name: a class, or a function that drives an agent itself."""

import hashlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.generators.environments.sdk import Environment, schema_of
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.source_files import module_named
from slipstream.wire.messages.trajectory import Json

_SETTING = "environment"
_DIGITS = 12


@dataclass(frozen=True, slots=True)
class LoadedEnvironment:
    """An imported environment."""

    version: str
    make: Callable[[], Environment] | None  # None: it drives itself
    rollout: Callable[..., Any] | None
    may_reward: bool = True  # False: its step is that of the base class, without rewards


def load_environment(name: str, options: Mapping[str, Json]) -> LoadedEnvironment:
    """Return the environment that ``MODULE:NAME`` or ``FILE.py:NAME`` names.

    Raises:
        ConfigError: it does not exist, does not take these options, or a tool has no schema.
    """
    where, colon, attribute = name.rpartition(":")
    if not (colon and where and attribute):
        raise ConfigError(f"{_SETTING}.function {name!r} is not MODULE:NAME or FILE.py:NAME")
    try:
        module = module_named(where)
        target: Any = getattr(module, attribute)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"cannot load {_SETTING}.function {name!r}: {_reason(error)}") from error
    if not callable(target):
        raise ConfigError(f"{_SETTING}.function {name!r} is neither a class nor a function")
    version = str(getattr(target, "version", "")) or _digest(module.__file__ or "")
    first = () if inspect.isclass(target) else (None, None)
    try:
        inspect.signature(target).bind(*first, **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{_SETTING}.options of {name!r}: {error}") from error
    if not inspect.isclass(target):
        if not inspect.iscoroutinefunction(target):
            raise ConfigError(
                f"{_SETTING}.function {name!r} is a function and not async: expected a class with "
                "a method step, or `async def rollout(client, prompt)`"
            )
        _prepare(getattr(module, "prepare", None), name, options)
        return LoadedEnvironment(version, None, lambda *arguments: target(*arguments, **options))
    _check_class(target, name, options)
    made: Any = target  # a class of the user, which need not be a subclass
    may_reward = getattr(target, "step", None) is not Environment.step
    return LoadedEnvironment(version, lambda: made(**options), None, may_reward)


def _check_class(target: Any, name: str, options: Mapping[str, Json]) -> None:  # noqa: ANN401
    for method in ("reset", "step", "call", "close"):
        function = getattr(target, method, None) or getattr(Environment, method)
        if not inspect.iscoroutinefunction(function):
            raise ConfigError(f"{_SETTING}.function {name!r}: its method {method} is not async")
    if not callable(getattr(target, "step", None)):
        raise ConfigError(f"{_SETTING}.function {name!r} is a class without a method step")
    try:
        for tool in getattr(target, "tools", ()):
            schema_of(tool)
    except (TypeError, ValueError, NameError) as error:
        raise ConfigError(f"{_SETTING}.function {name!r}: {error}") from error
    _prepare(getattr(target, "prepare", None), name, options)


def _prepare(prepare: Callable[..., None] | None, name: str, options: Mapping[str, Json]) -> None:
    try:
        if prepare is not None:
            prepare(**options)
    except Exception as error:
        raise ConfigError(f"{_SETTING}.options of {name!r}: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    return str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"


def _digest(file: str) -> str:
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:_DIGITS]
    except OSError:
        return ""

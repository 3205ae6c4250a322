"""Find a reward by its name: a function or a class, decorated or with verl's signature."""

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from slipstream.broker.rewards.outcomes import FunctionInfo
from slipstream.broker.rewards.sdk import DECLARED, READER, Reader, Takes, Transcript
from slipstream.broker.sandbox import sandbox
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.source_files import module_named
from slipstream.wire.messages.trajectory import Json

_VERL_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
_VERL_BATCH_ARGUMENTS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
_VERSION_DIGITS = 12
_SHIPPED = "slipstream.broker.rewards."
Target = Callable[..., object]


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A reward function that is ready to be called."""

    info: FunctionInfo
    call: Callable[[Sequence[Transcript]], object]  # one answer, or all of a batch or group
    is_async: bool
    close: Callable[[], object]


def load_function(
    name: str,
    options: Mapping[str, Json],
    *,
    setting: str = "reward",
    offered: Mapping[str, Json] | None = None,
) -> RewardFunction:
    """Return the reward that ``MODULE:NAME`` or ``FILE.py:NAME`` names.

    Args:
        name: Name of a function or class; the folder of a file is put on ``sys.path``.
        options: keyword arguments of the function, or of the class.
        setting: Setting with name and options, for messages.
        offered: further arguments, passed where the function names them.

    Raises:
        ConfigError: there is no such module, file, function or option; or it wants to run code in a
            sandbox that this machine does not have.
    """
    target, file = _resolve(name, setting)
    takes, version = _declared(target)
    wanted = _accepted(target, options, offered or {}, f"{setting}.options", name)
    if "sandbox" in wanted:
        sandbox.check(wanted["sandbox"])
    named = _signature(target, name, setting).parameters
    is_verls_batch = takes is None and set(_VERL_BATCH_ARGUMENTS) <= set(named)
    info = FunctionInfo(
        name=name,
        version=version or _digest(target, file),
        takes="batch" if is_verls_batch else takes or "answer",
    )
    if is_verls_batch:
        return RewardFunction(info, _of_verls_batch(target, wanted), _is_async(target), _nothing)
    if inspect.isclass(target):
        return _of_class(target, info, wanted, setting, is_versioned=bool(version))
    call = _of_function(target, info, wanted) if takes else _of_verl(target, wanted, name, setting)
    return RewardFunction(info, call, _is_async(target), _nothing)


def load_reader(
    name: str, options: Mapping[str, Json], *, setting: str = "reward"
) -> Reader | None:
    """Return what reads rows for a reward of ours, which is not made for it; None where none does.

    Functions of others may do anything when they are imported: they run in children alone.

    Raises:
        ConfigError: there is no such module, function or option, or an option is wrong.
    """
    if not name.startswith(_SHIPPED):
        return None
    target, _ = _resolve(name, setting)
    _accepted(target, options, {}, f"{setting}.options", name)
    declared: Callable[..., Any] | None = getattr(target, READER, None)
    if declared is None or not inspect.isclass(target):
        return declared
    reader: Reader = _made(declared, options, name, setting)
    return reader


def _made(make: Callable[..., Any], options: Mapping[str, Json], name: str, setting: str) -> Any:  # noqa: ANN401
    try:
        return make(**options)
    except Exception as error:
        raise ConfigError(
            f"{setting}.function {name!r} cannot be made with {setting}.options = "
            f"{dict(options)}: {type(error).__name__}: {error}"
        ) from error


def _nothing() -> None:
    """Close nothing."""


def _of_class(
    target: Target,
    info: FunctionInfo,
    options: Mapping[str, Json],
    setting: str,
    *,
    is_versioned: bool,
) -> RewardFunction:
    instance = _made(target, options, info.name, setting)
    score: object = getattr(instance, "score", None)
    if not callable(score):
        raise ConfigError(f"{setting}.function {info.name!r} is a class without a method score")
    version: object = getattr(instance, "version", None)
    if not is_versioned and isinstance(version, str) and version:
        info = msgspec.structs.replace(info, version=version)
    close = getattr(instance, "close", None)
    call = _of_function(score, info, {})
    return RewardFunction(info, call, _is_async(score), close if callable(close) else _nothing)


def _of_function(
    target: Target, info: FunctionInfo, options: Mapping[str, Json]
) -> Callable[[Sequence[Transcript]], object]:
    if info.takes == "answer":
        return lambda transcripts: target(transcripts[0], **options)
    return lambda transcripts: target(list(transcripts), **options)


def _of_verl(
    target: Target, options: Mapping[str, Json], name: str, setting: str
) -> Callable[[Sequence[Transcript]], object]:
    """Call by keyword as verl does, or by position where the arguments have other names."""
    signature = _signature(target, name, setting)
    for by_keyword in (True, False):
        try:
            if by_keyword:
                signature.bind(**dict.fromkeys(_VERL_ARGUMENTS), **options)
            else:
                signature.bind(*_VERL_ARGUMENTS, **options)
        except TypeError:
            continue
        if not by_keyword:
            return lambda transcripts: target(*_values(transcripts[0]), **options)
        names = _VERL_ARGUMENTS
        return lambda transcripts: target(
            **dict(zip(names, _values(transcripts[0]), strict=True)), **options
        )
    raise ConfigError(
        f"{setting}.function {name!r} takes {signature}, expected "
        f"({', '.join(_VERL_ARGUMENTS)}) and the names in {setting}.options, or a function "
        "decorated with @reward"
    )


def _of_verls_batch(
    target: Target, options: Mapping[str, Json]
) -> Callable[[Sequence[Transcript]], object]:
    """Call with a list for each of verl's arguments."""

    def call(transcripts: Sequence[Transcript]) -> object:
        columns = map(list, zip(*map(_values, transcripts), strict=True))
        return target(**dict(zip(_VERL_BATCH_ARGUMENTS, columns, strict=True)), **options)

    return call


def _values(transcript: Transcript) -> tuple[Json, ...]:
    prompt = transcript.prompt
    return prompt.data_source, transcript.response, prompt.ground_truth, prompt.extra_info


# ---- its identity ------------------------------------------------------------


def _declared(target: Target) -> tuple[Takes | None, str]:
    """Return the decorator's declaration; a class needs none, its method takes one answer."""
    declared: tuple[Takes, str] | None = getattr(target, DECLARED, None)
    if declared is not None:
        return declared
    return ("answer" if inspect.isclass(target) else None), ""


def _is_async(target: Target) -> bool:
    called = getattr(target, "__call__", None)  # noqa: B004 of an instance it may be async
    return inspect.iscoroutinefunction(target) or inspect.iscoroutinefunction(called)


def _signature(target: Target, name: str, setting: str) -> inspect.Signature:
    try:
        return inspect.signature(target)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{setting}.function {name!r}: {error}") from error


def _accepted(
    target: Target,
    options: Mapping[str, Json],
    offered: Mapping[str, Json],
    setting: str,
    name: str,
) -> dict[str, Json]:
    """Return the options, and the offered ones that are named; refuse unknown ones."""
    where = setting.removesuffix(".options")
    parameters = list(_signature(target, name, where).parameters.values())
    is_verl = _declared(target)[0] is None
    given = 0 if is_verl or inspect.isclass(target) else 1  # the answer or answers come first
    by_name = [
        parameter.name
        for parameter in parameters[given:]
        if parameter.kind in {parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD}
        and not (is_verl and parameter.name in {*_VERL_ARGUMENTS, *_VERL_BATCH_ARGUMENTS})
    ]
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    for key in options:
        if key not in by_name and not takes_any:
            known = f"it takes {', '.join(by_name)}" if by_name else "it takes no options"
            raise ConfigError(f"{setting}.{key}: {name} has no such argument; {known}")
    extra = {key: value for key, value in offered.items() if key in by_name}
    return {**extra, **options}


def _digest(target: Target, file: str) -> str:
    try:
        source = inspect.getsourcefile(inspect.unwrap(target)) or file
    except TypeError:
        source = file
    try:
        return hashlib.sha256(Path(source).read_bytes()).hexdigest()[:_VERSION_DIGITS]
    except OSError:
        return ""


# ---- where it is -------------------------------------------------------------


def _resolve(name: str, setting: str) -> tuple[Target, str]:
    """Return the object that a name refers to, and the file of its module."""
    where, colon, attribute = name.rpartition(":")
    if not (colon and where and attribute):
        raise ConfigError(f"{setting}.function {name!r} is not MODULE:FUNCTION or FILE.py:FUNCTION")
    try:
        module = module_named(where)
        target: object = module
        for part in attribute.split("."):
            target = getattr(target, part)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"cannot load {setting}.function {name!r}: {type(error).__name__}: {error}"
        ) from error
    if not callable(target):
        raise ConfigError(f"{setting}.function {name!r} is not callable")
    return target, module.__file__ or ""

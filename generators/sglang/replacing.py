"""Replaces functions of SGLang, and refuses if they are not the ones that were corrected."""

import __future__

import inspect
import textwrap
from types import ModuleType

from slipstream.wire.errors import ConfigError

SGLANG_VERSION = "0.5.23"  # release that the corrections were written for


def replace(owner: ModuleType | type, name: str, value: object) -> None:
    """Replace an attribute of a module or class of a dependency.

    Raises:
        ConfigError: the owner has no such name, so the new value would never be read, or its
            function takes other arguments than the new one.
    """
    if name in vars(owner):
        skipped = int(isinstance(owner, type))  # self or cls, by any name
        before, after = (_parameters(member, skipped) for member in (vars(owner)[name], value))
        if before is not None and after is not None and before != after and "*" not in after:
            raise ConfigError(
                f"{owner.__name__}.{name} takes ({before}), what replaces it in "
                f"generators/sglang/patches.py takes ({after})"
            )
    else:
        raise ConfigError(
            f"{owner.__name__} has no {name}, which generators/sglang/patches.py replaces for "
            f"SGLang {SGLANG_VERSION}: install that release as it was published"
        )
    setattr(owner, name, value)


def leave_out(owner: type, name: str, line: str) -> None:
    """Replace a method by its own source without one line, where no smaller part has a name.

    Raises:
        ConfigError: the method has this line not once, or was installed without its source.
    """
    method = vars(owner)[name]
    try:
        lines, first = inspect.getsourcelines(method)
    except OSError as error:
        raise ConfigError(
            f"{owner.__name__}.{name} has no source, of which patches.py of generators/sglang "
            f"leaves a line out: install SGLang {SGLANG_VERSION} with its .py files ({error})"
        ) from error
    found = [number for number, text in enumerate(lines) if text.strip() == line]
    if len(found) != 1:
        raise ConfigError(
            f"{owner.__name__}.{name} has {len(found)} lines `{line}`, patches.py of generators/"
            f"sglang leaves one out for SGLang {SGLANG_VERSION}: install it as it was published"
        )
    lines[found[0]] = "\n"
    text = "\n" * (first - 1) + textwrap.dedent("".join(lines))  # numbers of lines stay true
    path = inspect.getsourcefile(method) or "?"
    made: dict[str, object] = {}
    code = compile(text, path, "exec", __future__.annotations.compiler_flag, dont_inherit=True)
    exec(code, method.__globals__, made)  # noqa: S102 its own text
    setattr(owner, name, made[name])


def _parameters(value: object, skipped: int) -> str | None:
    """Return a function's parameters but the first ones, without types and defaults."""
    function = getattr(value, "__func__", value)
    if not inspect.isfunction(function):
        return None
    parameters = list(inspect.signature(function).parameters.values())[skipped:]
    return ", ".join(
        str(parameter.replace(annotation=parameter.empty, default=parameter.empty))
        for parameter in parameters
    )

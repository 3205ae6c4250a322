"""What an algorithm is put together from: functions with a name and options, one's own included.

A part is one function, marked by a decorator that says what it is for and which options it takes:

    class Mine(Options):
        strength: float = 1.0

    @surrogate("mine", Mine)
    def mine(inputs: SurrogateInputs, options: Mine) -> Terms: ...

It is chosen by its name (``algo.surrogate = "mine"``) if it is one of this package's, and as
``module:function`` if it is not. Nothing is registered by importing a module.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, ParamSpec, TypeVar

import msgspec
from typing_extensions import override

Kind = Literal["advantage", "surrogate", "correction"]
P = ParamSpec("P")
R = TypeVar("R")


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one part: every field has a default and a docstring below it."""


class NoOptions(Options, frozen=True, kw_only=True):
    """A part without settings."""


class PartError(ValueError):
    """A part of the algorithm is not there, or is not what its setting asks for."""


@dataclass(frozen=True, slots=True)
class Part(Generic[P, R]):
    """A function of the algorithm under its name; called like the function itself."""

    kind: Kind
    name: str
    options: type[Options]
    function: Callable[P, R]
    needs: frozenset[str] = frozenset()  # of NEEDS

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function."""
        return self.function(*args, **kwargs)

    @property
    def summary(self) -> str:
        """Return the first line of the function's docstring."""
        return (self.function.__doc__ or "").strip().partition("\n")[0]

    @override
    def __repr__(self) -> str:
        return f"<{self.kind} {self.name}>"


AnyPart = Part[..., Any]
NEEDS = {
    "values": "a critic (algo.critic)",
    "tokens": "rewards by token",
    "siblings": "at least two answers to each prompt (run.group_size)",
    "centered": "rewards less the mean of their group",
    "greedy": "the reward of a greedy answer to each prompt, which is not generated",
    "whole_minibatch": "all tokens of a minibatch before its first gradient",
    "first": "to come before other corrections, which are of the proximal policy it gives",
}


def advantage(
    name: str, options: type[Options] = NoOptions, *, needs: tuple[str, ...] = ()
) -> Callable[[Callable[P, R]], Part[P, R]]:
    """Mark a function (Outcomes | TokenOutcomes, options) -> advantages."""
    return _marked("advantage", name, options, needs)


def surrogate(
    name: str, options: type[Options] = NoOptions, *, needs: tuple[str, ...] = ()
) -> Callable[[Callable[P, R]], Part[P, R]]:
    """Mark a function (SurrogateInputs, options) -> Terms."""
    return _marked("surrogate", name, options, needs)


def correction(
    name: str, options: type[Options] = NoOptions, *, needs: tuple[str, ...] = ()
) -> Callable[[Callable[P, R]], Part[P, R]]:
    """Mark a function (CorrectionInputs, options) -> Correction."""
    return _marked("correction", name, options, needs)


def _marked(
    kind: Kind, name: str, options: type[Options], needs: tuple[str, ...]
) -> Callable[[Callable[P, R]], Part[P, R]]:
    unknown = set(needs) - set(NEEDS)
    if unknown:
        raise PartError(f"{kind} {name}: needs {sorted(unknown)}, known are {sorted(NEEDS)}")
    if "values" in needs and "tokens" not in needs:
        raise PartError(f"{kind} {name}: values are of tokens, so it needs both or neither")

    def mark(function: Callable[P, R]) -> Part[P, R]:
        return Part(kind, name, options, function, frozenset(needs))

    return mark


def find_part(kind: Kind, name: str, built_in: Mapping[str, AnyPart], setting: str) -> AnyPart:
    """Return a part by its name, or by ``module:function``.

    Raises:
        PartError: there is none, its module cannot be imported, or it is of another kind.
    """
    if name in built_in:
        return built_in[name]
    module_name, colon, function = name.partition(":")
    if not colon:
        raise PartError(
            f"{setting} = {name!r} is not known; there are {', '.join(sorted(built_in))}, "
            "and one's own as module:function"
        )
    try:
        found = getattr(importlib.import_module(module_name), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise PartError(f"{setting} = {name!r} cannot be loaded: {error}") from error
    if not isinstance(found, Part) or found.kind != kind:
        raise PartError(
            f"{setting} = {name!r} is {found!r}; expected a function under "
            f"@algos.parts.{kind}(name, options)"
        )
    return found

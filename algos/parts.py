"""Parts of an algorithm: functions with a name and options, user-defined ones included.

A part is one function, marked by a decorator that gives its kind and its options:

    class Mine(Options):
        strength: float = 1.0

    @surrogate("mine", Mine)
    def mine(inputs: SurrogateInputs, options: Mine) -> Terms: ...

It is chosen by its name (``algo.surrogate = "mine"``) if it is one of this package's, and as
``FILE.py:FUNCTION`` or ``MODULE:FUNCTION`` if it is not. Nothing is registered by importing a
module.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Generic, Literal, ParamSpec, TypeVar

import msgspec
from typing_extensions import override

Kind = Literal["advantage", "surrogate", "correction"]
P = ParamSpec("P")
R = TypeVar("R")


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one part: every field has a default and a docstring below it."""

    @property
    def needs(self) -> frozenset[str]:
        """Inputs that the part needs with these options, beyond its constant ones; of NEEDS."""
        return frozenset()


class NoOptions(Options, frozen=True, kw_only=True):
    """A part without settings."""


class PartError(ValueError):
    """A part of the algorithm is missing, or of another kind than its setting needs."""


class OptionsError(PartError):
    """Options of a part cannot be decoded: what they are, and what they must be."""

    def __init__(
        self, where: str, values: Mapping[str, Any], kind: type[msgspec.Struct], error: str
    ) -> None:
        super().__init__(f"{where}: {error}")
        self.where = where
        self.values = values
        self.kind = kind
        self.error = error


@dataclass(frozen=True, slots=True)
class Part(Generic[P, R]):
    """A function of the algorithm under its name; called like the function itself."""

    kind: Kind
    name: str
    options: type[Options]
    function: Callable[P, R]
    needs: frozenset[str] = frozenset()  # keys of NEEDS

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function."""
        return self.function(*args, **kwargs)

    @property
    def summary(self) -> str:
        """First line of the function's docstring."""
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
    "reward_parts": "the named parts of each reward",
    "turn_rewards": "the rewards of turns",
    "whole_step": "all tokens of a learner step at once, and their groups",
    "squares": "the sum of the squared probabilities that each token was chosen from",
    "greedy": "the reward of a greedy answer to each prompt, which is not generated",
    "entropy": "the entropy at each token",
    "reference": "the log-probability of each token under the reference policy (algo.kl.reference)",
    "lags": "the staleness of each token",
    "whole_minibatch": "all tokens of a minibatch before its first gradient",
    "first": "to come before other corrections, which are of the proximal policy it gives",
}
_OF_ADVANTAGES = ("values", "tokens", "siblings", "centered", "reward_parts", "greedy")
_OF_KIND: dict[Kind, frozenset[str]] = {
    "advantage": frozenset({*_OF_ADVANTAGES, "turn_rewards", "whole_step", "squares"}),
    "surrogate": frozenset({"entropy", "reference", "lags", "whole_minibatch"}),
    "correction": frozenset({"entropy", "reference", "lags", "whole_minibatch", "first"}),
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


def check_needs(kind: Kind, name: str, needs: frozenset[str]) -> None:
    """Refuse needs that no part meets.

    Raises:
        PartError: naming them and the known ones.
    """
    known = _OF_KIND[kind]
    unknown = needs - known
    if unknown:
        raise PartError(
            f"{kind} {name}: needs {sorted(unknown)}; known of this kind are {sorted(known)}"
        )
    for of_tokens in ("values", "whole_step", "squares"):
        if of_tokens in needs and "tokens" not in needs:
            raise PartError(f"{kind} {name}: {of_tokens} are of tokens, so it needs tokens, too")
    if {"tokens", "reward_parts"} <= needs:
        raise PartError(f"{kind} {name}: reward_parts are of trajectories, and tokens have none")


def _marked(
    kind: Kind, name: str, options: type[Options], needs: tuple[str, ...]
) -> Callable[[Callable[P, R]], Part[P, R]]:
    check_needs(kind, name, frozenset(needs))

    def mark(function: Callable[P, R]) -> Part[P, R]:
        return Part(kind, name, options, function, frozenset(needs))

    return mark


def find_part(
    kind: Kind,
    name: str,
    built_in: Mapping[str, AnyPart],
    setting: str,
    module_named: Callable[[str], ModuleType],
) -> AnyPart:
    """Return a part by its name, or by ``FILE.py:FUNCTION`` or ``MODULE:FUNCTION``.

    Args:
        kind: the required kind.
        name: name of the part.
        built_in: parts that need no module.
        setting: setting with that name, for messages.
        module_named: imports the part before the colon.

    Raises:
        PartError: it is unknown, its module cannot be imported, or it is of another kind.
    """
    if name in built_in:
        return built_in[name]
    module_name, colon, function = name.rpartition(":")
    if not colon:
        raise PartError(
            f"{setting} = {name!r} is not known; there are {', '.join(sorted(built_in))}, "
            "and one's own as FILE.py:FUNCTION or MODULE:FUNCTION"
        )
    try:
        found = getattr(module_named(module_name), function)
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        raise PartError(
            f"{setting} = {name!r} cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(found, Part) or found.kind != kind:
        raise PartError(
            f"{setting} = {name!r} is {found!r}; expected a function under "
            f"@slipstream.algos.parts.{kind}(name, options)"
        )
    return found

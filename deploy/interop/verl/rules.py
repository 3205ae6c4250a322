"""Rules of rows that several topics have, mostly by the setting that they write. Pure."""

from collections.abc import Callable, Iterable, Mapping

from slipstream.deploy.interop.verl.hydra import Value
from slipstream.deploy.interop.verl.keys import VerlKeys
from slipstream.deploy.interop.verl.rows import (
    Counterpart,
    Rule,
    RuleOf,
    expected,
    nothing,
    refused,
    unlike,
)


def integer(setting: str, *, least: int = 1) -> Rule:
    """Return the rule of a whole number; below ``least`` it is not written."""

    def rule(value: Value, _: VerlKeys) -> Counterpart:
        if isinstance(value, bool) or not isinstance(value, int | float) or value % 1:
            return expected("a whole number", value)
        if value < least:
            return nothing(f"{int(value)} is what Slipstream does without the setting")
        return Counterpart({setting: int(value)})

    return rule


def number(setting: str) -> Rule:
    """Return the rule of a number."""

    def rule(value: Value, _: VerlKeys) -> Counterpart:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return expected("a number", value)
        return Counterpart({setting: float(value)})

    return rule


def switch(setting: str) -> Rule:
    """Return the rule of a true or false."""

    def rule(value: Value, _: VerlKeys) -> Counterpart:
        if not isinstance(value, bool):
            return expected("True or False", value)
        return Counterpart({setting: value})

    return rule


def as_it_is(setting: str) -> Rule:
    """Return the rule of any value."""
    return lambda value, _: Counterpart({setting: value})


def text(setting: str) -> Rule:
    """Return the rule of a text."""
    return lambda value, _: Counterpart({setting: str(value)})


def path(setting: str) -> Rule:
    """Return the rule of a file or folder."""
    return lambda value, keys: Counterpart({setting: keys.path(value)})


def choice(names: Mapping[str, str] | Iterable[str]) -> RuleOf:
    """Return the rules of a value that has one of some names, here the same or another one."""
    ours = names if isinstance(names, Mapping) else {name: name for name in names}

    def rule_of(setting: str) -> Rule:
        def rule(value: Value, _: VerlKeys) -> Counterpart:
            name = str(value)
            return Counterpart({setting: ours[name]}) if name in ours else unlike(value, ours)

        return rule

    return rule_of


def present(reason: str) -> RuleOf:
    """Return the rules of any value that is not 0 or empty, which is not written for a reason."""
    return lambda setting: (
        lambda value, _: Counterpart({setting: value}) if value else nothing(reason)
    )


def count(reason: str) -> RuleOf:
    """Return the rules of a whole number above 0; others are not written, for a reason."""
    return lambda setting: (
        lambda value, _: (
            Counterpart({setting: value})
            if isinstance(value, int) and value > 0
            else nothing(reason)
        )
    )


def number_type(setting: str) -> Rule:
    """Return the rule of a type of weights."""

    def rule(value: Value, _: VerlKeys) -> Counterpart:
        if str(value) in {"bfloat16", "bf16", "auto"}:
            return Counterpart({setting: "bfloat16"})
        if str(value) in {"float32", "fp32"}:
            return Counterpart({setting: "float32"})
        note = f"there is no {value}: bfloat16 or float32"
        return Counterpart({setting: "bfloat16"}, "changed", note)

    return rule


def just(only: Value, reason: str) -> Rule:
    """Return the rule of a key that has one value here, and needs no setting."""
    return lambda value, _: nothing(reason) if value == only else refused(f"{value!r}: {reason}")


def below_table(table: str) -> Rule:
    """Return the rule of keys that keep their last name in a table of ours."""
    return lambda value, keys: Counterpart({f"{table}.{keys.key.rpartition('.')[2]}": value})


def unless(idle: Callable[[VerlKeys], str], rule_of: RuleOf) -> RuleOf:
    """Return rules of a key that counts for nothing wherever ``idle`` gives a reason."""

    def outer(setting: str) -> Rule:
        rule = rule_of(setting)

        def checked(value: Value, keys: VerlKeys) -> Counterpart:
            reason = idle(keys)
            return nothing(reason) if reason else rule(value, keys)

        return checked

    return outer

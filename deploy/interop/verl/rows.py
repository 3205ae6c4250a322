"""Rows of the table, and the rules that turn values of verl into settings. Pure."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from slipstream.deploy.interop.verl.hydra import Value
from slipstream.deploy.interop.verl.keys import VerlKeys

Kind = Literal["kept", "renamed", "changed", "dropped", "unknown"]
Settings = dict[str, object]  # values by dotted names
NOT_SET: Value = "\0not set"  # default of a row without one
OFF = "off, as by default"


@dataclass(frozen=True, slots=True)
class Counterpart:
    """What one key of verl becomes."""

    settings: Settings = field(default_factory=dict)
    kind: Kind | None = None  # if not that of the row
    note: str = ""  # reason, in place of the row's remark
    todo: str = ""  # work left to the reader


Rule: TypeAlias = Callable[[Value, VerlKeys], Counterpart]
RuleOf: TypeAlias = Callable[[str], Rule]  # the rule that writes a setting


@dataclass(frozen=True, slots=True)
class KeyRow:
    """One or several keys of verl that have one translation."""

    verl: tuple[str, ...]  # dotted; * is any one name, ** any number of them, at the end
    ours: tuple[str, ...]  # settings that the rule may write, with the same stars
    remark: str  # the difference, or why there is no counterpart
    rule: Rule | None  # None without a counterpart
    kind: Kind
    default: Value  # verl's, written where the key is not given and ours differs

    def fits(self, key: str) -> bool:
        """Return whether the row is of this key."""
        return any(fits(pattern, key) for pattern in self.verl)

    def counterpart(self, key: str, value: Value, keys: VerlKeys) -> Counterpart:
        """Return what a key of the row becomes."""
        return Counterpart() if self.rule is None else self.rule(value, replace(keys, key=key))


@dataclass(frozen=True, slots=True)
class TranslatedKey:
    """The report on one key."""

    key: str
    kind: Kind
    value: Value
    settings: Settings
    remark: str
    is_default: bool = False  # verl's default, which was not given


def fits(pattern: str, key: str) -> bool:
    """Return whether a key has this form."""
    parts, names = pattern.split("."), key.split(".")
    if parts[-1] == "**":
        parts.pop()
        if len(names) <= len(parts):
            return False
        del names[len(parts) :]
    return len(parts) == len(names) and all(map(_fits_name, parts, names))


def _fits_name(part: str, name: str) -> bool:
    return part in {"*", name}


class Topic:
    """Rows under one heading of the page, in their order. Keys and settings have spaces between."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.rows: list[KeyRow] = []

    def rule(
        self,
        verl: str,
        ours: str = "",
        remark: str = "",
        *,
        kind: Kind | None = None,
        default: Value = NOT_SET,
    ) -> Callable[[Rule], Rule]:
        """Add a row whose rule is the decorated function."""
        keys, settings = tuple(verl.split()), tuple(ours.split())
        last = {name.rpartition(".")[2] for name in settings}
        usual: Kind = "kept" if last == {keys[0].rpartition(".")[2]} else "renamed"

        def add(rule: Rule) -> Rule:
            self.rows.append(KeyRow(keys, settings, remark, rule, kind or usual, default))
            return rule

        return add

    def setting(
        self,
        verl: str,
        ours: str,
        rule_of: RuleOf,
        remark: str = "",
        *,
        kind: Kind | None = None,
        default: Value = NOT_SET,
    ) -> None:
        """Add a row of keys that become one setting."""
        self.rule(verl, ours, remark, kind=kind, default=default)(rule_of(ours))

    def dropped(self, verl: str, remark: str) -> None:
        """Add a row of keys without a counterpart."""
        self.rows.append(KeyRow(tuple(verl.split()), (), remark, None, "dropped", NOT_SET))

    def written_with(self, key: str, verl: str, ours: str, remark: str = "") -> None:
        """Add a row of keys that another key has written already, if it counts."""
        note = f"written with {key}, if that is on"
        shown = remark or f"written with `{key.rpartition('.')[2]}`"
        self.rule(verl, ours, shown, kind="renamed")(lambda _value, _keys: nothing(note))

    def left_to_write(self, verl: str, ours: str, remark: str, note: str, todo: str) -> None:
        """Add a row of code of one's own that has another form here."""

        @self.rule(verl, ours, remark, kind="changed")
        def _(value: Value, _: VerlKeys) -> Counterpart:
            return Counterpart({}, "changed", note, todo) if value else nothing("not set")


# ---- rules ---------------------------------------------------------------------


def refused(reason: str) -> Counterpart:
    """Return that this value has no counterpart."""
    return Counterpart(kind="unknown", note=reason)


def expected(what: str, value: Value) -> Counterpart:
    """Return that this value is of another kind."""
    return refused(f"expected {what}, got {value!r}")


def unlike(value: Value, choices: Iterable[str]) -> Counterpart:
    """Return that this value has no counterpart, and the names of those with one."""
    return refused(f"{value!r} has no counterpart; known are {', '.join(choices)}")


def nothing(reason: str) -> Counterpart:
    """Return that this value needs no counterpart."""
    return Counterpart(kind="dropped", note=reason)


def integer(setting: str, *, least: int = 1) -> Rule:
    """Return the rule of a whole number; below ``least`` it is not written."""

    def rule(value: Value, _: VerlKeys) -> Counterpart:
        if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
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


def choice(names: Mapping[str, object]) -> RuleOf:
    """Return the rules of a value that has another name here."""

    def rule_of(setting: str) -> Rule:
        def rule(value: Value, _: VerlKeys) -> Counterpart:
            name = str(value)
            return Counterpart({setting: names[name]}) if name in names else unlike(value, names)

        return rule

    return rule_of


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

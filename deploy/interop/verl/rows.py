"""Rows of the table, and the counterparts that their rules return. Pure."""

from collections.abc import Callable, Iterable
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
    return len(parts) == len(names) and all(
        part in {"*", name} for part, name in zip(parts, names, strict=True)
    )


@dataclass(frozen=True, slots=True)
class Topic:
    """Rows under one heading of the page, in their order. Keys and settings have spaces between."""

    title: str
    rows: list[KeyRow] = field(default_factory=list)
    places: tuple[str, ...] = ("",)  # beginnings of the keys

    def below(self, *places: str) -> "Topic":
        """Return the same for rows of keys below each of some places."""
        below = (f"{above}{place}." for above in self.places for place in places)
        return replace(self, places=tuple(below))

    def _keys(self, names: str) -> tuple[str, ...]:
        return tuple(f"{place}{name}" for place in self.places for name in names.split())

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
        keys, settings = self._keys(verl), tuple(ours.split())
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
        self.rows.append(KeyRow(self._keys(verl), (), remark, None, "dropped", NOT_SET))

    def written_with(self, key: str, verl: str, ours: str, remark: str = "") -> None:
        """Add a row of keys that another key has written already, if it counts."""
        note = f"written with {key}, if that is on"
        shown = remark or f"written with `{key.rpartition('.')[2]}`"
        self.rule(verl, ours, shown, kind="renamed")(lambda _value, _keys: nothing(note))

    def left_to_write(
        self, verl: str, ours: str, remark: str, note: str, todo: str, *, off: str = "not set"
    ) -> None:
        """Add a row of what the reader writes anew, if it is not ``off``."""
        counterpart = Counterpart({}, "changed", note, todo)
        self.rule(verl, ours, remark, kind="changed")(
            lambda value, _: counterpart if value else nothing(off)
        )


# ---- counterparts --------------------------------------------------------------


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

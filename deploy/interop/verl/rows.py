"""What a row of the table is, and the functions that turn values of verl into ours. Pure."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from typing_extensions import override

from slipstream.deploy.interop.verl.hydra import Value

Kind = Literal["kept", "renamed", "changed", "dropped", "unknown"]
Settings = dict[str, object]  # by the dotted name of each


class Keys(Mapping[str, Value]):
    """The keys of verl that were given; a null is not given."""

    def __init__(self, values: Mapping[str, Value], *, home: str = "", vocab_size: int = 0) -> None:
        self._values = {key: value for key, value in values.items() if value is not None}
        self.home = home  # folder that ~ stands for
        self.vocab_size = vocab_size  # of the model, 0 if it is not here
        self.key = ""  # the one that is translated

    def at(self, key: str) -> "Keys":
        """Return the same for a rule that reads the name of its key."""
        keys = Keys(self._values, home=self.home, vocab_size=self.vocab_size)
        keys.key = key
        return keys

    @override
    def __getitem__(self, key: str) -> Value:
        return self._values[key]

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    @override
    def __len__(self) -> int:
        return len(self._values)

    def first(self, *names: str, default: Value = None) -> Value:
        """Return the value of the first of these keys that was given."""
        return next((self[name] for name in names if name in self), default)

    def number(self, *names: str, default: float = 0) -> float:
        """Return the number of the first of these keys that was given."""
        value = self.first(*names)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else default

    def integer(self, *names: str, default: int = 0) -> int:
        """Return the same as an integer."""
        return int(self.number(*names, default=default))

    def has_true(self, *names: str) -> bool:
        """Return whether any of these is true."""
        return any(self.get(name) is True for name in names)

    def any_below(self, prefix: str) -> bool:
        """Return whether a key begins with this."""
        return any(key.startswith(prefix) for key in self)


@dataclass(frozen=True, slots=True)
class Out:
    """What one key of verl becomes."""

    settings: Settings = field(default_factory=dict)
    kind: Kind | None = None  # other than the row's
    note: str = ""  # why, besides the row's remark
    todo: str = ""  # what is left to the reader


Rule = Callable[[Value, Keys], Out]
NOT_SET: Value = "\0not set"  # of a row without a default


@dataclass(frozen=True, slots=True)
class Row:
    """One or several keys of verl that have one translation."""

    verl: tuple[str, ...]  # dotted; * is any one name, ** any number of them, at the end
    ours: tuple[str, ...] = ()  # settings that it may write; * as above
    remark: str = ""  # what differs, or why there is none
    rule: Rule | None = None  # None has no counterpart
    kind: Kind | None = None  # None: kept or renamed, as the names say
    default: Value = NOT_SET  # verl's, written where the key is not given and ours differs
    also: str = ""  # written in the page beside the settings

    def fits(self, key: str) -> bool:
        """Return whether the row is of this key."""
        return any(fits(pattern, key) for pattern in self.verl)

    @property
    def usual_kind(self) -> Kind:
        """What is reported where nothing special is found."""
        if self.kind is not None:
            return self.kind
        if self.rule is None:
            return "dropped"
        last = {name.rpartition(".")[2] for name in self.ours}
        return "kept" if last == {self.verl[0].rpartition(".")[2]} else "renamed"


def fits(pattern: str, key: str) -> bool:
    """Return whether a key has this form."""
    parts, names = pattern.split("."), key.split(".")
    if parts[-1] == "**":
        parts, names = parts[:-1], names[: len(parts) - 1]
        if len(key.split(".")) <= len(parts):
            return False
    return len(parts) == len(names) and all(
        part in {"*", name} for part, name in zip(parts, names, strict=True)
    )


def refused(why: str) -> Out:
    """Return that this value has no counterpart."""
    return Out(kind="unknown", note=why)


def nothing(why: str) -> Out:
    """Return that this value has none and needs none."""
    return Out(kind="dropped", note=why)


def integer(setting: str, *, least: int = 1, off: int | None = None) -> Rule:
    """Return the rule of a whole number; below ``least`` it is ``off``, or not written."""

    def rule(value: Value, keys: Keys) -> Out:  # noqa: ARG001
        if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
            return refused(f"expected a whole number, got {value!r}")
        if value >= least:
            return Out({setting: int(value)})
        if off is None:
            return nothing(f"{int(value)} is what Slipstream does without the setting")
        return Out({setting: off}, "changed", f"{int(value)} is written {off} here")

    return rule


def number(setting: str) -> Rule:
    """Return the rule of a number."""

    def rule(value: Value, keys: Keys) -> Out:  # noqa: ARG001
        if isinstance(value, bool) or not isinstance(value, int | float):
            return refused(f"expected a number, got {value!r}")
        return Out({setting: float(value)})

    return rule


def switch(setting: str) -> Rule:
    """Return the rule of a true or false."""

    def rule(value: Value, keys: Keys) -> Out:  # noqa: ARG001
        if not isinstance(value, bool):
            return refused(f"expected True or False, got {value!r}")
        return Out({setting: value})

    return rule


def text(setting: str) -> Rule:
    """Return the rule of a text."""

    def rule(value: Value, keys: Keys) -> Out:  # noqa: ARG001
        return Out({setting: str(value)})

    return rule


def path(setting: str) -> Rule:
    """Return the rule of a file or folder."""

    def rule(value: Value, keys: Keys) -> Out:
        return Out({setting: at_home(str(value), keys)})

    return rule


def one_of(setting: str, choices: Mapping[str, object]) -> Rule:
    """Return the rule of a value that has another name here."""

    def rule(value: Value, keys: Keys) -> Out:  # noqa: ARG001
        key = str(value).lower() if isinstance(value, bool) else str(value)
        if key not in choices:
            return refused(f"{value!r} has no counterpart; known are {', '.join(choices)}")
        return Out({setting: choices[key]})

    return rule


def at_home(name: str, keys: Keys) -> str:
    """Return a path without ~."""
    return f"{keys.home}{name[1:]}" if keys.home and name.startswith("~/") else name

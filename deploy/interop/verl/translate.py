"""Keys of verl become settings, with a report on every one of them. Pure."""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain

from slipstream.deploy.interop.verl.consequences import CONSEQUENCES, mode
from slipstream.deploy.interop.verl.hydra import HydraSettings, Value
from slipstream.deploy.interop.verl.keys import VerlKeys
from slipstream.deploy.interop.verl.rows import (
    NOT_SET,
    Counterpart,
    KeyRow,
    Settings,
    TranslatedKey,
)
from slipstream.deploy.interop.verl.table import NAMES, ROWS, row_of
from slipstream.wire.settings.load import SECTIONS


@dataclass(frozen=True, slots=True)
class Translation:
    """Settings as tables, a report on every key, and what is left to do."""

    table: dict[str, object]
    keys: list[TranslatedKey]
    todo: list[str]
    notes: list[str]

    @property
    def failed(self) -> list[TranslatedKey]:
        """Keys without a translation."""
        return [key for key in self.keys if key.kind == "unknown"]


def translate(
    given: HydraSettings, *, home: str = "", vocab_size: int = 0, is_async: bool = False
) -> Translation:
    """Return the settings that do what verl would do.

    Args:
        given: Keys and values of verl.
        home: Folder that ~ means; empty leaves ~.
        vocab_size: Vocabulary of the model, 0 if it is not known.
        is_async: Train while generators generate, on answers that may be stale.
    """
    values = {key: value for key, value in given.values.items() if value is not None}
    keys = VerlKeys(values, home=home, vocab_size=vocab_size)
    settings: Settings = {}
    report: list[TranslatedKey] = []
    todo: list[str] = []
    for key, value in given.values.items():
        if key.rpartition(".")[2] == "_target_":
            continue
        row = row_of(key)
        if row is None:
            shown, remark = None if value == {} else value, f"not known{nearest(key)}"
            report.append(TranslatedKey(key, "unknown", shown, {}, remark))
        elif value is None or value == {}:
            report.append(TranslatedKey(key, "dropped", None, {}, "null: not set"))
        else:
            counterpart = row.counterpart(key, value, keys)
            report.append(_translated(key, value, row, counterpart))
            todo.append(counterpart.todo)
            _merge(settings, counterpart.settings)
    for row in ROWS:
        if row.default is NOT_SET or any(name in keys for name in row.verl):
            continue
        found = row.counterpart(row.verl[0], row.default, keys)
        has_effect = found.settings or found.kind in {"changed", "unknown"}
        if has_effect and not (found.settings and found.settings.keys() <= settings.keys()):
            translated = _translated(row.verl[0], row.default, row, found)
            report.append(replace(translated, kind="changed", is_default=True))
            todo.append(found.todo)
            _merge(settings, found.settings, over=False)
    report += [TranslatedKey(key, "dropped", None, {}, "taken away by ~") for key in given.deleted]
    consequences = (consequence(settings, keys) for consequence in CONSEQUENCES)
    for change in chain(mode(settings, is_async), *consequences):
        report.append(change)
        settings |= change.settings
        for name in [name for name, value in change.settings.items() if value is None]:
            del settings[name]
    left = [line for line in dict.fromkeys(todo) if line]
    return Translation(nested(settings), report, left, list(given.remarks))


def nearest(key: str) -> str:
    """Return the known key that is most like this one, as the end of a sentence."""
    close = difflib.get_close_matches(key, NAMES, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def nested(settings: Mapping[str, object]) -> dict[str, object]:
    """Return settings by dotted names as tables in tables."""
    order = {name: place for place, name in enumerate(SECTIONS)}
    table: dict[str, object] = {}
    for name in sorted(settings, key=lambda name: order[name.partition(".")[0]]):
        *places, last = name.split(".")
        inner = table
        for place in places:
            below = inner.setdefault(place, {})
            inner = below if isinstance(below, dict) else {}
        inner[last] = settings[name]
    return table


def _translated(key: str, value: Value, row: KeyRow, found: Counterpart) -> TranslatedKey:
    kind = found.kind or row.kind
    if not found.settings and kind in {"kept", "renamed"}:
        kind = "dropped"
    return TranslatedKey(key, kind, value, dict(found.settings), found.note or _plain(row.remark))


def _plain(remark: str) -> str:
    """Return Markdown of the page as a terminal shows it: a link is its target."""
    linked = re.sub(r"\[[^]]*\]\(#[^)]*\)", "names in docs/coming_from_verl.md", remark)
    return re.sub(r"\[[^]]*\]\(([^)]*)\)", r"docs/\1", linked).replace("`", "")


def _merge(settings: Settings, others: Settings, *, over: bool = True) -> None:
    """Add settings to others; lists are joined."""
    for name, value in others.items():
        before = settings.get(name)
        if name == "learner.offload" and isinstance(before, list) and isinstance(value, list):
            settings[name] = [*before, *(what for what in value if what not in before)]
        elif over or name not in settings:
            settings[name] = value

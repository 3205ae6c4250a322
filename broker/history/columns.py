"""The history of a run as columns: for the page, the rules, and the run folder."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from typing_extensions import override

from slipstream.broker.advisories.view import Column, Trends
from slipstream.broker.history.table import Numbers, shown
from slipstream.broker.history.trajectories import Letter
from slipstream.wire.files.replace import replace_file
from slipstream.wire.messages.status import RunStatus
from slipstream.wire.unreadable import UNREADABLE

_log = logging.getLogger(__name__)


class TimeColumns(msgspec.Struct, frozen=True, kw_only=True):
    """One row per interval."""

    every_s: float
    at_s: Sequence[float]  # since the run started
    series: Mapping[str, Column]


class StepColumns(msgspec.Struct, frozen=True, kw_only=True):
    """One row per learner step, or per some of them."""

    step: Sequence[float]  # the newest of each row
    every_steps: int = 1  # learner steps that a row covers
    at_s: Sequence[float]
    series: Mapping[str, Column]


class HistoryColumns(msgspec.Struct, frozen=True, kw_only=True):
    """All that is kept, as the page gets it and as it is written.

    Columns may be lists, or arrays with NaN where a row has no value: ``encode_json`` and
    ``write_state`` take both.
    """

    began_s: float  # unix time
    shared_cores: int = 0  # CPU cores of all processes; 0: GPUs, several hosts, or unknown
    time: TimeColumns
    steps: StepColumns


class StoredState(msgspec.Struct, frozen=True, kw_only=True):
    """State in a run folder for viewers of a finished run."""

    revision: Annotated[int, msgspec.Meta(ge=2, le=2)] = 2
    at_s: float  # unix time
    status: RunStatus
    history: HistoryColumns
    letters: list[Letter] = []


class KnownColumns(Mapping[str, Column]):
    """Columns with None where a row has no value; each is converted when it is read first."""

    def __init__(self, columns: Mapping[str, Column]) -> None:
        self._columns = dict(columns)

    @override
    def __getitem__(self, name: str) -> Column:
        column: object = self._columns[name]
        if isinstance(column, np.ndarray):
            self._columns[name] = shown(column)
        return self._columns[name]

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    @override
    def __len__(self) -> int:
        return len(self._columns)


def trends_of(columns: HistoryColumns, *, high_water_bytes: int, fsync: str) -> Trends:
    """Return the history as rules about a run read it, without a copy."""
    return Trends(
        at_s=columns.time.at_s,
        series=KnownColumns(columns.time.series),
        steps_at_s=columns.steps.at_s,
        steps=KnownColumns(columns.steps.series),
        every_steps=columns.steps.every_steps,
        high_water_bytes=high_water_bytes,
        fsync=fsync,
        shared_cores=columns.shared_cores,
    )


def encode_json(value: object) -> bytes:
    """Return JSON of anything that holds columns; column by column, so that others get a turn."""
    return msgspec.json.encode(value, enc_hook=lambda value: _column_of(value).tolist())


def write_state(path: Path, state: StoredState) -> None:
    """Write a state, at once or not at all."""
    data = msgspec.msgpack.encode(state, enc_hook=lambda value: shown(_column_of(value)))
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, data, durable=False)


def read_state(path: Path) -> StoredState | None:
    """Return the state in a file, or None if it cannot be read."""
    try:
        return _decode(path)
    except (OSError, *UNREADABLE):
        return None


def claim_state(path: Path) -> StoredState | None:
    """Return the state of an earlier broker, if it can be read.

    Another one is put aside: it is about to be written over.
    """
    try:
        return _decode(path)
    except FileNotFoundError:
        return None
    except (OSError, *UNREADABLE) as error:
        aside = path.with_name(f"{path.name}.unreadable")
        _log.warning(
            "the page starts without the history of the run: %s cannot be read (%s), kept as %s",
            path,
            error,
            aside.name,
        )
        with suppress(OSError):
            path.replace(aside)
        return None


def _decode(path: Path) -> StoredState:
    return msgspec.msgpack.decode(path.read_bytes(), type=StoredState)


def _column_of(value: object) -> Numbers:
    if not isinstance(value, np.ndarray):
        raise NotImplementedError(f"cannot encode {type(value).__name__}")
    return value

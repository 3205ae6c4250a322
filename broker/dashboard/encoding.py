"""The page's data as JSON: the whole state, and an event per snapshot."""

import asyncio
from collections.abc import Sequence
from typing import Protocol

import msgspec
from aiohttp import web

from slipstream.broker.advisories.view import Advisory
from slipstream.broker.dashboard.recorder import Snapshot, shown_status
from slipstream.broker.history.columns import HistoryColumns, encode_json
from slipstream.broker.history.table import Row
from slipstream.broker.history.trajectories import Letter
from slipstream.wire.messages.status import RunStatus

_KEPT_S = 1.0  # an encoded state, for further requests of the same
_FEW_ROWS = 20  # are encoded at once
_EVENT_PUBLISHES = 3
_EVENT_EVALUATIONS = 2


class RunSource(Protocol):
    """The run behind the page: a running one, or the files of a finished one."""

    @property
    def snapshot(self) -> Snapshot | None:
        """Newest snapshot; None before the first."""

    def columns(self) -> HistoryColumns:
        """Return the history of the run; called from a thread."""

    def steps_after(self, step: float) -> Sequence[Row]:
        """Return the rows of learner steps after this one."""

    def letters(self) -> list[Letter]:
        """Return the newest dead letters."""

    async def next_change(self) -> None:
        """Return when there is something new, or after a while."""


class _State(msgspec.Struct):
    """The answer to /state.json."""

    status: RunStatus
    advisories: list[Advisory]
    advice_ready: bool
    live: bool
    history: HistoryColumns


class _Event(msgspec.Struct):
    """Event sent every second to all viewers; ``steps`` are added for each."""

    status: RunStatus
    advisories: list[Advisory]
    advice_ready: bool
    live: bool
    point: Row


class StateEncoder:
    """Encodes /state.json in a thread, once per snapshot for any number of requests."""

    def __init__(self, source: RunSource) -> None:
        self._source = source
        self._encoding = asyncio.Lock()
        self._kept: tuple[Snapshot, bytes] | None = None
        self._forgets: asyncio.TimerHandle | None = None

    async def encoded(self) -> bytes:
        """Return the newest state as JSON."""
        async with self._encoding:
            snapshot = self._source.snapshot
            if snapshot is None:
                raise web.HTTPServiceUnavailable
            if self._kept is not None and self._kept[0] is snapshot:
                return self._kept[1]
            self._kept = None
            columns = self._source.columns()
            body = await asyncio.to_thread(_encode_state, snapshot, columns)
            self._kept = (snapshot, body)
            if self._forgets is not None:
                self._forgets.cancel()
            self._forgets = asyncio.get_running_loop().call_later(_KEPT_S, self._forget)
            return body

    def _forget(self) -> None:
        self._kept = None


class EventEncoder:
    """Encodes events: the common part once per snapshot, and the steps each viewer lacks."""

    def __init__(self) -> None:
        self._snapshot: Snapshot | None = None
        self._common = b""
        self._whole: dict[float, bytes] = {}  # events by the newest step of a viewer

    async def encoded(self, snapshot: Snapshot, step: float, source: RunSource) -> bytes:
        """Return the event of a snapshot for a viewer with the learner steps up to one."""
        if snapshot is not self._snapshot:
            status = shown_status(
                snapshot.status, publishes=_EVENT_PUBLISHES, evaluations=_EVENT_EVALUATIONS, steps=0
            )
            event = _Event(
                status, snapshot.advisories, snapshot.advice_ready, snapshot.live, snapshot.point
            )
            self._snapshot, self._common, self._whole = snapshot, msgspec.json.encode(event), {}
        if (known := self._whole.get(step)) is not None:
            return known
        common, whole = self._common, self._whole
        rows = source.steps_after(step)
        if len(rows) <= _FEW_ROWS:
            whole[step] = _joined(common, msgspec.json.encode(list(rows)))
            return whole[step]
        return _joined(common, await asyncio.to_thread(_encode_rows, rows))


def _joined(common: bytes, steps: bytes) -> bytes:
    return b"".join((b"data: ", common[:-1], b',"steps":', steps, b"}\n\n"))


def _encode_rows(rows: Sequence[Row]) -> bytes:
    """Return rows as JSON; row by row, so that others get a turn."""
    return b"[" + b",".join(msgspec.json.encode(row) for row in rows) + b"]"


def _encode_state(snapshot: Snapshot, columns: HistoryColumns) -> bytes:
    status = shown_status(snapshot.status, steps=0)
    return encode_json(
        _State(status, snapshot.advisories, snapshot.advice_ready, snapshot.live, columns)
    )

"""`metrics.jsonl`: the figures of a run as one JSON object per line, for scripts and comparisons.

A learner step has one line: ``step``, ``wall_s`` (seconds that a broker of the run has lived),
``trained_tokens`` (policy tokens trained so far) and every figure that trackers get. An evaluation
has a line of its own, with names that begin with ``eval/``. No step and no evaluation has two.
"""

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

import msgspec

from slipstream.wire.files.replace import replacing_file
from slipstream.wire.unreadable import UNREADABLE

_log = logging.getLogger(__name__)
_MAX_WAITING = 10_000
_CLOSE_S = 10.0  # less than deploy.stop_timeout_s
_KEPT_TOKENS = 1_000  # learner steps back to which an evaluation's tokens are known
_EVAL = b'"eval/'


class _Place(msgspec.Struct, frozen=True):
    """The part of a line that says where it belongs."""

    step: int
    wall_s: float | None = None
    trained_tokens: int | None = None


class _Cut(msgspec.Struct, frozen=True):
    """An order to the writing thread: forget what lies after a step."""

    step: int
    evaluated: frozenset[int]


_Order: TypeAlias = bytes | _Cut | None
_decoder = msgspec.json.Decoder(_Place)


class MetricsFile:
    """Appends lines, synced, on a thread of its own: a slow disk costs a commit nothing."""

    def __init__(
        self,
        path: Path,
        *,
        step: int,
        evaluated: Collection[int],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Continue the file of a run.

        Lines of learner steps after ``step`` are of an abandoned life and go, as do those of
        evaluations that are not in ``evaluated``.
        """
        self._path = path
        self._now = now
        newest = cut_metrics(path, step, evaluated)
        self._began_s = now() - (newest.wall_s or 0.0)
        self.newest_step = newest.step  # newest step with a line, or 0
        self._tokens = {
            0: 0,
            newest.step: newest.trained_tokens,
        }  # tokens by step, newest steps only
        self.num_lost = 0  # lines that could not be written
        self._orders: queue.Queue[_Order] = queue.Queue(_MAX_WAITING)
        self._thread = threading.Thread(target=self._run, name="metrics file", daemon=True)
        self._thread.start()

    def step(self, step: int, trained_tokens: int | None, figures: Mapping[str, float]) -> None:
        """Queue the line of a learner step; returns at once."""
        self.newest_step = step
        self._tokens[step] = trained_tokens
        if len(self._tokens) > _KEPT_TOKENS:
            del self._tokens[next(iter(self._tokens))]
        self._put(step, figures)

    def evaluation(self, step: int, figures: Mapping[str, float]) -> None:
        """Queue the line of an evaluation of the policy after ``step`` learner steps."""
        self._put(step, figures)

    def went_back(self, step: int, evaluated: Collection[int]) -> None:
        """Forget later steps, which are repeated, and evaluations that are."""
        self.newest_step = min(self.newest_step, step)
        self._order(_Cut(step, frozenset(evaluated)))

    def close(self) -> None:
        """Write what waits, for at most ten seconds."""
        deadline = time.monotonic() + _CLOSE_S
        with suppress(queue.Full):
            self._orders.put(None, timeout=_CLOSE_S)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            _log.warning("%s: its last lines are not on disk after %.0f s", self._path, _CLOSE_S)

    def _put(self, step: int, figures: Mapping[str, float]) -> None:
        place = {
            "step": step,
            "wall_s": round(self._now() - self._began_s, 3),
            "trained_tokens": self._tokens.get(step),
        }
        rest = {name: value for name, value in figures.items() if name not in place}
        self._order(msgspec.json.encode(place | rest) + b"\n")

    def _order(self, order: _Order) -> None:
        try:
            self._orders.put_nowait(order)
        except queue.Full:
            self._lose(1, f"{_MAX_WAITING} lines wait")

    def _run(self) -> None:
        ended = False
        while not ended:
            orders = [self._orders.get()]
            while not self._orders.empty():  # all that wait share a sync
                orders.append(self._orders.get())
            ended = None in orders
            try:
                self._obey(orders)
            except OSError as error:
                self._lose(len(orders) - ended, error.strerror or str(error))

    def _obey(self, orders: list[_Order]) -> None:
        lines: list[bytes] = []
        for order in orders:
            if isinstance(order, _Cut):
                self._append(lines)
                lines = []
                cut_metrics(self._path, order.step, order.evaluated)
            elif order is not None:
                lines.append(order)
        self._append(lines)

    def _append(self, lines: list[bytes]) -> None:
        if not lines:
            return
        with self._path.open("ab") as file:
            file.write(b"".join(lines))
            file.flush()
            os.fsync(file.fileno())

    def _lose(self, count: int, why: str) -> None:
        before = self.num_lost
        self.num_lost += count
        if before.bit_length() != self.num_lost.bit_length():  # at 1, 2, 4, 8, ...
            _log.warning("%s: %d lines not written: %s", self._path, self.num_lost, why)


def cut_metrics(path: Path, step: int, evaluated: Collection[int]) -> _Place:
    """Remove lines of steps after ``step`` and of other evaluations, in one rename.

    A line that a killed writer left half written goes with them.

    Returns:
        the newest learner step that is left, with the largest time that any line holds.
    """
    newest, wall_s = _Place(step=0, trained_tokens=0), 0.0
    if not path.is_file():
        return newest
    with path.open("rb") as rows, replacing_file(path) as kept:
        for row in rows:
            place = _place_of(row)
            is_eval = _EVAL in row
            if place is None or not (place.step in evaluated if is_eval else place.step <= step):
                continue
            kept.write(row)
            wall_s = max(wall_s, place.wall_s or 0.0)
            if not is_eval and place.step > newest.step:
                newest = place
    return msgspec.structs.replace(newest, wall_s=wall_s)


def steps_in(path: Path) -> tuple[int, set[int]]:
    """Return the newest learner step that has a line, -1 if none has, and those evaluated."""
    newest, evaluated = -1, set[int]()
    for row in path.read_bytes().splitlines(keepends=True) if path.is_file() else ():
        place = _place_of(row)
        if place is not None and _EVAL in row:
            evaluated.add(place.step)
        elif place is not None:
            newest = max(newest, place.step)
    return newest, evaluated


def _place_of(row: bytes) -> _Place | None:
    """Return where a line belongs; None if it is not whole."""
    try:
        return _decoder.decode(row) if row.endswith(b"\n") else None
    except UNREADABLE:
        return None

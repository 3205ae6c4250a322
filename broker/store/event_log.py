"""Log of all items' events in the run folder, read by `slipstream ledger trace`, and their number.

Segments of length-prefixed records (number of the event, unix time, event), written when the store
has them. The oldest segment goes when all are too large. A broker that starts again knows from the
numbers which of the stored events its predecessor did not write any more.
"""

import errno
import logging
import os
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

from typing_extensions import override

from slipstream.wire.errors import ConfigError
from slipstream.wire.files.replace import replace_file

_log = logging.getLogger(__name__)
_HEAD = struct.Struct("<IQd")  # length of the event, its number, unix time
_SEGMENTS = 8
_SYNC_EVERY_S = 1.0
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class Trail:
    """This one keeps nothing."""

    next_event = 0  # the number that follows those of all events so far

    def note(self, first: int, at_s: float, events: Sequence[bytes]) -> None:
        """Note events that are durable; ``first`` is the number of the first of them."""

    def write(self) -> None:
        """Write the noted events."""

    def append(self, first: int, at_s: float, events: Sequence[bytes]) -> None:
        """Note events and write them."""
        self.note(first, at_s, events)
        self.write()

    def cut_from(self, number: int) -> None:
        """Forget events from a number on: the store lost them, others will have the numbers."""

    def close(self) -> None:
        """Close the file."""


class CountedTrail(Trail):
    """Counts the events in a file of its own, also where nothing else is kept of them.

    By that number a broker that starts knows whether its store still has them all.
    """

    def __init__(
        self, path: Path, trail: Trail, *, sync: Callable[[int], None] = os.fdatasync
    ) -> None:
        """Continue to count, and hand events to ``trail``.

        ``sync`` puts a file on disk, on a thread of its own, about once a second.

        Raises:
            ConfigError: the file holds no number, or cannot be read or written.
        """
        self._path = path
        self._trail = trail
        try:
            counted = path.read_bytes() if path.exists() else b"0"
            self.next_event = max(int(counted), trail.next_event)
            if len(counted) != len(_digits(0)):
                replace_file(path, _digits(self.next_event))
            self._file = path.open("r+b", buffering=0)
        except ValueError as error:
            raise ConfigError(f"{path} holds no number: put it back, or remove it") from error
        except OSError as error:
            way_out = "; make room in run.dir" if error.errno in _NO_ROOM else ""
            raise ConfigError(f"cannot write {path}: {error.strerror or error}{way_out}") from error
        self._sync = sync
        self._has_ended = threading.Event()
        self._syncing = ThreadPoolExecutor(1, "num_events")
        self._synced: Future[None] | None = None

    @override
    def note(self, first: int, at_s: float, events: Sequence[bytes]) -> None:
        """Count events that are durable; ``first`` is the number of the first of them."""
        self.next_event = max(self.next_event, first + len(events))
        self._trail.note(first, at_s, events)

    @override
    def write(self) -> None:
        """Write the number in place, which needs no room on the disk, and the noted events."""
        try:
            os.pwrite(self._file.fileno(), _digits(self.next_event), 0)
        except OSError as error:
            _log.warning("%s is not up to date: %s", self._path, error)
        if self._synced is None or self._synced.running() or self._synced.done():
            self._synced = self._syncing.submit(self._put_on_disk)  # else it is yet to begin
        self._trail.write()

    @override
    def cut_from(self, number: int) -> None:
        """Forget events from a number on: the store lost them, others will have the numbers."""
        self.next_event = number
        self._trail.cut_from(number)

    @override
    def close(self) -> None:
        """Write the noted events and close the files."""
        self.write()
        self._has_ended.set()
        self._syncing.shutdown()
        self._file.close()
        self._trail.close()

    def _put_on_disk(self) -> None:
        try:
            self._sync(self._file.fileno())
        except OSError as error:
            _log.warning("%s may not be on disk: %s", self._path, error)
        self._has_ended.wait(_SYNC_EVERY_S)


def _digits(number: int) -> bytes:
    """Return a number as text of one length, so that each takes the place of the one before."""
    return b"%020d\n" % number


class FolderTrail(Trail):
    """Writes segments into a folder, at most ``max_bytes`` in all."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._segment_bytes = max(max_bytes // _SEGMENTS, 1)
        folder.mkdir(parents=True, exist_ok=True)
        newest = segments_in(folder)[-1:]
        records = list(read_segments(newest))
        self.next_event = max((number for number, _, _ in records), default=-1) + 1
        self._file: BinaryIO | None = None
        self._size = sum(_HEAD.size + len(data) for _, _, data in records)
        if newest and self._size < self._segment_bytes:
            self._file = newest[0].open("r+b")
            self._file.truncate(self._size)  # a record that was cut off, or zeros
            self._file.seek(self._size)
        self._noted: list[bytes] = []

    @override
    def cut_from(self, number: int) -> None:
        """Forget events from a number on: the store lost them, others will have the numbers."""
        self._let_go()
        for segment in reversed(segments_in(self._folder)):
            kept = [record for record in read_segments([segment]) if record[0] < number]
            if kept:
                with segment.open("r+b") as file:
                    file.truncate(sum(_HEAD.size + len(data) for _, _, data in kept))
                break
            segment.unlink()
        self.next_event = number

    @override
    def note(self, first: int, at_s: float, events: Sequence[bytes]) -> None:
        """Keep the events that are not there yet until they are written."""
        for number, data in enumerate(events, first):
            if number >= self.next_event:
                self._noted += (_HEAD.pack(len(data), number, at_s), data)
                self.next_event = number + 1

    @override
    def write(self) -> None:
        """Write the noted events; a full disk costs the trail alone."""
        if not self._noted:
            return
        records = b"".join(self._noted)
        first = self.next_event - len(self._noted) // 2
        self._noted.clear()
        try:
            if self._file is None or self._size >= self._segment_bytes:
                self._let_go()
                segments = segments_in(self._folder)
                while len(segments) >= _SEGMENTS:
                    segments.pop(0).unlink()
                number = int(segments[-1].stem) + 1 if segments else 0
                self._file = (self._folder / f"{number:06d}.events").open("ab")
                self._size = 0
            self._file.write(records)
            self._file.flush()
        except OSError as error:
            _log.warning(
                "events %d to %d are not in %s: %s", first, self.next_event, self._folder, error
            )
            return
        self._size += len(records)

    @override
    def close(self) -> None:
        """Write the noted events and close the file."""
        self.write()
        self._let_go()

    def _let_go(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def segments_in(folder: Path) -> list[Path]:
    """Return the segments of a trail, the oldest first."""
    return sorted(folder.glob("*.events"))


def read_trail(folder: Path) -> Iterator[tuple[int, float, bytes]]:
    """Yield (number, unix time, event); a record that was cut off, or zeros, end its segment."""
    yield from read_segments(segments_in(folder))


def read_segments(segments: Sequence[Path]) -> Iterator[tuple[int, float, bytes]]:
    """Yield (number, unix time, event) of some segments; a deleted one has none."""
    for segment in segments:
        try:
            data = segment.read_bytes()
        except FileNotFoundError:
            continue
        start = 0
        while start + _HEAD.size <= len(data):
            length, number, at_s = _HEAD.unpack_from(data, start)
            start += _HEAD.size
            if not length or start + length > len(data):
                break
            yield number, at_s, data[start : start + length]
            start += length

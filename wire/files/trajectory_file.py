"""Trajectory files: groups with their arrays and texts, as a run recorded them.

A file is the line ``SLIPSTREAM-TRAJECTORIES 1`` and then records: the length of the rest
(8 bytes, little-endian) and a RecordedGroup as msgpack. Records are only ever appended, so
a killed process's file is readable up to its last whole record.
"""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from slipstream.wire.errors import ConfigError
from slipstream.wire.messages.broker import DeliveredGroup
from slipstream.wire.unreadable import UNREADABLE

_log = logging.getLogger(__name__)
HEADER = b"SLIPSTREAM-TRAJECTORIES 1\n"
_LENGTH_BYTES = 8
NOT_TRAINED = -1
DEMONSTRATED = -2  # trained once per epoch, as a demonstration
T = TypeVar("T")


class RecordedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """One group; ``payloads`` and ``transcripts`` are in the order of its trajectories."""

    step: int  # learner step that trained it, or NOT_TRAINED or DEMONSTRATED
    group: DeliveredGroup
    payloads: tuple[bytes, ...]  # encoded TrajectoryPayload
    transcripts: tuple[bytes, ...]  # encoded Transcript

    def __post_init__(self) -> None:
        want = len(self.group.trajectories)
        if len(self.payloads) != want or len(self.transcripts) != want:
            raise ValueError(
                f"group {self.group.group_id} has {want} trajectories, "
                f"{len(self.payloads)} payloads and {len(self.transcripts)} transcripts"
            )


class _StepOfGroup(msgspec.Struct, frozen=True):
    """The step of a record, without decoding the rest."""

    step: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(RecordedGroup)
_step_decoder = msgspec.msgpack.Decoder(_StepOfGroup)


class TrajectoryFileWriter:
    """Appends groups to a new or existing trajectory file, up to a size."""

    def __init__(self, path: Path, max_bytes: int = 0) -> None:
        """Open the file; ``max_bytes`` = 0 is no limit.

        Raises:
            ConfigError: the file exists and is no trajectory file, or cannot be written.
        """
        self._max_bytes = max_bytes
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Not buffered: a step is one write, and one that fails leaves nothing behind.
            self._file = FileIO(path, "r+" if path.exists() else "x+")
        except OSError as error:
            raise ConfigError(f"cannot write trajectories to {path}: {error.strerror}") from error
        try:
            self._size = self._end_of_records(path)
        except BaseException:
            self._file.close()
            raise

    def _end_of_records(self, path: Path) -> int:
        """Return the offset of the next record, after removing an unfinished one."""
        if self._file.seek(0, os.SEEK_END) == 0:
            self._file.write(HEADER)
            return len(HEADER)
        end = len(HEADER)
        for start, length in _records(self._file, path):
            end = start + length
        self._file.truncate(end)
        self._file.seek(end)
        return end

    def append(self, groups: Sequence[RecordedGroup]) -> bool:
        """Write the groups of one step, all or none; False when they do not fit into the limit.

        Raises:
            OSError: they could not be written; the file is as it was.
        """
        records = [_encoder.encode(group) for group in groups]
        data = b"".join(
            part
            for record in records
            for part in (len(record).to_bytes(_LENGTH_BYTES, "little"), record)
        )
        if 0 < self._max_bytes < self._size + len(data):
            return False
        try:
            _write_all(self._file, data)
        except OSError:
            with suppress(OSError):
                self._file.truncate(self._size)
                self._file.seek(self._size)
            raise
        self._size += len(data)
        return True

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def cut_from_step(path: Path, step: int) -> None:
    """Remove the groups that this learner step or a later one trained; no file is fine.

    A run that resumes from a checkpoint trains these steps again.
    """
    if not path.exists():
        return
    with path.open("r+b") as file:
        for start, length in _records(file, path):
            file.seek(start)
            if _step_decoder.decode(file.read(length)).step >= step:
                file.truncate(start - _LENGTH_BYTES)
                return


def read_groups(path: Path) -> Iterator[RecordedGroup]:
    """Yield the groups of a file in order; a cut-off last record is logged and left out.

    Raises:
        ConfigError: the file cannot be read, is no trajectory file, or has a damaged record.
    """
    yield from _read(path, _decoder)


def _read(path: Path, decoder: msgspec.msgpack.Decoder[T]) -> Iterator[T]:
    with _opened(path) as file:
        for number, record in enumerate(_records(file, path)):
            yield _decoded(file, record, number, path, decoder)


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise ConfigError(f"cannot read trajectories from {path}: {error.strerror}") from error


def _decoded(
    file: BinaryIO,
    record: tuple[int, int],
    number: int,
    path: Path,
    decoder: msgspec.msgpack.Decoder[T],
) -> T:
    start, length = record
    file.seek(start)
    try:
        return decoder.decode(file.read(length))
    except UNREADABLE as error:
        raise ConfigError(f"record {number} of {path} is damaged: {error}") from error


class NumberedGroups:
    """The groups of a file by their number, read when they are asked for."""

    def __init__(self, path: Path) -> None:
        """Find the records.

        Raises:
            ConfigError: as ``read_groups``.
        """
        self._path = path
        with _opened(path) as file:
            self._records = list(_records(file, path))

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, number: int) -> RecordedGroup:
        with _opened(self._path) as file:
            return _decoded(file, self._records[number], number, self._path, _decoder)


def read_steps(path: Path) -> Iterator[int]:
    """Yield the step of every group of a file in order, without decoding anything else.

    Raises:
        ConfigError: as ``read_groups``.
    """
    yield from (group.step for group in _read(path, _step_decoder))


def _write_all(file: FileIO, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def _records(file: BinaryIO | FileIO, path: Path) -> Iterator[tuple[int, int]]:
    """Yield (offset, length) of every whole record."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    header = file.read(len(HEADER))
    if header != HEADER:
        expected = HEADER.decode().strip()
        raise ConfigError(f"{path} is no trajectory file: it does not start with {expected!r}")
    start = len(HEADER)
    while start < size:
        file.seek(start)
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        start += _LENGTH_BYTES
        if start + length > size:
            _log.warning("the last record of %s is cut off and left out", path)
            return
        yield start, length
        start += length

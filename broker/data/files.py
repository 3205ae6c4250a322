"""Rows of JSONL and parquet files, one at a time."""

import codecs
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from slipstream.wire.errors import ConfigError
from slipstream.wire.unreadable import UNREADABLE

_BATCH_ROWS = 1024
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


@dataclass(frozen=True, slots=True)
class RawRow:
    """A row as its file holds it, or why it cannot be read."""

    number: int  # from 0; of a JSONL file, its line
    values: Mapping[str, Any] | None
    problem: str = ""


def read_rows(path: Path, setting: str) -> Iterator[RawRow]:
    """Yield the rows of a file.

    Raises:
        ConfigError: it cannot be read, or is of no kind that we know.
    """
    match path.suffix.lower():
        case ".jsonl" | ".ndjson":
            return _jsonl_rows(path, setting)
        case ".parquet":
            return _parquet_rows(path, setting)
        case suffix:
            raise ConfigError(
                f"{setting} = {path}: files of prompts end in .jsonl or .parquet, got {suffix!r}"
            )


def row_name(path: Path, number: int) -> str:
    """Return the name of a row in messages."""
    line = f" (line {number + 1})" if path.suffix.lower() != ".parquet" else ""
    return f"row {number}{line} of {path}"


def _jsonl_rows(path: Path, setting: str) -> Iterator[RawRow]:
    try:
        file = path.open("rb")
    except OSError as error:
        raise _unreadable(path, setting, error) from error
    with file:
        try:
            for number, line in enumerate(file):
                if not number:
                    line = _without_mark(line, path, setting)
                if not line.strip():
                    continue
                try:
                    values = msgspec.json.decode(line)
                except UNREADABLE as error:
                    yield RawRow(number, None, str(error))
                    continue
                if isinstance(values, dict):
                    yield RawRow(number, values)
                else:
                    yield RawRow(number, None, "not a JSON object")
        except OSError as error:
            raise _unreadable(path, setting, error) from error


def _without_mark(line: bytes, path: Path, setting: str) -> bytes:
    """Return the first line of a file without the byte order mark that some programs write."""
    if line.startswith(_UTF16):
        raise ConfigError(
            f"{setting} = {path} is UTF-16, expected UTF-8: "
            f"iconv -f UTF-16 -t UTF-8 {path} > NEW.jsonl"
        )
    return line.removeprefix(codecs.BOM_UTF8)


def _parquet_rows(path: Path, setting: str) -> Iterator[RawRow]:
    try:
        import pyarrow as arrow  # only where a parquet file is read
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError(
            f"{setting} = {path}: reading parquet needs pyarrow; pip install 'slipstream[data]'"
        ) from error
    try:
        with parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=_BATCH_ROWS):
                for values in batch.to_pylist():
                    yield RawRow(number, values)
                    number += 1
    except OSError as error:  # arrow's own are of this kind too, without a strerror
        raise _unreadable(path, setting, error) from error
    except arrow.ArrowException as error:
        raise ConfigError(f"{setting} = {path} is not valid parquet: {error}") from error


def _unreadable(path: Path, setting: str, error: OSError) -> ConfigError:
    return ConfigError(f"cannot read {setting} = {path}: {error.strerror or error}")

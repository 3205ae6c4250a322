"""Rows of JSONL and parquet files, one at a time."""

import codecs
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from slipstream.wire.errors import ConfigError
from slipstream.wire.unreadable import UNREADABLE

if TYPE_CHECKING:
    import pyarrow as arrow

_BATCH_ROWS = 1024
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_NO_VALUE = (ValueError, OverflowError, KeyError)  # KeyError: of an unknown time zone
_HEAD_BYTES = 1024
_REMEDIES = {  # keyed by the first bytes of a file, or of a line that is no row
    rb"version https://git-lfs": "it is a pointer of Git LFS: git lfs pull, or hf download",
    rb"\x1f\x8b": "it is compressed: gunzip it",
    rb"\s*<": "a web page? The URL of a file on the hub has /resolve/, not /blob/",
    rb"\s*\[": "one array? jq -c '.[]' FILE > NEW.jsonl makes rows of it",
    rb"\s*\{[ \t\r]*\n": "rows over several lines? jq -c . FILE > NEW.jsonl puts each on one",
}


@dataclass(frozen=True, slots=True)
class RawRow:
    """A row as its file holds it, or why it cannot be read."""

    number: int  # from 0; of a JSONL file, its line
    values: Mapping[str, Any] | None
    problem: str = ""


def read_rows(path: Path, setting: str, columns: Collection[str]) -> Iterator[RawRow]:
    """Yield the rows of a file.

    Args:
        path: file of prompts.
        setting: name of the setting with the path, for messages.
        columns: names of the columns read from a parquet file; other columns have the value None.

    Raises:
        ConfigError: it cannot be read, or is of no kind that we know.
    """
    match path.suffix.lower():
        case ".jsonl" | ".ndjson":
            return _jsonl_rows(path, setting)
        case ".parquet":
            return _parquet_rows(path, setting, columns)
        case suffix:
            raise ConfigError(
                f"{setting} = {path}: files of prompts end in .jsonl or .parquet, got {suffix!r}"
                + _remedy(_head(path))
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
                    yield RawRow(number, None, f"{error}{_remedy(line)}")
                    continue
                if isinstance(values, dict):
                    yield RawRow(number, values)
                else:
                    yield RawRow(number, None, f"not a JSON object{_remedy(line)}")
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


def _parquet_rows(path: Path, setting: str, columns: Collection[str]) -> Iterator[RawRow]:
    try:
        import pyarrow as arrow  # only where a parquet file is read
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError(
            f"{setting} = {path}: reading parquet needs pyarrow; pip install 'slipstream[data]'"
        ) from error
    try:
        with parquet.ParquetFile(path) as file:
            number, names = 0, dict.fromkeys(file.schema_arrow.names)
            read = [name for name in names if name in columns]
            for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=read):
                for values, problem in _batch_rows(batch):
                    yield RawRow(number, None if problem else names | values, problem)
                    number += 1
    except OSError as error:  # arrow's own are of this kind too, without a strerror
        raise _unreadable(path, setting, error) from error
    except arrow.ArrowException as error:
        remedy = _remedy(_head(path))
        raise ConfigError(f"{setting} = {path} is not valid parquet: {error}{remedy}") from error


def _batch_rows(batch: "arrow.RecordBatch") -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the values of each row, and the reason if Python cannot hold one of them."""
    try:
        yield from ((values, "") for values in batch.to_pylist())
    except _NO_VALUE:
        for place in range(batch.num_rows):
            values, problem = {}, ""
            for name, column in zip(batch.schema.names, batch.columns, strict=True):
                try:
                    values[name] = column[place].as_py()
                except _NO_VALUE as error:
                    problem = f"{name}: {error}"
            yield values, problem


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_HEAD_BYTES)
    except OSError:
        return b""


def _remedy(head: bytes) -> str:
    """Return the way from what begins so to rows; empty if none is known."""
    return next((f"; {way}" for start, way in _REMEDIES.items() if re.match(start, head)), "")


def _unreadable(path: Path, setting: str, error: OSError) -> ConfigError:
    return ConfigError(f"cannot read {setting} = {path}: {error.strerror or error}")

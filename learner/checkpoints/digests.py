"""Digests of a checkpoint's files, so that damage is noticed before use.

``digests.json`` has the xxh3 (128 bits) of every file except the ones replaced later:
checkpoint.json, which is checked by reading it, and the broker's ledger, which holds its own.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import xxhash

from slipstream.wire.errors import ConfigError
from slipstream.wire.files.checkpoints import (
    INFO_FILE,
    LEDGER_FILE,
    read_checkpoint_info,
    read_ledger,
)
from slipstream.wire.files.replace import is_unfinished
from slipstream.wire.unreadable import UNREADABLE

DIGESTS_FILE = "digests.json"
_LATER = {INFO_FILE, LEDGER_FILE, DIGESTS_FILE}
_CHUNK_BYTES = 1 << 22
_THREADS = min(8, os.cpu_count() or 1)


def write_digests(folder: Path, progress: Callable[[], None] = lambda: None) -> None:
    """Write the digests of a checkpoint whose files are complete.

    ``progress`` is called from time to time, from several threads.
    """
    files = sorted(path for path in folder.iterdir() if path.name not in _LATER)
    with ThreadPoolExecutor(_THREADS) as pool:
        digests = dict(
            zip(
                (path.name for path in files),
                pool.map(lambda path: _digest(path, progress), files),
                strict=True,
            )
        )
    (folder / DIGESTS_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(digests)))


def damage_of(folder: Path) -> str:
    """Describe the damage to the files of a checkpoint; empty if they are whole.

    A checkpoint without digests, from before they were written, counts as whole.

    Raises:
        ConfigError: the folder is no checkpoint.
    """
    path = folder / DIGESTS_FILE
    try:
        digests = msgspec.json.decode(path.read_bytes(), type=dict[str, str])
    except FileNotFoundError:
        return f"no {DIGESTS_FILE}" if read_checkpoint_info(folder).has_digests else ""
    except (OSError, *UNREADABLE) as error:
        return f"{DIGESTS_FILE} cannot be read: {error}"
    names = {path.name for path in folder.iterdir() if not is_unfinished(path.name)}
    if unlisted := sorted(names - {*digests, *_LATER}):
        return f"{unlisted[0]} is not in {DIGESTS_FILE}"
    with ThreadPoolExecutor(_THREADS) as pool:
        found = pool.map(lambda name: _damage_of_file(folder / name, digests[name]), digests)
        damage = next(filter(None, found), "")
    if damage:
        return damage
    try:
        read_ledger(folder)
    except ConfigError as error:
        return str(error)
    return ""


def _damage_of_file(path: Path, expected: str) -> str:
    try:
        return "" if _digest(path) == expected else f"{path.name} is not as it was written"
    except OSError as error:
        return f"{path.name}: {error.strerror}"


def _digest(path: Path, progress: Callable[[], None] = lambda: None) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            progress()
    return digest.hexdigest()

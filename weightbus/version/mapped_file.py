"""A version in the learner's memory as an engine of the same host reads it: a labelled file.

The learner takes the label out before a byte changes (shared_memory.py).
"""

import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from slipstream.weightbus.version.layout import LABEL_AT, LABEL_BYTES, label_in, safetensors_header
from slipstream.wire.errors import PublishError
from slipstream.wire.messages.manifest import WeightManifest
from slipstream.wire.models.model_files import WEIGHTS

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW  # seals of the size: an engine does not crash


def write_label(descriptor: int, label: str) -> None:
    """Say which version a file holds whole; empty before a byte of it changes."""
    os.pwrite(descriptor, label.rjust(LABEL_BYTES).encode(), LABEL_AT)


def is_sealed(descriptor: int) -> bool:
    """Return whether the size of a file is sealed: it is memory of a learner or an agent.

    Raises:
        OSError: it is on a file system without seals.
    """
    return fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS == SEALS


def open_mapped(path: Path, manifest: WeightManifest) -> int:
    """Open a file that holds the offered version; return its descriptor.

    Raises:
        OSError: there is no such memory of this user here: its process is gone, or out of sight,
            and another process may have its number.
        PublishError: it holds another version, or a part of one.
    """
    # The number may be another process's: a pipe must not stop us.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        _check(descriptor, manifest)
    except (OSError, PublishError):
        os.close(descriptor)
        raise
    return descriptor


def _check(descriptor: int, manifest: WeightManifest) -> None:
    label, status = manifest.version.label, os.fstat(descriptor)
    expected = safetensors_header(manifest, label=label)
    found = os.pread(descriptor, len(expected), 0) if stat.S_ISREG(status.st_mode) else b""
    is_ours = status.st_size == len(expected) + manifest.num_bytes
    if not is_ours or _unlabelled(found) != _unlabelled(expected):
        raise OSError(f"the file there does not hold the tensors of {label}")
    # Its digests are not compared here: a path must not lead to just any file.
    if not is_sealed(descriptor) or status.st_uid != os.geteuid():
        raise OSError("the file there is no memory of this user whose size is sealed")
    if why := _difference(label_in(found), label):
        raise PublishError(why)


@contextmanager
def watched(folder: Path, label: str) -> Iterator[Callable[[], str]]:
    """Hold the file in a folder open; yield what returns why it is not a version, or no more.

    Call that before and after the load; empty is good. It looks at the same file each time: by then
    the name may be gone, or lead to another. A file without a label does not change.
    """
    path = folder / WEIGHTS
    if not os.path.lexists(path):  # a folder of another kind, or none: the load says so
        yield lambda: f"{label} came as it was loaded" if os.path.lexists(path) else ""
        return
    try:
        file = path.open("rb")
    except OSError as error:
        why = f"{label} is not there any more: {error.strerror}"
        yield lambda: why
        return

    def difference() -> str:
        found = label_in(os.pread(file.fileno(), LABEL_AT + LABEL_BYTES, 0))
        return _difference(found, label) if found is not None else ""

    with file:
        yield difference


def _difference(found: str | None, label: str) -> str:
    if found == label:
        return ""
    return f"the memory holds {found or 'a part of another version'}, not {label}"


def _unlabelled(header: bytes) -> bytes:
    return header[:LABEL_AT] + header[LABEL_AT + LABEL_BYTES :]

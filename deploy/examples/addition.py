"""The quickstart's task and policy: two-digit addition for a policy of 0.8M parameters.

The policy ships with the project, in ``addition_policy``. ``make policy`` makes it again.
"""

import fcntl
import json
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from slipstream.wire.files.replace import replace_file, replacing_folder

SHIPPED_POLICY = Path(__file__).with_name("addition_policy")

HELD_OUT = 256


def prepare(folder: Path) -> None:
    """Put the problems and the shipped policy into ``folder``.

    Leaves ``train.jsonl``, ``held_out.jsonl`` and ``model/``. Each appears whole or not at all,
    and files with the right bytes are left alone.
    """
    with locked(folder):
        write_problems(folder)
        copy_folder(SHIPPED_POLICY, folder / "model")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make a folder and keep another process from filling it at the same time."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # held for the time of a few small files
        yield
    finally:
        os.close(descriptor)


def copy_folder(source: Path, target: Path) -> None:
    """Make ``target`` hold the files of ``source`` and no others; do nothing if it does."""
    wanted = _files_in(source)
    if target.is_dir() and _files_in(target) == wanted:
        return
    with replacing_folder(target, durable=False) as unfinished:
        for name, content in wanted.items():
            (unfinished / name).write_bytes(content)


def _files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def problems() -> list[tuple[int, int]]:
    """Return 00+00 to 99+99 in their order; the first ones are held out."""
    pairs = [(a, b) for a in range(100) for b in range(100)]
    random.Random(7).shuffle(pairs)  # noqa: S311 not for secrets
    return pairs


def write_problems(folder: Path) -> None:
    """Split the problems into held-out ones and the others."""
    everything = problems()
    for name, part in (("held_out", everything[:HELD_OUT]), ("train", everything[HELD_OUT:])):
        rows = [
            {"prompt": f"{a:02d}+{b:02d}=", "ground_truth": str(a + b), "data_source": "addition"}
            for a, b in part
        ]
        write_rows(folder / f"{name}.jsonl", rows)


def write_rows(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write rows as JSONL unless the file holds them already."""
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if path.is_file() and path.read_bytes() == content:
        return
    replace_file(path, content, durable=False)

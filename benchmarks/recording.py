"""Files of results that benchmarks append to: every line says what made it, where and when."""

import platform
import subprocess
import sys
import time
from collections.abc import Iterable
from importlib.metadata import Distribution
from pathlib import Path
from typing import TypeVar

import msgspec
import psutil

ROOT = Path(__file__).parents[1]
RECORDED = ROOT / "benchmarks" / "recorded"  # what docs/results.md shows
_PACKAGES = ("torch", "transformers", "sglang", "megatron-core", "trl")


class Origin(msgspec.Struct, frozen=True):
    """Where, when and with what a line was made."""

    machine: str
    date: str  # UTC
    commit: str  # ends in + where files differ from it
    versions: str


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """A line of results."""

    origin: Origin | None = None  # None until it is written


L = TypeVar("L", bound=Line)


def origin_here(path: str = "") -> Origin:
    """Return the origin of what this process measures; ``path`` is a further folder of packages."""
    memory_gib = psutil.virtual_memory().total / 2**30
    commit = _git("rev-parse", "--short=8", "HEAD") or "not known"
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ":!benchmarks/recorded")
    versions = [f"CPython {platform.python_version()}"]
    for package in _PACKAGES:
        places = [*sys.path, path] if path else sys.path
        installed = next(iter(Distribution.discover(name=package, path=places)), None)
        versions += [f"{package} {installed.version}"] if installed is not None else []
    return Origin(
        machine=f"{psutil.cpu_count()} cores of {_processor()}, {memory_gib:.0f} GiB",
        date=time.strftime("%Y-%m-%d", time.gmtime()),
        commit=f"commit {commit}{'+' if changed else ''}",
        versions=", ".join(versions),
    )


def append(file: Path, line: Line, path: str = "") -> None:
    """Write a line with its origin at the end of a file; ``path`` as of ``origin_here``."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab") as lines:
        made = msgspec.structs.replace(line, origin=origin_here(path))
        lines.write(msgspec.json.encode(made) + b"\n")


def lines_of(file: Path, kind: type[L]) -> list[L]:
    """Return the lines of a file, none if there is no file.

    Raises:
        ValueError: a line was cut off, or is of another kind.
    """
    lines = []
    for number, line in enumerate(file.read_bytes().splitlines() if file.exists() else [], 1):
        try:
            lines.append(msgspec.json.decode(line, type=kind))
        except msgspec.DecodeError as error:
            raise ValueError(f"{file}, line {number} cannot be read: {error}") from error
    return lines


def origins(lines: Iterable[Line]) -> str:
    """Return machines, days, commits and versions of all lines, each once."""
    known = [line.origin for line in lines if line.origin is not None]
    fields = Origin.__struct_fields__ if known else ()
    return "; ".join(
        " and ".join(dict.fromkeys(getattr(origin, field) for origin in known)) for field in fields
    )


def _git(*arguments: str) -> str:
    """Return what git says, nothing where it fails."""
    try:
        done = subprocess.run(
            ["git", *arguments],  # noqa: S607 the machine's own
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()

"""Harmless warnings of SGLang's libraries: kept out of an engine's log, and counted.

Only the warnings named below; a line at the end of the start says how many were left out.
"""

import os
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

LEFT_OUT_VARIABLE = "SLIPSTREAM_LEFT_OUT"  # file for the counts of a server's processes
LEFT_OUT_FILE = "left-out.txt"


class KnownWarning(NamedTuple):
    """A warning that every healthy start prints."""

    name: str  # one word, for the count
    module: str  # end of the path of the file that warns
    says: str  # start of its text


KNOWN = (
    KnownWarning("awq", "quantization/awq/awq.py", "Only CUDA, HIP and XPU support AWQ"),
    KnownWarning("gguf", "quantization/gguf.py", "Only CUDA, MUSA and NPU support GGUF"),
    KnownWarning("triton", "attention/fla/utils.py", "Triton is not supported on current platform"),
    # SGLang imports Megatron if it is installed, but does not compute with it.
    KnownWarning("megatron", ".py", "Transformer Engine and Apex are not installed"),
    KnownWarning("orjson", "fastapi/routing.py", "ORJSONResponse is deprecated"),
)


def leave_out() -> None:
    """Leave known warnings out of what this process prints, if a file is named to count them in."""
    named = os.environ.get(LEFT_OUT_VARIABLE)  # noqa: TID251 reaches spawned processes
    if named:
        warnings.showwarning = counting(warnings.showwarning, Path(named))


def counting(show: Callable[..., None], counts: Path) -> Callable[..., None]:
    """Return a ``warnings.showwarning`` that counts known warnings and shows all others.

    Args:
        show: Shows a warning.
        counts: File that gets a line with the name of each warning that is not shown.
    """

    def show_or_count(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        *rest: object,
        **named: object,
    ) -> None:
        name = known_name(str(message), filename)
        if not name or not _count(name, counts):
            show(message, category, filename, *rest, **named)

    return show_or_count


def known_name(text: str, filename: str) -> str:
    """Return the name of a known warning; empty for any other."""
    found = (
        known for known in KNOWN if filename.endswith(known.module) and text.startswith(known.says)
    )
    return next((known.name for known in found), "")


def counted(counts: Path) -> Counter[str]:
    """Return how often each known warning was left out."""
    try:
        return Counter(counts.read_text().split())
    except OSError:
        return Counter()


def told(found: Counter[str]) -> str:
    """Return the line for a log with the counts left out; empty if nothing was left out."""
    if not found:
        return ""
    each = ", ".join(f"{name} {number}" for name, number in sorted(found.items()))
    return (
        f"[slipstream] {found.total()} known warnings of libraries are left out here ({each}): "
        "KNOWN in generators/sglang/log_noise.py names them\n"
    )


def _count(name: str, counts: Path) -> bool:
    try:
        descriptor = os.open(counts, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError:
        return False  # leave out only what is counted
    try:
        return os.write(descriptor, f"{name}\n".encode()) > 0
    except OSError:
        return False
    finally:
        os.close(descriptor)

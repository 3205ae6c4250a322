"""Bytecode of a role and its children: written once, read by every later start.

Containers often set ``PYTHONDONTWRITEBYTECODE``. If libraries have no bytecode, every process then
compiles torch and SGLang from source at every start, which doubles its time.
"""

import importlib.util
import os
import stat
import sys
import tempfile
from pathlib import Path

_FORBIDDEN = "PYTHONDONTWRITEBYTECODE"
_PREFIX = "PYTHONPYCACHEPREFIX"
_LIBRARIES = ("msgspec", "torch", "sglang")  # possibly installed separately


def write_bytecode() -> None:
    """Let this process and its children write bytecode.

    The place is next to the sources, as usual, or a private folder below the temporary one if
    libraries have no bytecode and cannot be written to. Each run has its own temporary folder.
    """
    sys.dont_write_bytecode = False
    os.environ.pop(_FORBIDDEN, None)  # noqa: TID251 children inherit it
    if sys.pycache_prefix is None and not all(map(_lies_beside, _LIBRARIES)):
        folder = Path(tempfile.gettempdir()) / f"slipstream-bytecode-{os.getuid()}"
        if is_private(folder):
            sys.pycache_prefix = os.environ[_PREFIX] = str(folder)  # noqa: TID251 the same


def is_private(folder: Path) -> bool:
    """Make a folder that only this user may write to; return whether it is one.

    Bytecode is code: a folder made by another user in a shared place is not used.
    """
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return False
    others = stat.S_IWGRP | stat.S_IWOTH
    return (
        stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & others
    )


def _lies_beside(library: str) -> bool:
    spec = importlib.util.find_spec(library)
    if spec is None or spec.origin is None:
        return True
    compiled = Path(importlib.util.cache_from_source(spec.origin))
    return compiled.exists() or os.access(compiled.parents[1], os.W_OK)

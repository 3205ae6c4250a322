"""Interpreters of other versions, where this machine has them."""

import os
import shutil
import subprocess
from pathlib import Path


def find_python(series: str) -> str | None:
    """Return an interpreter of a series as in "3.12" that runs; None if there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))  # noqa: TID251 pyenv's own
    on_path = shutil.which(f"python{series}")
    candidates = [on_path] if on_path else []
    candidates += map(os.fspath, sorted(pyenv.glob(f"versions/{series}.*/bin/python")))
    for candidate in candidates:
        call = [candidate, "-c", "import venv"]
        if subprocess.run(call, check=False, capture_output=True).returncode == 0:
            return candidate
    return None

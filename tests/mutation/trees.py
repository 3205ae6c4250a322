"""Copies of the repository, in which tests and mutants run."""

import os
import shutil
import subprocess
from pathlib import Path


def copied_tree(root: Path, folder: Path) -> Path:
    """Copy what git tracks, or would, with its times; return the copy."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (root / name).is_file() or (root / name).is_symlink():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, folder / name, follow_symlinks=False)
    return folder


def environment(tree: Path, root: Path) -> dict[str, str]:
    """Return the environment in which tests see a tree's packages only."""
    return {
        **os.environ,  # noqa: TID251 for those of the tests
        "PYTHONPATH": f"{tree}/src:{tree}:{root}/.cache/mutation/lib",
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "HYPOTHESIS_STORAGE_DIRECTORY": f"{tree}/.hypothesis",
    }

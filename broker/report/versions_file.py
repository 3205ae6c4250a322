"""`versions.json`: the code and packages of a run."""

import json
import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from slipstream.wire.files.replace import replace_file
from slipstream.wire.settings.sections import RunSection

_TIMEOUT_S = 5.0


def write_versions(run: RunSection, packages: Mapping[str, str]) -> None:
    """Replace versions.json by the roles' reports so far."""
    content = {
        "slipstream": version("slipstream"),
        "git_commit": git_commit(Path(__file__).parent),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "seed": run.seed,
        "packages": dict(sorted(packages.items())),
    }
    data = json.dumps(content, indent=2).encode() + b"\n"
    replace_file(run.folder / "versions.json", data, durable=False)


def git_commit(folder: Path) -> str | None:
    """Return the commit of the code, with ``+changes`` if it was edited since.

    None where the code is no git checkout, as in an installed package.
    """
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return None
    return commit + ("+changes" if _git(folder, "status", "--porcelain") else "")


def _git(folder: Path, *arguments: str) -> str:
    try:
        result = subprocess.run(  # noqa: S603 fixed arguments
            ["git", "-C", str(folder), *arguments],  # noqa: S607 whichever git the user has
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""

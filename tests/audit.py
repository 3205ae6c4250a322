"""Whether an installed package has a known hole: ``python -m tests.audit``, which asks PyPI.

pip-audit checks every installed package against PyPI's JSON interface. It passes where it found
nothing, even because nothing could be checked: here these differ. Exit code 1 is a hole, 2 that
PyPI could not be reached.
"""

import importlib.metadata
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

OURS = "slipstream"
# What is accepted, by its identifier, and why: PYSEC-..., GHSA-... or CVE-...
ACCEPTED: dict[str, str] = {}


class UnreachableError(Exception):
    """No advisories could be had."""


def installed() -> dict[str, str]:
    """Return public versions of what is installed, by name; a local build counts as its release."""
    found = {one.name.lower(): one.version for one in importlib.metadata.distributions()}
    return {name: version.partition("+")[0] for name, version in found.items() if name != OURS}


def report_of(packages: Mapping[str, str]) -> dict[str, Any]:
    """Ask pip-audit.

    Raises:
        UnreachableError: it does not run, or prints nothing that can be read.
    """
    with tempfile.TemporaryDirectory() as folder:
        names = Path(folder, "installed.txt")
        names.write_text("".join(f"{name}=={version}\n" for name, version in packages.items()))
        words = [*("-s", "pypi", "-f", "json", "--no-deps", "--disable-pip"), "-r", str(names)]
        done = subprocess.run(
            [sys.executable, "-m", "pip_audit", "--progress-spinner", "off", *words],
            capture_output=True,
            text=True,
            check=False,
        )
    try:
        report: dict[str, Any] = json.loads(done.stdout)
    except ValueError as error:
        message = done.stderr.strip().rpartition("\n")[2]
        raise UnreachableError(f"pip-audit ended with code {done.returncode}: {message}") from error
    return report


def holes(report: Mapping[str, Any], accepted: Mapping[str, str]) -> list[str]:
    """Return a line for each known hole that is not accepted.

    Raises:
        UnreachableError: not one package could be checked.
    """
    checked = [one for one in report["dependencies"] if "skip_reason" not in one]
    if not checked:
        reasons = [str(one["skip_reason"]) for one in report["dependencies"]]
        raise UnreachableError(f"none of {len(reasons)} packages was found: {reasons[:1]}")
    return [
        f"{one['name']} {one['version']}: {hole['id']} {hole['aliases']}, "
        f"mended in {', '.join(hole['fix_versions']) or 'no release'}"
        for one in checked
        for hole in one["vulns"]
        if not {hole["id"], *hole["aliases"]} & set(accepted)
    ]


def main() -> int:
    """Print the holes; return the exit code."""
    packages = installed()
    try:
        found = holes(report_of(packages), ACCEPTED)
    except UnreachableError as error:
        sys.stderr.write(f"audit: no advisories can be had here: {error}\n")
        return 2
    for line in found:
        sys.stdout.write(f"{line}\n")
    sys.stdout.write(f"audit: {len(found)} known holes in {len(packages)} packages\n")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Prints, one a line, the options that make uv look for packages where pip is told to look.

uv reads neither pip's configuration nor its environment variables. Whoever has configured uv itself
is left alone. It runs before anything is installed, with the interpreter of a new environment.
"""

import ast
import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlparse

_OPTIONS = {"index-url": "--index-url", "extra-index-url": "--extra-index-url"}
_OPTIONS["find-links"] = "--find-links"
_OWN = ("UV_DEFAULT_INDEX", "UV_INDEX", "UV_INDEX_URL", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS")


def options(listing: str) -> list[str]:
    """Return the options for what ``pip config list`` printed.

    A later line of a key takes the place of an earlier one, as pip prints them; one key may hold
    several places. Folders that do not exist are left out: pip passes over them, uv does not. With
    several indexes uv is told to look at all of them, as pip does.
    """
    places: dict[str, list[str]] = {}
    for line in listing.splitlines():
        key, equals, value = line.partition("=")
        name = key.rpartition(".")[2].replace("_", "-")
        if equals and name in _OPTIONS and not key.startswith(("download.", "wheel.")):
            places[name] = ast.literal_eval(value).split()
    words = [
        word
        for name, found in places.items()
        for place in found
        if _may_hold_packages(place)
        for word in (_OPTIONS[name], place)
    ]
    return (
        [*words, "--index-strategy", "unsafe-best-match"] if "extra-index-url" in places else words
    )


def _may_hold_packages(place: str) -> bool:
    url = urlparse(place)
    return url.scheme not in {"", "file"} or Path(url.path).is_dir()


def main() -> int:
    """Ask pip, and print."""
    if not any(os.environ.get(name) for name in _OWN):  # noqa: TID251 a program of its own
        listing = subprocess.run(
            [sys.executable, "-m", "pip", "config", "list"],
            capture_output=True,
            text=True,
            check=True,
        )
        sys.stdout.writelines(f"{option}\n" for option in options(listing.stdout))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Prints, one per line, the options that make uv use the package sources of pip.

uv reads neither pip's configuration nor its environment variables. A user's own configuration of
uv stays. It runs before anything is installed, with the interpreter of a new environment.
"""

import ast
import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlparse

_OPTIONS = {
    "index-url": "--index-url",
    "extra-index-url": "--extra-index-url",
    "find-links": "--find-links",
}
_NO_INDEX = "no-index"
_SECTIONS = ("global", "install", ":env:")  # the later one counts
_OWN = ("UV_DEFAULT_INDEX", "UV_INDEX", "UV_INDEX_URL", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS")


def options(listing: str) -> list[str]:
    """Return the options for the output of ``pip config list``.

    The environment counts more than a file, and its section for ``pip install`` more than that
    for all commands; one key may hold several places. Folders that do not exist are left
    out: pip passes over them, uv does not. With several indexes uv is given all of them,
    as pip does.
    """
    values: dict[str, tuple[int, str]] = {}
    for line in listing.splitlines():
        key, equals, value = line.partition("=")
        section, _, name = key.rpartition(".")
        name = name.replace("_", "-")
        if not equals or section not in _SECTIONS or name not in (*_OPTIONS, _NO_INDEX):
            continue
        found = (_SECTIONS.index(section), str(ast.literal_eval(value)))
        values[name] = max(values.get(name, found), found)
    places = {name: values[name][1].split() for name in _OPTIONS if name in values}
    is_offline = values.get(_NO_INDEX, (0, ""))[1].lower() in {"1", "true", "yes", "on"}
    words: list[str] = []
    for name, found_places in places.items():
        for place in found_places:
            url = urlparse(place)
            if url.scheme not in {"", "file"} or Path(url.path).is_dir():
                words += [_OPTIONS[name], place]
    if "extra-index-url" in places:
        words += ["--index-strategy", "unsafe-best-match"]
    return [*words, "--no-index"] if is_offline else words


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

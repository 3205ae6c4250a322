"""Prints what is to be downloaded for a pylock.toml: "2.8 GB", or "size unknown".

The lock is one that uv resolved for this machine: it names one wheel per package. This runs before
anything is installed, with the interpreter of a new environment.
"""

import sys
import tomllib
from pathlib import Path
from urllib.parse import unquote, urlparse


def download_bytes(lock: str) -> int | None:
    """Return the bytes of the wheels of a lock; None if an index does not give a size."""
    sizes = [_wheel_bytes(package["wheels"][0]) for package in tomllib.loads(lock)["packages"]]
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None


def _wheel_bytes(wheel: dict[str, str | int]) -> int | None:
    if "size" in wheel:
        return int(wheel["size"])
    url = urlparse(str(wheel.get("url", "")))
    path = Path(unquote(url.path)) if url.scheme == "file" else Path(str(wheel.get("path", "")))
    return path.stat().st_size if path.is_file() else None


if __name__ == "__main__":
    size = download_bytes(Path(sys.argv[1]).read_text("utf-8"))
    sys.stdout.write("size unknown\n" if size is None else f"{size / 1e9:.1f} GB\n")

"""Packs what a GPU machine without a network lacks into .whl/site.tar.xz: `make device-wheels`.

Wheels are compressed file by file; together their files take two thirds of that.
"""

import io
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WHEELS = ROOT / ".whl"
ARCHIVE = WHEELS / "site.tar.xz"
LIST = Path(__file__).with_name("wheels.txt")
MAX_MIB = 63.0  # with the tree: what a borrowed machine takes
_LARGEST = 3
_MACHINE = (
    *("--python-version", "3.12", "--implementation", "cp", "--abi", "cp312", "--abi", "abi3"),
    *("--abi", "none", "--platform", "linux_x86_64"),
    *(f"--platform=manylinux_2_{n}_x86_64" for n in (17, 24, 26, 27, 28, 31, 34)),
    *("--platform", "manylinux2014_x86_64", "--platform", "manylinux1_x86_64"),
)


def tree_mib(root: Path) -> float:
    """Return the size of what git keeps in a checkout."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"],  # noqa: S607 wherever it is
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    files = [root / name for name in listed.stdout.split("\0") if name]
    return sum(path.stat().st_size for path in files if path.is_file()) / 2**20


def files_of(wheel: Path) -> Iterator[tuple[str, int, bytes]]:
    """Yield what a wheel puts beside other packages: name, mode and content of each file."""
    with zipfile.ZipFile(wheel) as opened:
        for info in opened.infolist():
            name = info.filename
            top, _, rest = name.partition("/")
            if top.endswith(".data"):
                kind, _, name = rest.partition("/")
                if kind not in {"purelib", "platlib"}:
                    continue  # scripts, headers: for an environment of its own
            if not info.is_dir():
                yield name, (info.external_attr >> 16) & 0o777 or 0o644, opened.read(info)


def pack(wheels: list[Path], archive: Path) -> None:
    """Pack the files of wheels so that they can be unpacked into one folder of packages."""
    with tarfile.open(archive, "w:xz", preset=6) as packed:
        for wheel in wheels:
            for name, mode, content in files_of(wheel):
                entry = tarfile.TarInfo(name)
                entry.mode, entry.size = mode, len(content)
                packed.addfile(entry, io.BytesIO(content))


def refusal(wheels: list[Path], archive: Path, max_mib: float) -> str:
    """Return why the packed wheels cannot be carried; empty if they can."""
    total = archive.stat().st_size / 2**20
    if total <= max_mib:
        return ""
    sizes = {path.name: path.stat().st_size / 2**20 for path in wheels}
    largest = sorted(sizes, key=lambda name: -sizes[name])[:_LARGEST]
    named = ", ".join(f"{name} ({sizes[name]:.1f})" for name in largest)
    return (
        f"{archive} has {total:.1f} MiB, {max_mib:.1f} can be carried beside the tree; the largest "
        f"of its {len(sizes)} wheels are {named}: take what is not needed out of {LIST.name}"
    )


def main() -> int:
    WHEELS.mkdir(exist_ok=True)
    for old in WHEELS.glob("*.whl"):
        old.unlink()
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    options = ["--no-deps", "--only-binary=:all:", "--dest", str(WHEELS), "-r", str(LIST)]
    done = subprocess.run([*command, *options, *_MACHINE], check=False)
    if done.returncode:
        return done.returncode
    wheels = sorted(WHEELS.glob("*.whl"))
    pack(wheels, ARCHIVE)
    if why := refusal(wheels, ARCHIVE, MAX_MIB - tree_mib(ROOT)):
        print(f"device-wheels: {why}", file=sys.stderr)
        return 1
    size_mib = ARCHIVE.stat().st_size / 2**20
    print(f"device-wheels: {len(wheels)} wheels, {size_mib:.1f} MiB in {ARCHIVE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

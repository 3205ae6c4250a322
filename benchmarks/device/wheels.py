"""Downloads what a GPU machine without a network lacks into .whl: `make device-wheels`."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WHEELS = ROOT / ".whl"
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


def refusal(folder: Path, max_mib: float) -> str:
    """Return why the wheels in a folder cannot be carried; empty if they can."""
    sizes = {path.name: path.stat().st_size / 2**20 for path in folder.glob("*.whl")}
    total = sum(sizes.values())
    if total <= max_mib:
        return ""
    largest = sorted(sizes, key=lambda name: -sizes[name])[:_LARGEST]
    named = ", ".join(f"{name} ({sizes[name]:.1f})" for name in largest)
    return (
        f"{len(sizes)} wheels in {folder} have {total:.1f} MiB, {max_mib:.1f} can be carried "
        f"beside the tree; the largest are {named}: take what is not needed out of {LIST.name}"
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
    if why := refusal(WHEELS, MAX_MIB - tree_mib(ROOT)):
        print(f"device-wheels: {why}", file=sys.stderr)
        return 1
    wheels = [path.stat().st_size for path in WHEELS.glob("*.whl")]
    print(f"device-wheels: {len(wheels)} wheels, {sum(wheels) / 2**20:.1f} MiB in {WHEELS}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

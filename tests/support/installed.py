"""The distribution as users get it: built, and installed where nothing but its base is."""

import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from email import message_from_bytes
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.waiting import HANG_S

ROOT = Path(__file__).parents[2]
_UNNEEDED = shutil.ignore_patterns(".*", "runs", "build", "dist", "*.egg-info", "__pycache__")


def build(folder: Path) -> tuple[Path, Path]:
    """Build the source distribution, and the wheel from that; return both, below ``folder``.

    From a copy: building in place leaves a folder that the next build takes files from.
    """
    source = shutil.copytree(ROOT, folder / "source", symlinks=True, ignore=_UNNEEDED)
    code = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
    command = [sys.executable, "-W", "ignore", "-c", code, str(folder)]
    subprocess.run(command, cwd=source, check=True, timeout=HANG_S, stdout=subprocess.DEVNULL)
    (sdist,) = folder.glob("*.tar.gz")
    quietly = ["--quiet", "--disable-pip-version-check", "--no-index"]
    command = [sys.executable, "-m", "pip", "wheel", *quietly, "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "-w", str(folder), str(sdist)], check=True, timeout=HANG_S)
    (wheel,) = folder.glob("*.whl")
    return sdist, wheel


def install(wheel: Path, folder: Path) -> Path:
    """Install a wheel into a new environment without a network; return its ``bin``.

    Its base requirements are those of this environment, by links to them alone.
    """
    environment = folder / "venv"
    command = [sys.executable, "-m", "venv", "--without-pip", str(environment)]
    subprocess.run(command, check=True, timeout=HANG_S)
    python = environment / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    options = ["--disable-pip-version-check", "--no-index", "--no-deps"]
    subprocess.run([*command, *options, str(wheel)], check=True, timeout=HANG_S)
    libraries = folder / "libraries"
    libraries.mkdir()
    for one in base_of(wheel):
        _link(one, libraries)
    (site,) = environment.glob("lib/python3.*/site-packages")
    (site / "base.pth").write_text(f"{libraries}\n")
    return environment / "bin"


def metadata(wheel: Path) -> dict[str, list[str]]:
    """Return the fields of a wheel's METADATA, the long description left out."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        message = message_from_bytes(archive.read(name))
    return {field: message.get_all(field) or [] for field in message}


def base_of(wheel: Path) -> list[Distribution]:
    """Return what a wheel requires without extras, and what that requires."""
    found: dict[str, Distribution] = {}

    def add(requirements: Iterable[str]) -> None:
        for requirement in map(Requirement, requirements):
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
                continue
            name = canonicalize_name(requirement.name)
            if name not in found:
                found[name] = distribution(name)
                add(found[name].requires or ())

    add(metadata(wheel)["Requires-Dist"])
    return list(found.values())


def _link(one: Distribution, libraries: Path) -> None:
    here = Path(str(one.locate_file("")))
    tops = {file.parts[0] for file in one.files or ()} - {"..", "__pycache__"}
    for top in tops:
        link = libraries / top
        if not link.is_symlink():  # a namespace of several distributions
            link.symlink_to(here / top)

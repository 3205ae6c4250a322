"""Where deploy/setup.sh takes torch from: real pip and uv, and indexes of this machine."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.package_index import add_wheel, serving
from tests.support.ranks.run import outputs, start
from tests.support.waiting import HANG_S

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
CPU, ORDINARY, FOREIGN = "2.13.0+cpu", "2.13.0", "2.13.0+zz"
BACKEND = '''"""Builds a wheel that holds nothing."""
from tests.support.package_index import add_wheel
from pathlib import Path
def build_editable(folder, config_settings=None, metadata_directory=None):
    return add_wheel(Path(folder), "slipstream", "0.1.0").name
'''


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The script, with requirements of a few bytes."""
    folder = tmp_path / "a folder"
    (folder / "tests" / "support").mkdir(parents=True)
    shutil.copytree(ROOT / "deploy" / "setup", folder / "deploy" / "setup")
    shutil.copy(ROOT / "deploy" / "setup.sh", folder / "deploy")
    shutil.copy(ROOT / "tests" / "support" / "package_index.py", folder / "tests" / "support")
    (folder / "backend.py").write_text(BACKEND)
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        '[project]\nname = "slipstream"\nversion = "0.1.0"\n'
    )
    (folder / "deploy" / "constraints-cpu.txt").write_text("torch==2.13.0\ntorchvision==0.28.0\n")
    (folder / "deploy" / "setup" / "requirements-cpu.txt").write_text("torch\nlibrary\n")
    (folder / "deploy" / "setup" / "requirements-cpu-nodeps.txt").write_text("sglang\n")
    return folder


@pytest.fixture
def package_index(tmp_path: Path) -> Iterator[str]:
    """The index that a user configured, and a folder of wheels that must not be preferred."""
    folder = tmp_path / "index"
    wheels = {"torch": ORDINARY, "torchvision": "0.28.0", "library": "1", "sglang": "1"}
    for name, version in wheels.items():
        add_wheel(folder / name, name, version)
    with serving(folder) as url:
        yield url


def set_up(checkout: Path, package_index: str, **environment: str) -> tuple[str, str]:
    """Run the script; return what it printed, and the version of torch in the environment."""
    home = checkout.parent
    add_wheel(home / "wheels", "torch", FOREIGN)
    done = subprocess.run(
        [checkout / "deploy" / "setup.sh"],
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_S,
        env={
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
            "HOME": os.fspath(home),
            "PYTHON": sys.executable,
            "PIP_CONFIG_FILE": "/dev/null",
            "PIP_INDEX_URL": package_index,
            "UV_CACHE_DIR": os.fspath(home / "cache"),
            **environment,
        },
    )
    assert done.returncode == 0, (done.stderr, (checkout / ".cache" / "setup.log").read_text())
    python = checkout / ".venv" / "bin" / "python"
    version = [python, "-c", "import torch, library, sglang; print(torch.__version__)"]
    shown = subprocess.run(version, capture_output=True, text=True, check=True)
    return done.stdout, shown.stdout.strip()


@pytest.mark.parametrize("installer", ["uv", "pip"])
def test_cpu_build_is_taken_from_torchs_own_index(
    checkout: Path, package_index: str, tmp_path: Path, installer: str
):
    folder = tmp_path / "torch-index"
    for name, version in {"torch": CPU, "torchvision": "0.28.0+cpu"}.items():
        add_wheel(folder / name, name, version)
    wheels = os.fspath(tmp_path / "wheels")
    with serving(folder) as url:
        chosen = {"TORCH_INDEX": url, "SETUP_WITH": installer, "PIP_FIND_LINKS": wheels}
        output, version = set_up(checkout, package_index, **chosen)
    assert version == CPU
    assert f"1 of 5, torch for CPUs, from {url}: " in output


def test_torch_index_without_an_answer_is_left_for_the_package_index(
    checkout: Path, package_index: str
):
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connections wait for ever
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        output, version = set_up(checkout, package_index, TORCH_INDEX=url)
    assert version == ORDINARY
    assert f"setup: {url} does not answer or has no such torch" in output
    assert "torch comes from the package index, size unknown" in output


@pytest.mark.parametrize(
    ("offered", "others", "broken", "why"),
    [
        # For either package the same question is asked above, of an index without an answer.
        pytest.param(
            *("2.13.00.1+cpu", True, False, "does not answer or has no such torch"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *(CPU, False, False, "does not answer or has no such torch"), marks=pytest.mark.slow
        ),
        (CPU, True, True, "failed"),
    ],
    ids=["another version", "torch alone", "broken"],
)
def test_torch_index_that_lacks_something_is_left_for_the_package_index(
    checkout: Path,
    package_index: str,
    tmp_path: Path,
    *,
    offered: str,
    others: bool,
    broken: bool,
    why: str,
):
    """Nor is one used that has torch alone, or names a file that it does not give."""
    folder = tmp_path / "torch-index"
    add_wheel(folder / "torch", "torch", offered)
    if others:
        add_wheel(folder / "torchvision", "torchvision", "0.28.0+cpu")
    if broken:
        (wheel,) = (folder / "torch").iterdir()
        wheel.write_bytes(b"no archive")
    with serving(folder) as url:
        output, version = set_up(checkout, package_index, TORCH_INDEX=url)
    assert version == ORDINARY
    assert f"setup: {url} {why}: torch comes from the package index" in output


def test_no_torch_index_is_asked_where_none_is_wanted(checkout: Path, package_index: str):
    output, version = set_up(checkout, package_index, TORCH_INDEX="")
    assert version == ORDINARY
    assert "no index of CPU builds is asked: torch comes from the package index" in output
    bytecode = [*checkout.glob(".venv/lib/python3.*/site-packages/library/__pycache__/*.pyc")]
    assert len(bytecode) == 1


def test_transformers_can_be_imported_in_the_environment_of_make_setup(tmp_path: Path):
    assert outputs([start(tmp_path, "integration.transformers_vision")]) == ["llama"]

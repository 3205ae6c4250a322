"""Constraints and locks resolve from a package index alone, as on a machine that is not ours.

Only metadata is read. The configuration of pip and uv is out of the way: a wheel that only this
machine has must not count.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from tests.support.pythons import find_python
from tests.support.waiting import HANG_S

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
DEPLOY, LOCKS = ROOT / "deploy", ROOT / "deploy" / "locks"
UV = shutil.which("uv") or ROOT / ".venv" / "bin" / "uv"
INDEX = "https://pypi.org/simple"  # the default of pip and uv
PLATFORM = ("--python-platform", "x86_64-manylinux_2_35")
CPU = (os.fspath(DEPLOY / "setup" / "requirements-cpu.txt"), "torch", "torchvision")
NODEPS = ("--no-deps", os.fspath(DEPLOY / "setup" / "requirements-cpu-nodeps.txt"))
GPU_EXTRAS = (
    *("learner", "cluster", "redis-server", "storage", "flash-4", "linear-attention"),
    *("generators", "data", "rewards", "sandbox"),
)
GPU = (os.fspath(ROOT / "pyproject.toml"), *(f"--extra={name}" for name in GPU_EXTRAS))


@pytest.fixture(scope="module", autouse=True)
def index() -> None:
    """Skip where the package index cannot be reached."""
    try:
        urlopen(f"{INDEX}/pip/", timeout=20).close()  # noqa: S310 https
    except OSError as error:
        pytest.skip(f"{INDEX} cannot be reached: {error}")


def environment(folder: Path) -> dict[str, str]:
    """Return this environment without what configures pip or uv; trusted certificates stay."""
    kept = {"PIP_CERT", "SSL_CERT_FILE", "UV_CACHE_DIR"}
    ours = {
        name: value
        for name, value in os.environ.items()  # noqa: TID251 handed on
        if name in kept or not name.startswith(("PIP_", "UV_"))
    }
    return {**ours, "PIP_CONFIG_FILE": "/dev/null", "XDG_CONFIG_HOME": os.fspath(folder)}


def call(command: Sequence[str | Path], folder: Path, text: str = "") -> str:
    """Return what a resolver printed.

    Raises:
        AssertionError: No solution; the message is the resolver's.
    """
    done = subprocess.run(
        command,
        input=text,
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_S,
        env=environment(folder),
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def uv_resolves(
    folder: Path, constraints: Path, python: str, requirements: Sequence[str]
) -> dict[str, str]:
    """Return the version of each package that uv chooses."""
    files = [word for word in requirements if word.startswith(("-", "/"))]
    named = "\n".join(word for word in requirements if not word.startswith(("-", "/")))
    options = ["--no-config", "--quiet", "--no-annotate", "--no-header", *PLATFORM]
    options += ["--python-version", python, "-c", os.fspath(constraints)]
    chosen = call([UV, "pip", "compile", *options, *files, "-"], folder, named)
    return dict(re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", chosen, flags=re.MULTILINE))


@pytest.mark.parametrize(
    ("constraints", "requirements", "python"),
    [
        *(("cpu", CPU, python) for python in ("3.11", "3.12", "3.13")),
        *(("cpu", NODEPS, python) for python in ("3.11", "3.12", "3.13")),
        ("rehearsal", CPU, "3.12"),
        ("gpu", GPU, "3.12"),
    ],
)
def test_uv_resolves_constraints(
    tmp_path: Path, constraints: str, requirements: Sequence[str], python: str
):
    path = DEPLOY / f"constraints-{constraints}.txt"
    chosen = uv_resolves(tmp_path, path, python, requirements)
    pins = path.read_text("utf-8").lower().replace("_", "-")
    assert chosen.keys() - set(re.findall(r"(?m)^([a-z0-9.-]+)==", pins)) == set(), "unpinned"


@pytest.mark.slow  # half a minute each; above uv resolves the same constraints for every CPython
@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_pip_resolves_the_constraints_of_make_setup(tmp_path: Path, python: str):
    interpreter = find_python(python)
    if interpreter is None:
        pytest.skip(f"no CPython {python} is here")
    command = [sys.executable, "-m", "pip", "--python", interpreter, "install", "--dry-run"]
    command += ["--ignore-installed", "--use-feature=fast-deps", "--disable-pip-version-check"]
    constraints = DEPLOY / "constraints-cpu.txt"
    said = call([*command, "-c", constraints, "-r", *CPU], tmp_path)
    (torch,) = re.findall(r"(?m)^torch==(.*)$", constraints.read_text("utf-8"))
    assert f" torch-{torch} " in said[said.index("Would install") :]


def test_pins_that_contradict_what_torch_requires_are_seen(tmp_path: Path):
    pins = (DEPLOY / "constraints-cpu.txt").read_text("utf-8")
    wrong = tmp_path / "constraints.txt"
    wrong.write_text(re.sub(r"(?m)^triton==.*$", "triton==3.8.0", pins))
    with pytest.raises(AssertionError) as refused:
        uv_resolves(tmp_path, wrong, "3.11", CPU)
    words = " ".join(str(refused.value).split())
    assert re.search(r"torch==\S+ depends on triton.*and triton\{.*\}==3\.8\.0", words), words


@pytest.mark.parametrize("lock", sorted(LOCKS.glob("[cg]pu-*.txt")), ids=lambda lock: lock.stem)
def test_lock_resolves_with_every_hash(tmp_path: Path, lock: Path):
    python = lock.stem.rpartition("-")[2]
    command = [UV, "pip", "install", "--no-config", "--dry-run", "--require-hashes", *PLATFORM]
    command += ["--quiet", "--python-version", python, "--target", tmp_path / "site", "-r", lock]
    command += ["--no-deps"] if lock.stem.startswith("cpu") else []
    call(command, tmp_path)


def test_flash_attn_is_what_the_index_has():
    """Its metadata are made when it is built: files alone are compared."""
    lock = (LOCKS / "flash-attn.txt").read_text("utf-8")
    for name, version, hashes in re.findall(
        r"^([a-z0-9-]+)==(\S+) \\\n((?:    --hash=sha256:\w+ ?\\?\n)+)", lock, flags=re.MULTILINE
    ):
        accepted = {"Accept": "application/vnd.pypi.simple.v1+json"}
        request = Request(f"{INDEX}/{name}/", headers=accepted)  # noqa: S310 https
        with urlopen(request, timeout=HANG_S) as answer:  # noqa: S310
            files = json.load(answer)["files"]
        known = {file["hashes"]["sha256"] for file in files if version in file["filename"]}
        assert set(re.findall(r"sha256:(\w+)", hashes)) <= known, name

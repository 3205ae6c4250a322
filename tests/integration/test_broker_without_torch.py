"""The broker in an environment that holds the base requirements only."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from slipstream.deploy.examples.addition import SHIPPED_POLICY
from slipstream.deploy.launch.observer import status_now
from slipstream.wire.errors import SlipstreamError
from slipstream.wire.messages.status import RunStatus
from slipstream.wire.settings.sections import RunSection
from tests.support.waiting import HANG_S, until_async

ROOT = Path(__file__).parents[2]
UV = shutil.which("uv") or ROOT / ".venv" / "bin" / "uv"
HEAVY = ("torch", "megatron", "sglang", "ray", "transformers", "pyarrow", "reasoning_gym")

pytestmark = pytest.mark.integration


# Where each side's packages are; theirs need libraries to be imported, so their files are compared
# with what their wheels recorded of them.
BESIDE = """
import base64, hashlib, slipstream.broker.client, slipstream.algos
from importlib.metadata import distribution
from importlib.util import find_spec

for name in ("broker", "algos"):
    for file in distribution(name).files:
        if file.hash is not None:
            digest = hashlib.new(file.hash.mode, file.read_binary()).digest()
            assert base64.urlsafe_b64encode(digest).decode().rstrip("=") == file.hash.value, file
for name in ("slipstream.broker", "slipstream.algos", "broker", "algos"):
    print(find_spec(name).submodule_search_locations[0])
"""


def install(python: Path, *words: str | Path) -> None:
    """Install by uv, which takes a tenth of pip's CPU; test_wheel.py has pip install a wheel."""
    program = [sys.executable, ROOT / "deploy" / "setup" / "uv_sources.py"]
    sources = subprocess.run(program, capture_output=True, text=True, check=True).stdout
    command = [
        UV,
        "pip",
        "install",
        "--quiet",
        "--python",
        python,
        *sources.split("\n")[:-1],
        *words,
    ]
    subprocess.run(command, check=True, timeout=HANG_S)


@pytest.fixture(scope="module")
def slim_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("slim")
    venv.create(folder)
    python = folder / "bin" / "python"
    # From a copy: building in place leaves a folder that the next build takes files from.
    unneeded = shutil.ignore_patterns(".*", "runs", "build", "*.egg-info", "__pycache__")
    source = shutil.copytree(ROOT, folder / "source", symlinks=True, ignore=unneeded)
    constraints = ROOT / "deploy" / "constraints-cpu.txt"
    install(python, "-c", constraints, f"{source}[redis-server]")
    return python


@pytest.fixture
def run_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="sb-", dir="/tmp") as folder:
        yield Path(folder)


def test_the_broker_imports_and_serves_without_torch(slim_python: Path, run_folder: Path):
    heavy = f"import importlib.util as u; print([n for n in {HEAVY} if u.find_spec(n)])"
    found = subprocess.run(
        [slim_python, "-c", heavy], capture_output=True, text=True, check=True, cwd=run_folder
    )
    assert found.stdout.strip() == "[]"

    row = {"prompt": "1+1=", "ground_truth": "2"}
    (run_folder / "train.jsonl").write_text(json.dumps(row) + "\n")
    settings = {"run": f'name = "slim"\ndir = "{run_folder}/runs"'}
    settings["data"] = f'file = "{run_folder}/train.jsonl"'
    text = "".join(f"[{section}]\n{body}\n" for section, body in settings.items())
    (run_folder / "run.toml").write_text(text)
    command = [slim_python.parent / "start-broker", "--config", run_folder / "run.toml"]
    environment = {"PATH": os.defpath, "HOME": str(run_folder)}
    with subprocess.Popen(command, cwd=run_folder, env=environment) as broker:
        try:
            run = RunSection(name="slim", dir=f"{run_folder}/runs")
            status = asyncio.run(first_status(run, broker))
            assert status.run_name == "slim"
            assert status.versions["redis"]
            url = (run_folder / "runs" / "slim" / "dashboard.url").read_text().strip()
            assert url.startswith("http://127.0.0.1:")
        finally:
            broker.terminate()
            assert broker.wait(HANG_S) == 0
    summary = json.loads((run_folder / "runs" / "slim" / "summary.json").read_text())
    assert summary["outcome"] == "stopped"
    assert not list(run_folder.rglob("*.sock"))


async def first_status(run: RunSection, broker: "subprocess.Popen[bytes]") -> RunStatus:
    """Ask until the broker is up."""
    found: list[RunStatus] = []

    async def answers() -> bool:
        assert broker.poll() is None, "the broker has ended"
        with suppress(SlipstreamError):
            found.append(await asyncio.to_thread(status_now, run))
        return bool(found)

    await until_async(answers, "the broker did not come up")
    return found[0]


def printed_by(python: Path, code: str) -> str:
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    return done.stdout


def test_the_project_is_installed_as_a_wheel_with_its_page_and_the_start_policy(slim_python: Path):
    code = "from slipstream.broker.dashboard.site import _resources as files; "
    code += "print(len(files()['page.html']))"
    assert int(printed_by(slim_python, code)) > 100
    code = (
        "from importlib.resources import files\n"
        "folder = files('slipstream.deploy.examples').joinpath('addition_policy')\n"
        "print(*sorted(file.name for file in folder.iterdir()))"
    )
    assert printed_by(slim_python, code).split() == sorted(
        path.name for path in SHIPPED_POLICY.iterdir()
    )


def test_distributions_that_are_called_as_our_packages_work_beside_it(slim_python: Path):
    """``broker`` and ``algos`` on PyPI would have overwritten ours, and ours theirs."""
    install(slim_python, "--no-deps", "broker==0.8.11", "algos==0.1.0")
    paths = [Path(line) for line in printed_by(slim_python, BESIDE).splitlines()]
    assert [path.parts[-2:] for path in paths] == [
        ("slipstream", "broker"),
        ("slipstream", "algos"),
        ("site-packages", "broker"),
        ("site-packages", "algos"),
    ]

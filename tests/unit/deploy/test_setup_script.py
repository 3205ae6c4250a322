"""What deploy/setup.sh does and prints. Programs that note how they were called replace Python and
uv: nothing is installed.
"""

import fcntl
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from slipstream.deploy.setup.download_size import download_bytes

ROOT = Path(__file__).parents[3]
FILES = ("setup.sh", "constraints-cpu.txt", "constraints-rehearsal.txt")
NODEPS = "setup/requirements-cpu-nodeps.txt"


def fake_python(path: Path, words: str) -> Path:
    """Write a program that names its Python version, and is no Python."""
    path.write_text(f"#!/bin/sh\necho '{words}'\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what the script reads, in a folder with a space."""
    folder = tmp_path / "a folder"
    shutil.copytree(ROOT / "deploy" / "setup", folder / "deploy" / "setup")
    for name in FILES:
        shutil.copy(ROOT / "deploy" / name, folder / "deploy" / name)
    shutil.copy(ROOT / "pyproject.toml", folder)
    shutil.copytree(ROOT / "deploy" / "locks", folder / "deploy" / "locks")
    return folder


def run_setup(
    checkout: Path, *arguments: str, **environment: str
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [checkout / "deploy" / "setup.sh", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={
            "PATH": "/usr/bin:/bin",
            "HOME": os.fspath(checkout),
            "TORCH_INDEX": "",
            **environment,
        },
    )


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold the lock that a call holds while it works."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


NOTING_PYTHON = """#!/bin/sh
case "$*" in
    *implementation*) echo "CPython ${VERSION:-3.11}" ;;
    *'-m venv'*) for venv; do :; done; mkdir -p "$venv/bin" && cp "$0" "$venv/bin/python" ;;
    *'pip config'*) ;;
    *'-m pip'*) echo "pip $*" >>calls; [ -z "$PIP_FAILS" ] ;;
    *uv_sources*)
        [ -z "$SOURCES_FAIL" ] && printf '%s\\n' --index-url 'https://an.example/with space' ;;
    *) echo "${VERSION:-3.11}.0" ;;
esac
"""
NOTING_UV = """#!/bin/sh
case "$*" in
    *compile*) exit 1 ;;
    --version) [ -z "$UV_IS_BROKEN" ] && echo 'uv 9.9.9 (of a test)' ;;
    *) for word in "$@"; do printf '<%s>' "$word"; done >>calls; echo >>calls
       case "$*" in *requirements-cpu.txt*) [ -z "$UV_FAILS_LIBRARIES" ] ;; esac ;;
esac
"""


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder for PATH with a Python and a uv that note how they were called."""
    folder = tmp_path / "some programs"
    folder.mkdir()
    for name, text in {"python3.11": NOTING_PYTHON, "uv": NOTING_UV}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


def run_noted(
    checkout: Path, programs: Path, *arguments: str, **environment: str
) -> tuple[str, list[str]]:
    """Run it to its end; return what it printed, and the calls of uv and pip."""
    (checkout / "calls").write_text("")
    done = run_setup(checkout, *arguments, PATH=f"{programs}:/usr/bin:/bin", **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout, (checkout / "calls").read_text().splitlines()


def test_uv_installs_all_parts_from_the_sources_of_pip(checkout: Path, programs: Path):
    output, calls = run_noted(checkout, programs)
    assert len(calls) == 4
    for call in calls:
        assert call.startswith("<pip><install><--python><.venv/bin/python>")
        assert "<--index-url><https://an.example/with space>" in call
    assert next(line for line in output.splitlines() if "(uv 9.9.9)" in line).startswith(
        "setup: 1 of 5, torch: "
    )
    assert run_noted(checkout, programs) == ("", []), "a second call does nothing"


def test_pip_installs_the_part_that_uv_could_not(checkout: Path, programs: Path):
    output, calls = run_noted(checkout, programs, UV_FAILS_LIBRARIES="1")
    assert [call[:5] for call in calls] == ["<pip>", "<pip>", "pip -", "<pip>", "<pip>"]
    assert "2 of 5, libraries: 0 s (pip, as uv could not)" in output.replace(": 1 s", ": 0 s")


def test_the_rehearsal_has_an_environment_and_versions_of_its_own(checkout: Path, programs: Path):
    new = {"PYTHON": str(programs / "python3.11"), "VERSION": "3.12"}
    _, calls = run_noted(checkout, programs, "rehearsal", **new)
    assert len(calls) == 4
    assert all("<.rehearsal/bin/python>" in call for call in calls)
    assert all("<deploy/constraints-rehearsal.txt>" in call for call in calls[:3])
    assert run_noted(checkout, programs, "rehearsal", **new) == ("", [])
    assert not (checkout / ".venv").exists()


@pytest.mark.parametrize("flash_attn", ["", "no"])
def test_a_gpu_machine_compares_every_file_with_its_hash(
    checkout: Path, programs: Path, flash_attn: str
):
    chosen = {"VERSION": "3.12", "PYTHON": str(programs / "python3.11"), "FLASH_ATTN": flash_attn}
    output, calls = run_noted(checkout, programs, "gpu", **chosen)
    *locked, own = calls
    assert len(locked) == (1 if flash_attn == "no" else 3)
    assert all("<--require-hashes>" in call for call in locked)
    named = ["gpu-learner", "gpu-generator"]
    assert all(f"<deploy/locks/{name}-3.12.txt>" in locked[0] for name in named)
    if flash_attn != "no":  # flash-attn has an older flash_attn.cute
        assert "<deploy/locks/flash-attn.txt>" in locked[1]
        assert "<--force-reinstall>" in locked[2]
        again = (checkout / ".venv" / "flash-attn-4.txt").read_text()
        assert re.fullmatch(r"flash-attn-4==\S+ \\\n(    --hash=sha256:\w+( \\)?\n)+", again)
    assert "<--editable>" in own
    assert ("left out" in output) == (flash_attn == "no")
    assert run_noted(checkout, programs, "gpu", **chosen) == ("", [])


@pytest.mark.parametrize("trouble", ["UV_IS_BROKEN", "SOURCES_FAIL"])
def test_a_uv_that_does_not_work_is_passed_over(checkout: Path, programs: Path, trouble: str):
    output, calls = run_noted(checkout, programs, **{trouble: "1"})
    assert "setup: uv cannot be used here" in output
    assert len(calls) == 4
    assert all(call.startswith("pip -m pip install") for call in calls)


def test_pip_alone_where_that_is_wanted(checkout: Path, programs: Path):
    output, calls = run_noted(checkout, programs, SETUP_WITH="pip")
    assert all(call.startswith("pip -m pip install") for call in calls)
    assert "uv" not in output


def test_what_was_left_half_made_is_made_anew(checkout: Path, programs: Path):
    first = run_setup(
        checkout, PATH=f"{programs}:/usr/bin:/bin", UV_FAILS_LIBRARIES="1", PIP_FAILS="1"
    )
    assert first.returncode == 1
    assert "setup: 2 of 5, libraries: failed" in first.stdout
    assert "setup: failed at 2 of 5, libraries; the end of" in first.stderr
    assert len(run_noted(checkout, programs)[1]) == 4


def test_another_python_than_that_of_the_environment_makes_a_new_one(
    checkout: Path, programs: Path
):
    run_noted(checkout, programs)
    other = programs / "other"
    other.write_text(NOTING_PYTHON.replace("${VERSION:-3.11}", "3.12"))
    other.chmod(0o755)
    assert len(run_noted(checkout, programs, PYTHON=str(other))[1]) == 4
    assert run_noted(checkout, programs, PYTHON=str(other))[1] == []


def test_an_environment_whose_python_is_gone_is_made_anew(checkout: Path, programs: Path):
    run_noted(checkout, programs)
    (checkout / ".venv" / "bin" / "python").write_text("#!/nowhere/python\n")
    assert len(run_noted(checkout, programs)[1]) == 4


def test_a_second_call_at_once_waits_and_finds_nothing_left_to_do(checkout: Path, programs: Path):
    (checkout / "calls").write_text("")
    environment = {"PATH": f"{programs}:/usr/bin:/bin", "HOME": str(checkout), "TORCH_INDEX": ""}
    with held(checkout / "deploy"):
        second = subprocess.Popen(
            [checkout / "deploy" / "setup.sh"], stdout=subprocess.PIPE, text=True, env=environment
        )
        assert second.stdout is not None
        assert second.stdout.readline() == "setup: another call makes .venv; waiting for it\n"
    output, _ = second.communicate()
    assert second.returncode == 0
    assert "setup: done" in output


@pytest.mark.parametrize(
    ("wheel", "size"),
    [
        ('{ url = "https://an.example/a.whl", size = 2_700_000_000 }', 2_700_000_123),
        ('{ url = "FOLDER/a%2Bcpu.whl" }', 127),
        ('{ url = "https://an.example/a.whl" }', None),
    ],
)
def test_the_size_of_a_download_is_that_of_its_wheels(tmp_path: Path, wheel: str, size: int | None):
    (tmp_path / "a+cpu.whl").write_bytes(b"four")
    small = (
        '[[packages]]\nname = "b"\nwheels = [{ url = "https://an.example/b.whl", size = 123 }]\n'
    )
    wheel = wheel.replace("FOLDER", tmp_path.as_uri())
    assert download_bytes(f'{small}[[packages]]\nname = "a"\nwheels = [{wheel}]\n') == size


@pytest.mark.parametrize(
    ("environment", "version", "told"),
    [
        ("tpu", "3.11", ["setup: unknown environment 'tpu': cpu, gpu or rehearsal\n"]),
        ("cpu", "3.14", ["is CPython 3.14"]),
        (
            "rehearsal",
            "3.11",
            ["CPython 3.12 is needed", "PYTHON=/path/to/python3.12 make rehearsal-setup"],
        ),
    ],
)
def test_an_unknown_environment_and_a_python_that_is_none_for_it_are_refused(
    checkout: Path, programs: Path, environment: str, version: str, told: list[str]
):
    done = run_setup(checkout, environment, PYTHON=str(programs / "python3.11"), VERSION=version)
    assert done.returncode == 2
    assert all(text in done.stderr for text in told)


def test_a_python_that_cannot_be_run_is_named(checkout: Path):
    done = run_setup(checkout, PYTHON="/nope")
    assert done.returncode == 2
    assert "CPython 3.11, 3.12 or 3.13 is needed; PYTHON=/nope cannot be run" in done.stderr
    assert "No such file" not in done.stderr
    assert not (checkout / ".venv").exists()


def test_other_versions_are_named_by_what_was_found(checkout: Path, tmp_path: Path):
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    for name, words in {
        "python3.11": "PyPy 3.11",
        "python3.12": "CPython 3.14",
        "python3": "CPython 3.9",
        "python": "CPython 2.7",
    }.items():
        fake_python(bin_folder / name, words)
    done = run_setup(checkout, PATH=f"{bin_folder}:/usr/bin:/bin")
    assert done.returncode == 2
    for found in (
        "python3.11 is PyPy 3.11",
        "python3.12 is CPython 3.14",
        "python3 is CPython 3.9",
    ):
        assert found in done.stderr
    assert "PYTHON=/path/to/python3.11 make setup" in done.stderr


def test_the_part_that_failed_is_named_with_the_end_of_its_log(checkout: Path, tmp_path: Path):
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\ncase "$*" in\n'
        "*'-m venv'*) echo 'no room for an environment'; exit 1 ;;\n"
        "*) echo CPython 3.11 ;;\nesac\n"
    )
    python.chmod(0o755)
    done = run_setup(checkout, PYTHON=str(python))
    assert done.returncode == 1
    assert "setup: failed at the environment; the end of" in done.stderr
    assert "no room for an environment" in done.stderr
    assert not (checkout / ".venv" / ".slipstream-setup").exists()

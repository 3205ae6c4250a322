"""What a hostile trajectory can do to its loader and to its neighbours: nothing."""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.container import in_container
from tests.support.tiny_run import ROOT
from tests.support.users import as_nobody
from tests.support.waiting import HANG_S

pytestmark = pytest.mark.integration
MODULE = [sys.executable, "-m", "tests.support.hostile_run"]


@pytest.fixture(scope="module", params=["root", "a normal user"])
def came_to(request: pytest.FixtureRequest) -> dict[str, Any]:
    if request.param == "root" and os.geteuid():
        pytest.skip("these tests are not run as root")
    done = ran(MODULE if request.param == "root" else as_nobody(MODULE))
    assert not done.returncode, done.stderr
    return dict(json.loads(done.stdout))


def ran(command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_S,
        env={**os.environ, "HOME": "/tmp", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},  # noqa: S108, TID251
    )


def test_no_attack_on_the_loader_a_neighbour_or_a_hidden_file_succeeds(came_to: dict[str, Any]):
    assert {name for name, succeeded in came_to["attacks"].items() if succeeded} == set()


def test_a_thief_of_later_trajectories_steals_none(came_to: dict[str, Any]):
    assert came_to["rewards"] == [[1.0, 0.0]] * 3


def test_nothing_outlives_its_trajectory(came_to: dict[str, Any]):
    assert came_to["left"] == 0


def test_code_of_the_policy_still_has_its_sandbox(came_to: dict[str, Any]):
    assert came_to["code"] == "42"


# Says what is found, then what a process has that is confined by it.
FOUND = """
from pathlib import Path
from slipstream.generators.environments.confinement import Confinement
found = Confinement.found()
print(*found.gaps, sep="\\n")
found.enter()
lines = Path("/proc/self/status").read_text().splitlines()
print([line.split()[1] for line in lines if line.startswith(("Uid:", "CapEff:"))])
"""
SEEN = "they share a PID namespace, and can see each other's processes"
SIGNALLED = "they share a PID namespace, and can signal each other's processes"
ROOTS = "they have root's user id, and so its files"
READS_FILES = "0000000000000004"
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may make such a place")


def without(capabilities: str, *command: str) -> list[str]:
    dropped = ",".join(f"-{one}" for one in capabilities.split())
    return ["setpriv", f"--bounding-set={dropped}", f"--inh-caps={dropped}", *command]


@as_root
def test_root_without_namespaces_still_gives_user_ids_of_their_own_and_says_what_is_shared():
    for command in (
        in_container([sys.executable, "-c", FOUND], {"pid": 0, "user": 0}),
        without("sys_admin", sys.executable, "-c", FOUND),
    ):
        done = ran(command)
        *gaps, refused, has = done.stdout.splitlines()
        assert gaps == [SEEN], done.stderr
        assert refused.startswith("refused: [Errno ")
        assert "unshare: " in refused
        uid, capabilities = ast.literal_eval(has)
        assert int(uid) > 1 << 30
        assert capabilities == READS_FILES


@as_root
def test_root_that_may_not_choose_ids_either_says_so_and_gives_up_its_rights():
    found = without("setuid", sys.executable, "-c", FOUND)
    done = ran(in_container(found, {"pid": 0, "user": 0}))
    *gaps, refused, has = done.stdout.splitlines()
    assert gaps == [SIGNALLED, ROOTS], done.stderr
    assert "unshare of a user namespace: No space left on device" in refused
    assert ast.literal_eval(has) == ["0", READS_FILES]


@as_root
def test_a_machine_without_further_namespaces_is_named_in_the_log_and_no_attack_succeeds():
    """The jail of the loader has the last one of IPC objects."""
    done = ran(in_container([*MODULE, "attacks"], {"ipc": 1}))
    assert not done.returncode, done.stderr
    attacks = json.loads(done.stdout)["attacks"]
    succeeded = {name for name, has_succeeded in attacks.items() if has_succeeded}
    assert succeeded <= {"see_arguments", "list_descriptors"}  # their numbers
    assert f"trajectories are not wholly apart: {SEEN}; refused: [Errno 28]" in done.stderr

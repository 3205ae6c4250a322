"""What a hostile trajectory can do to its loader and to its neighbours: nothing."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.support.tiny_run import ROOT
from tests.support.users import as_nobody
from tests.support.waiting import HANG_S

pytestmark = pytest.mark.integration
MODULE = [sys.executable, "-m", "tests.support.hostile_run"]


@pytest.fixture(scope="module", params=["root", "a normal user"])
def came_to(request: pytest.FixtureRequest) -> dict[str, Any]:
    if request.param == "root" and os.geteuid():
        pytest.skip("these tests are not run as root")
    done = subprocess.run(
        MODULE if request.param == "root" else as_nobody(MODULE),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_S,
        env={**os.environ, "HOME": "/tmp", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},  # noqa: S108, TID251
    )
    assert not done.returncode, done.stderr
    return dict(json.loads(done.stdout))


def test_no_attack_on_the_loader_a_neighbour_or_a_hidden_file_succeeds(came_to: dict[str, Any]):
    assert {name for name, succeeded in came_to["attacks"].items() if succeeded} == set()


def test_a_thief_of_later_trajectories_steals_none(came_to: dict[str, Any]):
    assert came_to["rewards"] == [[1.0, 0.0]] * 3


def test_nothing_outlives_its_trajectory(came_to: dict[str, Any]):
    assert came_to["left"] == 0


def test_code_of_the_policy_still_has_its_sandbox(came_to: dict[str, Any]):
    assert came_to["code"] == "42"

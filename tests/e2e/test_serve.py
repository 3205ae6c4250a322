"""`slipstream serve` starts every role, starts a killed one again, and ends them all."""

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from tests.support.served_tenants import Served
from tests.support.waiting import HANG_S, until

pytest.importorskip("tinker")
pytestmark = pytest.mark.e2e


def children_of(process: "subprocess.Popen[str]", module: str) -> list[psutil.Process]:
    every = psutil.Process(process.pid).children(recursive=True)
    return [one for one in every if one.is_running() and module in one.cmdline()]


def test_tenants_are_served_over_the_death_of_a_role_until_a_signal():
    with tempfile.TemporaryDirectory(prefix="sp-", dir="/tmp") as name:
        served = Served(Path(name), generators={"count": 1})
        words = [sys.executable, "-m", "slipstream.deploy.main", "serve", str(served.settings)]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        try:
            until(served.address.exists)
            until(lambda: children_of(process, "slipstream.learner.main"))
            (learner,) = children_of(process, "slipstream.learner.main")
            learner.kill()
            found = served.play("loop", key=served.key("alice"), kills=False)
            assert len(found["tokens"]) == 2
            assert children_of(process, "slipstream.learner.main") != [learner]
            left = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGINT)
            printed, _ = process.communicate(timeout=HANG_S)
        finally:
            process.kill()
            process.wait()
        assert process.returncode == 128 + signal.SIGINT
        assert f"tenants are served at {served.url}" in printed
        until(lambda: not any(one.is_running() for one in left))

"""What is told of an error that Ray gives back, without a cluster."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ray.exceptions import ActorDiedError, RayError, RayTaskError, RuntimeEnvSetupError

from slipstream.deploy.launch.cluster.ray_site import RayProcess, RaySite, _reason
from slipstream.deploy.launch.plan import RolePlan
from slipstream.wire.process.command_line import EXIT_FAILED
from tests.support.waiting import until

pytestmark = pytest.mark.integration
PLACES = "\x1b[36mray::_RayRoleHost.observe()\x1b[39m (pid=520, ip=10.0.0.7)\n  File role_host.py\n"


def raised(cause: BaseException, last: str = "") -> RayTaskError:
    text = f"{PLACES}{last or f'{type(cause).__name__}: {cause}'}"
    return RayTaskError("observe", text, cause, proctitle="p", pid=1, ip="10.0.0.7")


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (raised(OSError("no room")).as_instanceof_cause(), "OSError: no room"),
        (raised(ValueError("one\ntwo")).as_instanceof_cause(), "ValueError: one"),
        (raised(RayError("not serializable"), "Odd: why"), "Odd: why"),
        (ActorDiedError(raised(PermissionError("read-only"))), "PermissionError: read-only"),
        (RuntimeEnvSetupError("pip\nno such wheel"), "no such wheel"),
        (ConnectionError("no cluster\nstart one"), "no cluster"),
        (RayError(), "RayError"),
    ],
)
def test_an_error_of_ray_is_told_by_its_cause(error: BaseException, why: str):
    assert _reason(error) == why


def test_a_role_that_cannot_be_followed_names_the_cause_and_its_log_has_all(tmp_path: Path):
    def fails(_plan: RolePlan) -> None:
        raise raised(FileNotFoundError("role.log is gone")).as_instanceof_cause()

    site: Any = SimpleNamespace(rendezvous=None, host_of=fails)
    log = tmp_path / "generator-0.log"
    process = RayProcess(cast("RaySite", site), RolePlan("generator-0", ()), (), log)
    until(lambda: process.poll() is not None, "it ends")
    assert process.poll() == EXIT_FAILED
    assert process.ended_because == "FileNotFoundError: role.log is gone"
    text = log.read_text()
    assert text.startswith("generator-0 is not followed any more: ray::_RayRoleHost.observe()")
    assert text.endswith("FileNotFoundError: role.log is gone\n")

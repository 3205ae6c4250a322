"""What is told of an error that Ray gives back, without a cluster."""

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    RayError,
    RayTaskError,
    RuntimeEnvSetupError,
)
from rich.console import Console

from slipstream.deploy.config import run_config
from slipstream.deploy.launch.cluster.ray_calls import (
    HostCallError,
    HostLostError,
    HostUnreachableError,
    reason_of,
    translated,
)
from slipstream.deploy.launch.cluster.ray_process import PlacedHost, Placement, RayProcess
from slipstream.deploy.launch.cluster.ray_site import RayPlaces, RaySite
from slipstream.deploy.launch.plan import RolePlan
from slipstream.wire.errors import ConfigError
from slipstream.wire.process.command_line import EXIT_FAILED
from tests.support.blank_model import write_blank_model

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
    assert reason_of(error) == why


def test_a_call_that_failed_says_whether_its_host_is_lost():
    lost = translated(ActorDiedError(raised(PermissionError("read-only"))))
    assert type(lost) is HostLostError
    assert type(translated(ActorUnavailableError("no answer", None))) is HostUnreachableError
    assert type(translated(raised(OSError("no room")))) is HostCallError
    own = ConfigError("keys: no folder")
    assert translated(raised(own)) is own  # as the role host raised it


def test_a_role_that_cannot_be_followed_names_the_cause_and_its_log_has_all(tmp_path: Path):
    def fails(_plan: RolePlan) -> PlacedHost:
        raise translated(raised(FileNotFoundError("role.log is gone")).as_instanceof_cause())

    placement = cast("Placement", SimpleNamespace(host_of=fails))
    log = tmp_path / "generator-0.log"
    process = RayProcess(placement, RolePlan("generator-0", ()), (), log, Future())
    process.follow()
    assert process.poll() == EXIT_FAILED
    assert process.ended_because == "FileNotFoundError: role.log is gone"
    text = log.read_text()
    assert text.startswith("generator-0 is not followed any more: ray::_RayRoleHost.observe()")
    assert text.endswith("FileNotFoundError: role.log is gone\n")


@pytest.mark.parametrize(
    ("environment", "folder"),
    [({}, str(Path.cwd())), ({"pip": ["x"]}, str(Path.cwd())), ({"working_dir": "."}, "")],
)
def test_a_role_runs_in_the_same_folder_unless_ray_brings_one(
    tmp_path: Path, environment: dict[str, object], folder: str
):
    write_blank_model(tmp_path / "model", hidden=16, layers=1)
    config = run_config(
        {
            "run": {"name": "r", "dir": str(tmp_path), "model": str(tmp_path / "model")},
            "data": {"file": "train.jsonl"},
            "deploy": {"ray": {"runtime_env": environment}},
        }
    )
    site = RaySite(RayPlaces(config, Console(), has_gpus=False))
    host = PlacedHost(actor=None, node="1f", address="10.0.0.7", hostname="h")
    request = site.request(RolePlan("broker", ("start",)), (), host, Future())
    assert request.folder == folder

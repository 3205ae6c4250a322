"""What is told of an error that Ray gives back, without a cluster."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Event
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
from slipstream.deploy.launch.cluster import ray_calls
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
from tests.support.waiting import HANG_S, until

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
    def fails(_plan: RolePlan, _is_wanted: object) -> PlacedHost:
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


def places_of(folder: Path, environment: dict[str, object] | None = None) -> RayPlaces:
    write_blank_model(folder / "model", hidden=16, layers=1)
    config = run_config(
        {
            "run": {"name": "r", "dir": str(folder), "model": str(folder / "model")},
            "data": {"file": "train.jsonl"},
            "deploy": {"ray": {"runtime_env": environment or {}}},
        }
    )
    return RayPlaces(config, Console(), has_gpus=False)


@pytest.mark.parametrize(
    ("environment", "folder"),
    [({}, str(Path.cwd())), ({"pip": ["x"]}, str(Path.cwd())), ({"working_dir": "."}, "")],
)
def test_a_role_runs_in_the_same_folder_unless_ray_brings_one(
    tmp_path: Path, environment: dict[str, object], folder: str
):
    site = RaySite(places_of(tmp_path, environment))
    host = PlacedHost(actor=None, node="1f", address="10.0.0.7", hostname="h")
    request = site.request(RolePlan("broker", ("start",)), (), host, Future())
    assert request.folder == folder


def test_a_place_is_asked_for_once_though_its_process_was_ended_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A second host would wait for the place that the first one has."""
    places, placed = places_of(tmp_path), Event()
    hosts: list[PlacedHost] = []

    def place(names: Sequence[str]) -> None:
        hosts.append(PlacedHost(actor=None, node=str(len(hosts)), address="a", hostname="h"))
        assert placed.wait(HANG_S)
        places.hosts[names[0]] = hosts[-1]

    monkeypatch.setattr(places, "_place", place)
    with ThreadPoolExecutor() as pool:
        plan = RolePlan("learner-1", ())
        calls = [pool.submit(places.host_of, plan, lambda: True) for _ in range(2)]
        until(lambda: hosts, "nothing is placed")
        placed.set()
        assert [call.result() for call in calls] == [hosts[0]] * 2


def test_a_process_that_was_ended_while_another_was_placed_asks_for_no_place(tmp_path: Path):
    """It may have been the last one: the cluster was left."""
    assert places_of(tmp_path).host_of(RolePlan("learner-1", ()), lambda: False) is None


def test_a_process_that_was_ended_gives_up_no_host_of_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    places = places_of(tmp_path)
    first, second = (PlacedHost(None, node, "10.0.0.7", "h") for node in ("1", "2"))
    killed: list[object] = []
    monkeypatch.setattr(ray_calls, "is_alive", lambda _node: False)
    monkeypatch.setattr(ray_calls, "kill", killed.append)
    places.hosts["learner-1"] = second
    assert places.forget("learner-1", first) == "its node h (10.0.0.7) left the cluster"
    assert places.hosts == {"learner-1": second}
    assert places.forget("learner-1", None) == "its node left the cluster as it was to be started"
    assert places.hosts == {"learner-1": second}
    places.forget("learner-1", second)
    assert not places.hosts
    assert len(killed) == 2

"""Commands in the rendered compose file and SkyPilot task really run the tiny run, without either.

What Docker and SkyPilot do around the commands (folders, files, addresses) is done here by hand.
"""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from slipstream.deploy.launch.observer import status_now
from slipstream.wire.files.checkpoints import newest_checkpoint
from slipstream.wire.messages.status import RunStatus
from slipstream.wire.process.ports import free_port
from slipstream.wire.settings.sections import RunSection
from tests.e2e.hosts import Host, Roles, toml_of
from tests.support.probed import Role
from tests.support.tiny_run import ROOT, assert_complete, tiny_inputs, tiny_settings
from tests.support.waiting import until

pytestmark = [pytest.mark.e2e]
ENVIRONMENT = {
    **os.environ,  # noqa: TID251 handed on
    "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
    "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
    "OMP_NUM_THREADS": "1",
}


def rendered(
    folder: Path, target: str, *overrides: str, changed: Mapping[str, object] | None = None
) -> Path:
    """Return the folder that a target was rendered into."""
    tiny_inputs(folder)
    settings = tiny_settings(folder) | {
        "run.dir": "runs",
        "generators.device": "cpu",
        "checkpoint.export_at_end": False,
    }
    (folder / "run.toml").write_text(toml_of(settings | dict(changed or {})))
    call = ["slipstream", "render", target, "--config", "run.toml", "--out", "o", *overrides]
    subprocess.run(call, cwd=folder, env=ENVIRONMENT, check=True, capture_output=True)
    return folder / "o"


class Compose:
    """A compose file whose containers are this host."""

    def __init__(self, out: Path) -> None:
        text = (out / "compose.yaml").read_text()
        self.services: dict[str, dict[str, Any]] = yaml.safe_load(text)["services"]
        count = len(self.services)
        self._ports = {str(8081 + i): str(free_port()) for i in range(count)}
        self._ports["6379"] = str(free_port())
        self._paths = {
            "/etc/slipstream": str(out),
            "/run/slipstream": str(out / "sockets"),
            "/run/secrets": str(out),
            "/data": str(out / "redis"),
        }

    def probes_port(self, name: str) -> int:
        """Return the port of a service on this host."""
        words: list[str] = self.services[name]["command"]
        return int(self._ports[words[words.index("--health") + 1]])

    def here(self, words: list[str]) -> list[str]:
        """Return a command as it is inside of a container, with this host's paths and ports."""
        found = []
        for word in words:
            one = word.replace("$$", "$")
            for theirs, ours in self._paths.items():
                one = one.replace(theirs, ours)
            for theirs, ours in self._ports.items():
                one = ours if one == theirs else one
                if theirs == "6379":
                    one = one.replace(theirs, ours)
            found.append(one)
        return found

    def is_healthy(self, name: str) -> bool:
        kind, *words = self.services[name]["healthcheck"]["test"]
        call = self.here(words if kind == "CMD" else ["sh", "-c", *words])
        done = subprocess.run(call, env=ENVIRONMENT, check=False, capture_output=True)
        return done.returncode == 0


def started_service(compose: Compose, name: str, roles: Roles, home: Path) -> Role:
    """Start a service once those that it depends on are healthy."""
    service = compose.services[name]
    for needed in service.get("depends_on", {}):
        assert service["depends_on"][needed] == {"condition": "service_healthy"}

        def is_up(needed: str = needed) -> bool:
            assert roles.processes[needed].poll() is None, roles.logs()
            return compose.is_healthy(needed)

        until(is_up, roles.logs)
    environment = service.get("environment", {}) | {"HOME": str(home)}
    here = Host("", home, ENVIRONMENT | environment)
    process = roles.start(here, name, shlex.join(compose.here(service["command"])))
    port = 0 if name == "redis" else compose.probes_port(name)
    return Role(process, port, lambda: roles.log(name))


def test_services_of_the_compose_file_become_ready_and_end_in_order_when_they_are_stopped(
    tmp_path: Path,
):
    if shutil.which("redis-server") is None or shutil.which("redis-cli") is None:
        pytest.skip("redis-server and redis-cli are in the image of that service, not here")
    out = rendered(tmp_path, "compose", changed={"run.steps": 10_000})
    subprocess.run(["bash", out / "prepare.sh"], env=ENVIRONMENT, check=True)
    password = out / "redis_password"
    assert password.stat().st_mode & 0o777 == 0o600
    compose = Compose(out)
    folder = tmp_path / "runs" / "tiny"
    section = RunSection(name="tiny", dir=str(folder.parent), socket_dir=str(out / "sockets"))

    def status() -> RunStatus:
        return status_now(section)

    with Roles() as roles:
        redis, broker, generator = (
            started_service(compose, name, roles, tmp_path)
            for name in ("redis", "broker", "generator-0")
        )
        for reason in ("it waits for its engine to start", "adopted no version"):
            generator.until_it_says("ready", lambda said, why=reason: why in said["reason"])
        assert generator.says("live")["state"] == "running"
        worker, learner = (
            started_service(compose, name, roles, tmp_path)
            for name in ("reward-worker-0", "learner")
        )
        assert set(roles.processes) == set(compose.services)
        learner.until_it_says(
            "ready", lambda said: said["reason"] == "it waits for its policy to load"
        )
        for role in (generator, worker, learner):
            role.until_ready()
        until(lambda: status().steps >= 2, "two steps are not trained", every_s=0.5)
        for name, process in roles.processes.items():
            assert compose.is_healthy(name)
            words = " ".join(psutil.Process(process.pid).cmdline())
            assert password.read_text().strip() not in words
        for role in (generator, worker, learner, broker):
            assert role.says("live")["live"]
            assert role.says("ready")["ready"]

        until(
            lambda: any(one.leases for one in status().roles if one.role == "generator"),
            "the generator has no work",
        )
        assert generator.ends() == 0, generator.log
        assert "asked to stop" in generator.log
        after = status()
        assert not {"lease_exhausted", "poison"} & set(after.dropped)
        assert after.queue["lapsed_leases"] == 0, "it handed them back"
        assert [one.leases for one in after.roles if one.role == "generator"] in ([], [0])
        assert worker.ends() == 0, worker.log
        assert [one.leases for one in status().roles if one.role == "reward_worker"] in ([], [0])
        assert learner.ends() == 0, learner.log
        steps = status().steps
        assert newest_checkpoint(folder) == folder / "checkpoints" / f"step-{steps:06d}"
        assert status().unaccounted == 0
        assert broker.says("ready")["ready"], "it waits for others to come"
        assert broker.ends() == 0, broker.log
        assert redis.ends() == 0, redis.log
        for role in (generator, worker, learner, broker):
            assert "Traceback" not in role.log
            assert not role.says("live")["live"]
    assert list((out / "redis").rglob("*.aof")), "its file is kept on the host"


def test_docker_accepts_the_compose_file(tmp_path: Path):
    docker = shutil.which("docker")
    call = [docker or "docker", "compose", "version"]
    if docker is None or subprocess.run(call, check=False, capture_output=True).returncode:
        pytest.skip("docker compose is not here")
    out = rendered(tmp_path, "compose")
    subprocess.run(["bash", out / "prepare.sh"], env=ENVIRONMENT, check=True)
    check = [docker, "compose", "-f", str(out / "compose.yaml"), "config", "--quiet"]
    subprocess.run(check, check=True)


@pytest.mark.slow  # compose runs above, commands of two hosts in tests/e2e/test_remote_roles.py
def test_the_task_of_skypilot_runs_on_two_nodes(tmp_path: Path):
    port = free_port()
    overrides = (f"deploy.skypilot.port={port}", "generators.count=2")
    out = rendered(tmp_path, "skypilot", *overrides)
    subprocess.run(["bash", out / "make-keys.sh"], env=ENVIRONMENT, check=True)
    task = yaml.safe_load((out / "task.yaml").read_text())
    assert task["num_nodes"] == 2
    for there, source in task["file_mounts"].items():
        target = tmp_path / there.removeprefix("~/")
        target.parent.mkdir(exist_ok=True)
        if Path(source).is_dir():
            shutil.copytree(source, target)
            target.chmod(0o755)  # a copy need not keep it private
        else:
            shutil.copy(source, target)
    of_a_node = {
        "HOME": str(tmp_path),
        "TMPDIR": "/tmp",  # noqa: S108 short enough for sockets
        "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2",
    }
    with Roles() as started:
        for rank in ("0", "1"):
            own = ENVIRONMENT | of_a_node | {"SKYPILOT_NODE_RANK": rank}
            command = shlex.join(["bash", "-c", task["run"]])
            started.start(Host("", tmp_path, own), f"node-{rank}", command)
        started.wait("node-0", "node-1")
    assert_complete(tmp_path / "runs" / "tiny", 16)

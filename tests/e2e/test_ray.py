"""`slipstream run --on ray` on three nodes with addresses of their own (network namespaces).

Ray is started as docs/clusters.md says, with token authentication.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from slipstream.deploy.launch.cluster.role_host import RoleHost
from slipstream.wire.files.run_folder import SUMMARY
from tests.e2e.hosts import Host, end, several_hosts, toml_of
from tests.support.listening import Listener, listeners_of
from tests.support.tiny_run import REWARD, assert_complete, gated_reward, tiny_inputs, tiny_settings
from tests.support.waiting import HANG_S, until

pytestmark = [pytest.mark.e2e]
LAST_CHARACTERS = 3000
LOOK_S, POLL_S = 1.0, 0.2
# A node that is killed answers nothing at once; one that is busy has as long as by default.
ASKED_OFTEN = '{"health_check_period_ms": 500}'
RAY_STEPS = 28  # more than a slow machine takes until the second generator has answered


def pids_on(host: Host) -> list[int]:
    done = subprocess.run(
        ["ip", "netns", "pids", host.name], capture_output=True, text=True, check=True
    )
    return [int(word) for word in done.stdout.split()]


def lose(host: Host) -> None:
    """Kill everything on a node, as if its power was cut."""
    for _ in range(3):  # those that were forked meanwhile
        for pid in pids_on(host):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextmanager
def ray_cluster(hosts: list[Host], folder: Path, *, is_open: bool = False) -> Iterator[None]:
    """Start Ray on every host; the environment of the hosts has its token.

    The head of one that is open has none, and no room.
    """
    token = folder / "ray.token"
    token.write_text(os.urandom(32).hex())
    token.chmod(0o600)
    for i, host in enumerate(hosts):
        host.environment = host.environment | {"RAY_USAGE_STATS_ENABLED": "0"}
        if i > 0 or not is_open:
            host.environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    temporary = Path(f"/tmp/r{os.getpid()}{'o' if is_open else 't'}")  # noqa: S108 sockets: their paths are to be short
    try:
        for i, host in enumerate(hosts):
            address = f"10.77.0.{i + 1}"
            place = f"--address 10.77.0.1:6379 --node-ip-address {address}"
            if i == 0:
                place = (
                    f"--head --port 6379 --node-ip-address {address} "
                    f"--include-dashboard=false --temp-dir {temporary} --labels node=head "
                    f"--system-config '{ASKED_OFTEN}'"
                )
            without = "--disable-usage-stats --include-log-monitor false"  # nobody reads these
            cpus = 0 if i == 0 and is_open else 4
            host.run(f"ray start {place} --num-cpus {cpus} {without}")
        yield
    finally:
        for host in hosts:
            lose(host)
        subprocess.run(["rm", "-rf", str(temporary)], check=False)
        RoleHost().close()  # the next one on a host removes what those that were killed left


REFUSALS = {
    "": "10.77.0.1:6379, the head of the Ray cluster, answers without a token",
    "deploy.ray.require_token=false deploy.ray.cpus.broker=100 deploy.ray.start_timeout_s=0.1": (
        "the cluster has no room for the services within 0.1 s (deploy.ray.start_timeout_s)"
    ),
}


def test_a_cluster_with_an_open_head_or_without_room_is_refused_in_one_line(tmp_path: Path):
    """The node that has room for the roles has a token: nothing is wrong with it."""
    with (
        several_hosts(tmp_path, "head", "two") as hosts,
        ray_cluster(hosts, tmp_path, is_open=True),
    ):
        host = hosts[1]
        write_run(host, REWARD, {}, label="")
        for number, (settings, expected) in enumerate(REFUSALS.items()):
            output = host.folder / f"refused-{number}.log"
            run = host.start(f"slipstream run --config run.toml --on ray {settings}", output)
            code = run.wait(HANG_S)
            lines = [line for line in output.read_text().splitlines() if expected in line]
            assert (code, len(lines)) == (2, 1), output.read_text()
            assert "Traceback" not in output.read_text()
            assert_nothing_left(hosts)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    """Yield a cluster; the last test that uses it may lose a node."""
    folder = tmp_path_factory.mktemp("ray")
    with several_hosts(folder, "head", "two", "three") as hosts, ray_cluster(hosts, folder):
        yield hosts


def write_run(head: Host, reward: str, settings: dict[str, object], *, label: str = "head") -> None:
    """Write a run and its inputs to a node's folder; the broker is to be where the label is."""
    tiny_inputs(head.folder)
    (head.folder / "reward.py").write_text(reward)
    merged = tiny_settings(head.folder) | {"checkpoint.export_at_end": False} | settings
    on_head = f'[deploy.ray.labels]\nbroker = {{ node = "{label}" }}\n' if label else ""
    (head.folder / "run.toml").write_text(toml_of(merged) + on_head)


def assert_nothing_left(hosts: list[Host]) -> None:
    """Ray's own processes are all that is on the nodes."""
    for host in hosts:
        until(lambda host=host: not left_on(host), lambda host=host: str(left_on(host)))


class RayRun:
    """`slipstream run --on ray` on the first node."""

    def __init__(self, hosts: list[Host], **settings: object) -> None:
        self.hosts = hosts
        self.folder = hosts[0].folder / "runs" / "tiny"
        self.gate = hosts[0].folder / "gate"
        shutil.rmtree(hosts[0].folder / "runs", ignore_errors=True)
        self.gate.unlink(missing_ok=True)
        named = {name.replace("__", "."): value for name, value in settings.items()}
        write_run(hosts[0], gated_reward(self.gate), named)
        self.output = hosts[0].folder / "run.log"
        self.process = self.start()
        self.listeners: set[Listener] = set()
        self._next_look_s = 0.0

    def start(self, *words: str) -> "subprocess.Popen[bytes]":
        command = f"slipstream run --config run.toml --on ray {' '.join(words)}"
        return self.hosts[0].start(command, self.output)

    def wait_until(self, is_so: Callable[[], object], what: str) -> None:
        def check() -> bool:
            assert self.process.poll() is None, f"ended before {what}:\n{self.output.read_text()}"
            if time.monotonic() >= self._next_look_s:  # it takes a tenth of a second of a core
                pids = [pid for host in self.hosts for pid in pids_on(host)]
                self.listeners |= listeners_of(pids)
                self._next_look_s = time.monotonic() + LOOK_S
            return bool(is_so())

        until(check, lambda: f"no {what}:\n{self.last_words()}", every_s=POLL_S)

    def last_words(self) -> str:
        """Return the end of what the command and every role wrote: who waits, and for what."""
        files = [self.output, *sorted((self.folder / "logs").glob("*.log"))]
        return "\n".join(f"{one.name}:\n{one.read_text()[-LAST_CHARACTERS:]}" for one in files)

    def wait(self) -> int:
        code = self.process.wait(2 * HANG_S)
        assert code == 0, self.last_words()
        return code

    def interrupt(self) -> None:
        """Press Ctrl-C: the command is what `ip netns exec` became."""
        self.process.send_signal(signal.SIGINT)

    def node_of(self, role: str) -> str:
        """Return the address of the node that a role was placed on first."""
        lines = self.output.read_text().splitlines()
        (line,) = [line for line in lines if line.startswith(f"{role} is on ")]
        return line.rpartition("(")[2].rstrip(")")

    def log(self, role: str) -> str:
        path = self.folder / "logs" / f"{role}.log"
        return path.read_text() if path.exists() else ""

    def figures(self) -> dict[str, Any]:
        path = self.folder / SUMMARY
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"steps": 0}
        return found

    def answers_by_generator(self) -> dict[str, float]:
        return {
            one["name"].rpartition("/")[2]: one["trajectories"]
            for one in self.figures().get("roles", [])
            if one["role"] == "generator"
        }

    def assert_complete(self) -> None:
        assert_complete(self.folder)
        assert {int(lag) for lag in self.figures()["staleness_histogram"]} <= {0, 1, 2}

    def assert_only_keys_connect(self) -> None:
        """Beyond loopback nothing of ours has listened but broker and relay, which ask for keys.

        The ranks of a learner of several nodes are the exception that docs/security.md names:
        torch.distributed, on the address of their node alone.
        """
        ours = [one for one in self.listeners if not one.on_loopback and not is_of_ray(one.program)]
        elsewhere = [str(one) for one in ours if not one.address.startswith("10.77.0.")]
        assert not elsewhere, "\n".join(elsewhere)
        roles = {one.program.partition("slipstream.")[2].partition(".main")[0] for one in ours}
        unknown = [str(one) for one in ours if "slipstream." not in one.program]
        assert not unknown, "\n".join(unknown)
        assert roles == {"broker", "weightbus.relay", "learner"}, roles
        endpoint = (
            self.output.read_text().partition("the broker listens on tcp://")[2].split(",")[0]
        )
        ports = {f"{one.address}:{one.port}" for one in ours if ".broker." in one.program}
        assert ports == {endpoint}


def is_of_ray(program: str) -> bool:
    """True of Ray's processes and of the driver, whose listener is Ray's and asks for the token."""
    names = ("ray::", "gcs_server", "raylet", "python -u monitor.py", "python -m ray.")
    is_worker = "default_worker.py" in program or "setup_worker.py" in program
    return program.startswith(names) or is_worker or " run --config" in program


def programs_on(host: Host) -> dict[str, int]:
    """Return the niceness of each program on a host; processes end meanwhile."""
    found = {}
    for pid in pids_on(host):
        with suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            found[words] = os.getpriority(os.PRIO_PROCESS, pid)
    return found


def left_on(host: Host) -> list[str]:
    return [one for one in programs_on(host) if "slipstream" in one or "_RayRoleHost" in one]


def niceness_of_roles(host: Host) -> set[int]:
    """Return the niceness of what our roles run; what advises about a run is nice itself."""
    found = programs_on(host).items()
    return {
        niceness for words, niceness in found if re.search(r" -m slipstream\.(?!deploy)", words)
    }


@pytest.fixture
def run_on(nodes: list[Host]) -> Iterator[Callable[..., RayRun]]:
    runs: list[RayRun] = []

    def start(**settings: object) -> RayRun:
        runs.append(RayRun(nodes, **settings))
        return runs[-1]

    yield start
    for run in runs:
        if run.process.poll() is None:
            end(run.process)


def test_a_check_looks_at_every_node_and_gives_all_back(nodes: list[Host]):
    """The learner needs a whole node: what an interrupted check kept, the next one would lack."""
    head = nodes[0]
    gate, began = head.folder / "gate", head.folder / "began"
    text = gated_reward(gate).replace("while", f"open({str(began)!r}, 'w')\n    while")
    settings = {"reward.timeout_s": HANG_S, "deploy.ray.cpus.learner": 4}
    write_run(head, text, settings)
    files = set(head.folder.rglob("*"))

    def start(output: str) -> "subprocess.Popen[bytes]":
        return head.start("slipstream check --config run.toml --on ray", head.folder / output)

    first = start("first.log")
    until(began.exists, lambda: (head.folder / "first.log").read_text())
    first.send_signal(signal.SIGINT)
    assert first.wait(HANG_S) == 130, (head.folder / "first.log").read_text()
    assert_nothing_left(nodes)
    gate.touch()
    second = start("second.log")
    assert second.wait(HANG_S) in {0, 1}, (head.folder / "second.log").read_text()
    lines = (head.folder / "second.log").read_text().splitlines()
    headings = [line for line in lines if "(10.77.0." in line and ": " in line and line[:2] == "vm"]
    trouble = [line for line in lines if line.startswith(("warn", "fail"))]
    assert not [line for line in trouble if not line.startswith("warn fsync")], (
        "but for a busy disk"
    )
    roles = {role for line in headings for role in line.rpartition("): ")[2].split(", ")}
    assert roles == {"broker", "learner", "generator-0", "reward-worker-0"}
    assert not [line for host in nodes for line in left_on(host)]
    made = {began, gate, head.folder / "first.log", head.folder / "second.log"}
    assert set(head.folder.rglob("*")) - files == made
    gate.unlink()


@pytest.mark.slow  # of one host: tests/e2e/test_user_loop.py
def test_ctrl_c_saves_and_the_run_resumes_on_the_cluster(run_on: Callable[..., RayRun]):
    run = run_on(run__steps=200, generators__count=2)
    run.gate.touch()
    run.wait_until(lambda: run.figures()["steps"] >= 3, "three steps")
    run.interrupt()
    assert run.process.wait(HANG_S) == 130, run.output.read_text()
    assert "resume from it with --resume auto" in run.output.read_text()
    assert_nothing_left(run.hosts)
    steps = run.figures()["steps"]
    run.process = run.start("--resume auto", f"run.steps={steps + 3}")
    run.wait()
    run.assert_complete()
    assert run.figures()["steps"] == steps + 3
    assert_nothing_left(run.hosts)


def test_generators_come_and_go_and_a_lost_node_is_replaced(run_on: Callable[..., RayRun]):
    run = run_on(
        run__steps=RAY_STEPS,
        learner__ranks=2,
        learner__ranks_per_node=1,
        checkpoint__every_steps=2,
        reward__timeout_s=HANG_S,
    )
    head = run.hosts[0]
    run.wait_until(lambda: "adopted v1.0" in run.log("generator-0"), "generator")

    assert set.union(*map(niceness_of_roles, run.hosts)) == {os.getpriority(os.PRIO_PROCESS, 0)}
    head.run("slipstream scale runs/tiny generators=2")
    run.wait_until(lambda: "adopted v1.0" in run.log("generator-1"), "second generator")
    run.gate.touch()
    run.wait_until(lambda: min(run.answers_by_generator().values(), default=0) > 0, "answers of 2")
    run.gate.unlink()
    head.run("slipstream scale runs/tiny generators=1")
    run.wait_until(
        lambda: (
            "generators: 2 -> 1" in run.output.read_text()
            and sum("slipstream.generators.main" in line for h in run.hosts for line in left_on(h))
            == 1
        ),
        "end of the second generator",
    )
    scaled_at = run.figures()["steps"]
    assert scaled_at < RAY_STEPS - 6, "the run was nearly over"
    run.gate.touch()
    run.wait_until(lambda: run.figures()["steps"] >= scaled_at + 2, "steps by one generator")

    learners = {run.node_of(name) for name in ("learner", "learner-1")}
    assert len(learners) == 2
    others = learners - {"10.77.0.1"}  # not the broker's, which is also this command's
    lost = min(others, key=lambda node: node == run.node_of("generator-0"))  # an engine starts long
    lose(run.hosts[int(lost.rpartition(".")[2]) - 1])
    run.wait()
    run.assert_complete()
    text = run.output.read_text()
    assert "restarting it" in text
    run.assert_only_keys_connect()
    assert_nothing_left(run.hosts)

"""Starts a run of real processes under the real supervisor, and does things to it.

Real: broker, its Redis, its store, its clients, reward worker, agents, tokenizer, supervisor.
Scripted: the engine (tests/chaos/generator.py) and the weights (tests/chaos/trainer.py).
"""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import tomli_w

from slipstream.broker.store.private_server import RedisServer
from slipstream.deploy.launch.observer import fetch_account
from slipstream.deploy.launch.plan import RolePlan
from slipstream.deploy.launch.starters import LocalStarter
from slipstream.deploy.launch.supervise import Supervisor
from slipstream.wire.errors import PeerLostError
from slipstream.wire.files.run_folder import ACCOUNT, BATCHES
from slipstream.wire.files.trajectory_file import read_groups
from slipstream.wire.messages.ledger_view import LedgerView
from slipstream.wire.settings.load import load_table
from slipstream.wire.settings.sections import run_section
from tests.chaos.trainer import Weights, chained
from tests.support.blank_model import write_blank_model
from tests.support.waiting import HANG_S

ROOT = Path(__file__).parents[2]
REWARD = """
def score(data_source, solution_str, ground_truth, extra_info):
    return (sum(map(ord, solution_str)) % 5) / 4
"""
LEASE_S = 5.0
GROUP_SIZE = 2


@dataclass
class Chaos:
    """One run; ``folder`` is short enough for Unix sockets."""

    folder: Path
    seed: int
    supervisor: Supervisor
    plans: dict[str, RolePlan]
    stopped: dict[int, float] = field(default_factory=dict)  # pid -> when it resumes
    done: Counter[str] = field(default_factory=Counter)  # what was done to which process

    @property
    def run_folder(self) -> Path:
        return self.folder / "runs" / "chaos"

    def start(self) -> None:
        for plan in self.plans.values():
            self.supervisor.start(plan)

    def pid_of(self, role: str) -> int | None:
        """Return a living process of a role; ``redis`` is the broker's child."""
        if role == "redis":
            broker = self.pid_of("broker")
            if broker is None:
                return None
            with suppress(psutil.Error):
                for child in psutil.Process(broker).children():
                    if "redis" in child.name() or "valkey" in child.name():
                        return child.pid
            return None
        process = self.supervisor.children[role].process
        return process.pid if process is not None and process.poll() is None else None

    def kill(self, role: str) -> bool:
        """Kill -9; False if there was no process to kill."""
        return self._signal(role, signal.SIGKILL, "kill")

    def stop(self, role: str, seconds: float) -> bool:
        """SIGSTOP, and SIGCONT some time later."""
        pid = self.pid_of(role)
        if not self._signal(role, signal.SIGSTOP, "stop") or pid is None:
            return False
        self.stopped[pid] = time.monotonic() + seconds
        return True

    def _signal(self, role: str, signum: signal.Signals, what: str) -> bool:
        pid = self.pid_of(role)
        if pid is None or pid in self.stopped:
            return False
        with suppress(ProcessLookupError):
            os.kill(pid, signum)
            self.done[f"{what} {role}"] += 1
            return True
        return False

    def wake_and_restart(self) -> None:
        """Wake processes that slept long enough; have the supervisor restart dead ones."""
        now = time.monotonic()
        for pid, until in list(self.stopped.items()):
            if now >= until:
                del self.stopped[pid]
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        self.supervisor.check()

    def wait_until(
        self, condition: Callable[[], bool], what: str, timeout_s: float = HANG_S
    ) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"no {what} in {timeout_s:.0f} s\n{self.logs()}"
            self.wake_and_restart()
            time.sleep(0.02)

    def finish(self, timeout_s: float = 4 * HANG_S) -> None:
        """Wait for the end of the run, then end the broker in order."""
        others = [name for name in self.plans if not name.startswith("broker")]
        self.wait_until(lambda: self.supervisor.finished(others), "end of the run", timeout_s)
        broker = next(plan.name for plan in self.plans.values() if plan.name not in others)
        self.wait_until(lambda: self.pid_of(broker) is not None, "broker")
        self.wait_until(lambda: self.broker_answers(), "answer of the broker")
        self.supervisor.stop()

    def broker_answers(self) -> bool:
        run = run_section(load_table(self.folder / "run.json.toml"))
        try:
            fetch_account(run, 0)
        except PeerLostError:
            return False
        return True

    def recorded(self) -> list[tuple[int, int]]:
        """Return (step, group) of every group in the recorded batches."""
        groups = read_groups(self.run_folder / BATCHES)
        return [(one.step, one.group.group_id) for one in groups]

    def steps(self) -> int:
        path = self.run_folder / "summary.json"
        return int(json.loads(path.read_text())["steps"]) if path.exists() else -1

    def account(self) -> LedgerView:
        return msgspec.json.decode((self.run_folder / ACCOUNT).read_bytes(), type=LedgerView)

    def weights(self) -> Weights:
        return Weights.load(self.run_folder / "final.json")

    def logs(self) -> str:
        tails = []
        for log in sorted((self.run_folder / "logs").glob("*.log")):
            lines = log.read_text(errors="replace").splitlines()[-15:]
            tails.append(f"---- {log.name}\n" + "\n".join(lines))
        return "\n".join(tails)

    def assert_nothing_was_lost(self, num_prompts: int) -> LedgerView:
        """The equation, the bound, each prompt once, and weights that match their label."""
        assert not (self.run_folder / "complaints").exists(), (
            self.run_folder / "complaints"
        ).read_text()
        view, weights = self.account(), self.weights()
        assert view.finished, view
        assert view.unaccounted == 0
        assert sum(view.in_flight.values()) == 0
        assert view.issued == num_prompts == view.trained + sum(view.dropped.values())
        trained = [group for groups, _ in weights.lineage.values() for group in groups]
        assert len(set(trained)) == len(trained) == view.trained
        assert sorted(weights.lineage) == list(range(view.version.step))
        digest = ""
        for step in sorted(weights.lineage):
            digest = chained(digest, *weights.lineage[step])
        assert digest == weights.digest
        harmless = {"zero_variance", "orphaned", "nonfinite", "stale", "end_of_data"}
        unanswered = {why: n for why, n in view.dropped.items() if why not in harmless}
        assert sum(unanswered.values()) <= 0.02 * num_prompts, view.dropped
        summary = json.loads((self.run_folder / "summary.json").read_text())
        bound = summary["max_staleness_steps"]
        assert all(0 <= int(lag) <= bound for lag in summary["staleness_histogram"])
        return view


@contextmanager
def chaos_run(
    folder: Path,
    *,
    prompts: int,
    seed: int = 0,
    generators: int = 2,
    broker_module: str = "slipstream.broker.main",
    broker_arguments: tuple[str, ...] = (),
    trainer_arguments: tuple[str, ...] = (),
    clients_sockets: str = "sockets",
    reward: str = REWARD,
    reward_workers: int = 1,
    **settings: object,
) -> Iterator[Chaos]:
    """Yield a run that has not been started; end everything afterwards.

    ``settings`` are of the form ``broker__lease_s=1.0``.
    """
    write_blank_model(folder / "model", hidden=16, layers=1)
    (folder / "reward.py").write_text(reward)
    rows = [
        {"prompt": f"{i % 100:02d}+{i // 100:02d}=", "ground_truth": str(i)} for i in range(prompts)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:6]))
    table: dict[str, dict[str, Any]] = {
        "run": {
            "name": "chaos",
            "dir": str(folder / "runs"),
            "model": str(folder / "model"),
            "group_size": GROUP_SIZE,
            "groups_per_step": 4,
            "steps": 1_000_000,
            "epochs": 1.0,
            "min_groups": 1,
            "max_staleness_steps": 2,
            "outage_s": 300.0,
            "socket_dir": str(folder / "sockets"),
        },
        "data": {"file": str(folder / "train.jsonl")},
        "reward": {"function": f"{folder / 'reward.py'}:score", "credits": 8},
        "broker": {
            "lease_s": LEASE_S,
            "max_attempts": 30,  # a prompt that many kills met is no poison
            "dashboard": {"enabled": False},
        },
        "logging": {"trackers": []},
        "eval": {},
        "sampling": {"max_prompt_tokens": 16, "max_response_tokens": 200},
        "generators": {"max_sequences": 16},
    }
    for key, value in settings.items():
        section, name = key.split("__", 1)
        table[section][name] = value
    config = folder / "run.json.toml"
    _write_toml(config, table)
    clients = folder / "clients.toml"
    table["run"]["socket_dir"] = str(folder / clients_sockets)
    _write_toml(clients, table)
    (folder / "runs" / "chaos" / "logs").mkdir(parents=True)
    (folder / "scratch").mkdir()

    def role(
        name: str, module: str, path: Path, *arguments: str, again: tuple[str, ...] = ()
    ) -> RolePlan:
        command = (sys.executable, "-m", module, "--config", str(path), *arguments)
        environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        serves_others = name == "broker"
        return RolePlan(name, command, again, environment=environment, serves_others=serves_others)

    plans = [
        role("broker", broker_module, config, *broker_arguments, again=("--restarted",)),
        role("learner", "tests.chaos.trainer", clients, *trainer_arguments),
        *(
            role(name, module, clients, "--name", name)
            for kind, module, count in (
                ("reward-worker", "slipstream.broker.reward_worker.main", reward_workers),
                ("generator", "tests.chaos.generator", generators),
            )
            for name in (f"{kind}-{i}" for i in range(count))
        ),
    ]
    supervisor = Supervisor(
        logs=folder / "runs" / "chaos" / "logs",
        start_process=LocalStarter(folder / "scratch").start,
        max_restarts=1_000,
        window_s=0.5,
        backoff_s=0.05,
        stop_timeout_s=10.0,
    )
    it = Chaos(folder, seed, supervisor, {plan.name: plan for plan in plans})
    try:
        yield it
    finally:
        for pid in it.stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        supervisor.stop(timeout_s=5.0)


def _write_toml(path: Path, table: dict[str, dict[str, Any]]) -> None:
    path.write_text(tomli_w.dumps(table))


def disturb(
    it: Chaos, *, kills: int, stops: int = 0, every_s: tuple[float, float] = (0.3, 1.2)
) -> None:
    """Kill and stop roles at random moments, until so many were hit."""
    rng = random.Random(it.seed)
    roles = ["broker", "redis", "learner", "reward-worker-0", "generator-0", "generator-1"]
    wanted = ["kill"] * kills + ["stop"] * stops
    rng.shuffle(wanted)
    for what in wanted:
        pause_until = time.monotonic() + rng.uniform(*every_s)
        it.wait_until(lambda: time.monotonic() > pause_until, "moment")  # noqa: B023
        hit = False
        deadline = time.monotonic() + HANG_S
        while not hit:
            assert time.monotonic() < deadline, f"no process to {what}\n{it.logs()}"
            assert not it.supervisor.finished(["learner"]), "the run was over: make it longer"
            role = rng.choice(roles)
            hit = (
                it.kill(role) if what == "kill" else it.stop(role, rng.uniform(0.2, 1.5 * LEASE_S))
            )
            it.wake_and_restart()


@contextmanager
def mounted(folder: Path, megabytes: int) -> Iterator[None]:
    """Mount a small file system there; skip the test where that is not allowed."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    if subprocess.run(command, check=False, capture_output=True).returncode != 0:
        pytest.skip("a small disk cannot be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def redis_server(folder: Path) -> Iterator[dict[str, str]]:
    """Yield settings of a server that is our child alone."""
    (folder / "redis").mkdir()
    socket = folder / "redis.sock"
    server = RedisServer.launch(
        socket=socket, folder=folder / "redis", log_file=folder / "redis.log", fsync="always"
    )
    try:
        asyncio.run(server.until_listening(socket))
        password = folder / "redis.password"
        password.touch(mode=0o600)
        password.write_text(server.password)
        yield {"url": server.url, "password_file": str(password)}
    finally:
        server.stop()

"""docs/rewards.md, followed word for word on two hosts (network namespaces)."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from slipstream.broker.server.keyring import make_client_key
from slipstream.wire.files.run_folder import ACCOUNT
from tests.e2e.hosts import Host, end, toml_of, two_hosts
from tests.support.guide import fences
from tests.support.tiny_run import ROOT, tiny_inputs, tiny_settings
from tests.support.waiting import HANG_S, until

pytestmark = [pytest.mark.e2e]
DOCUMENT = ROOT / "docs" / "rewards.md"


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    with two_hosts(tmp_path) as both:
        yield both


def test_worker_on_another_host_scores_by_the_documented_commands(hosts: tuple[Host, Host]):
    head, far = hosts
    (kind_a, on_head), (kind_b, reward), (kind_c, prepare), (kind_d, start) = fences(
        DOCUMENT, "Five minutes to a reward worker on another host"
    )
    assert (kind_a, kind_b, kind_c, kind_d) == ("bash", "python", "bash", "bash")
    make_key, run = on_head.strip().splitlines()
    tiny_inputs(head.folder)
    shutil.copy(head.folder / "train.jsonl", far.folder / "train.jsonl")
    settings = tiny_settings(head.folder) | {
        "run.dir": "runs",
        "generators.count": 1,
        "run.steps": 3,
    }
    (head.folder / "run.toml").write_text(toml_of(settings))
    (far.folder / "my_rewards.py").write_text(reward)

    printed = head.run(make_key)
    assert "judge-1.key" in printed
    running = head.start(run.strip(), head.folder / "run.log")
    worker = None
    shown: set[str] = set()
    try:
        tested = far.run(prepare)
        assert "digits" in tested
        assert (far.folder / "judge-1.key").stat().st_mode & 0o077 == 0
        worker = far.start(start.strip(), far.folder / "worker.log")
        deadline = time.monotonic() + HANG_S
        while running.poll() is None and time.monotonic() < deadline:
            shown |= arguments_and_environments(running.pid, worker.pid)
            time.sleep(0.2)
        logs = (head.folder / "run.log").read_text() + (far.folder / "worker.log").read_text()
        assert running.poll() == 0, logs
        assert worker.wait(HANG_S) == 0, logs
    finally:
        for process in (running, worker):
            if process is not None and process.poll() is None:
                end(process)
    (folder,) = (head.folder / "runs").glob("tiny*")
    account = json.loads((folder / ACCOUNT).read_text())
    assert (account["finished"], account["unaccounted"]) == (True, 0)
    assert account["trained"] == 3 * 4
    text = (folder / "rollouts" / "trained.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    assert len(rows) == 3 * 4 * 2
    for row in rows:
        assert row["parts"]["digits"] == sum(map(str.isdigit, row["answer"]))
        assert row["parts"]["score"] == row["reward"]
    assert (
        "scoring for run tiny with my_rewards.py:score" in (far.folder / "worker.log").read_text()
    )

    assert_no_secret(secrets_of(head.folder / "runs" / "keys"), shown, [head.folder, far.folder])


def arguments_and_environments(*pids: int) -> set[str]:
    """Return what others on a machine could read of these processes and their children."""
    texts = set()
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(pid)
            for process in [root, *root.children(recursive=True)]:
                with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                    texts.add(" ".join(process.cmdline()))
                    texts.update(f"{k}={v}" for k, v in process.environ().items())
    return texts


def secrets_of(keys: Path) -> list[str]:
    """Return the secret halves of all keys."""
    found = re.findall(r'secret = "(.{40})"', (keys / "clients" / "judge-1.key").read_text())
    return [*found, (keys / "broker.key").read_text().split()[1]]


def assert_no_secret(secrets: list[str], shown: set[str], folders: list[Path]) -> None:
    """No key is where others could read it; passwords have no arguments at all."""
    assert len(secrets) == 2
    assert shown
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    texts = {
        str(path): path.read_text(errors="replace")
        for path in files
        if path.suffix in {".log", ".toml", ".json", ".jsonl", ".url"} and "keys" not in path.parts
    }
    assert any(path.endswith("resolved.toml") for path in texts)
    assert any(path.endswith("broker.log") for path in texts)
    for secret in secrets:
        assert not [text for text in shown if secret in text]
        assert not [path for path, text in texts.items() if secret in text]
    hints = ("api-key", "api_key", "requirepass", "--password")
    assert not [text for text in shown for hint in hints if hint in text.lower()]


def test_ctrl_c_ends_a_worker_that_waits_for_a_broker(tmp_path: Path):
    key = make_client_key(tmp_path / "keys", "judge-1", "reward_worker")
    (tmp_path / "r.py").write_text(
        "def score(data_source, solution_str, **others):\n    return 1\n"
    )
    options = ("--broker", "tcp://127.0.0.1:9", "--key", str(key), "--reward", "r.py:score")
    worker = subprocess.Popen(
        [sys.executable, "-m", "slipstream.broker.reward_worker.main", *options],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={"PYTHONPATH": str(ROOT)},
    )
    try:
        until(lambda: _children_that_score(worker.pid), "the function is loaded in a child")
        children = _children_that_score(worker.pid)
        time.sleep(0.5)
        worker.send_signal(signal.SIGINT)
        output, _ = worker.communicate(timeout=HANG_S)
    finally:
        worker.kill()
        worker.communicate()
    assert worker.returncode == 0, output
    assert "Traceback" not in output
    assert not psutil.wait_procs(children, timeout=HANG_S)[1]


def _children_that_score(pid: int) -> list[psutil.Process]:
    """Those alone: before them the sandbox is tried with processes that end at once."""
    found = []
    for child in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "slipstream.broker.reward_worker.child" in child.cmdline():
                found.append(child)
    return found

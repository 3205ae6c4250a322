"""docs/weight-bus.md and docs/rewards.md, followed word for word: roles on a host of their own.

The hosts are network namespaces.
"""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path

import psutil
import pytest

from slipstream.broker.history.columns import read_state
from slipstream.broker.report.summary import PUBLISHES
from slipstream.broker.server.keyring import make_client_key
from slipstream.wire.files.run_folder import PAGE_STATE, SUMMARY
from tests.e2e.hosts import Host, Roles, toml_of
from tests.support.guide import fences
from tests.support.tiny_run import ROOT, assert_complete, rows_of, tiny_inputs, tiny_settings
from tests.support.waiting import HANG_S, until

pytestmark = [pytest.mark.e2e]
FAR = "gpu-7/generator-7"
BOTH = {FAR, "generator-0"}
STEPS = 16


def texts_of(page: str, heading: str, kinds: list[str]) -> list[str]:
    found = fences(ROOT / "docs" / page, heading)
    assert [kind for kind, _ in found] == kinds
    return [text for _, text in found]


def held_by_both(folder: Path) -> list[Mapping[str, str]]:
    """Return digests of what engines held, by engine, for versions that both have adopted."""
    state = read_state(folder / PAGE_STATE)
    assert state is not None
    digests = [record.engine_digests for record in state.status.publish_history]
    return [digest for digest in digests if digest.keys() >= BOTH]


@pytest.mark.parametrize(
    "bulk",
    # without encryption the sockets are those of tests/integration/test_plain_bulk.py
    ["encrypted", pytest.param("plain", marks=pytest.mark.slow)],
)
def test_a_generator_and_a_reward_worker_on_another_host_join_by_the_documented_commands(
    hosts: tuple[Host, Host], bulk: str
):
    head, far = hosts
    section, on_head, fetch, start = texts_of(
        "weight-bus.md",
        "Five minutes to a generator on another host",
        ["toml", "bash", "bash", "bash"],
    )
    for_rewards, reward, prepare, start_worker = texts_of(
        "rewards.md",
        "Five minutes to a reward worker on another host",
        ["bash", "python", "bash", "bash"],
    )
    make_key, run = on_head.strip().splitlines()
    make_worker_key, run_for_rewards = for_rewards.strip().splitlines()
    assert run_for_rewards == f"{run} reward.workers=0"
    tiny_inputs(head.folder)
    shutil.copy(head.folder / "train.jsonl", far.folder / "train.jsonl")
    settings = tiny_settings(head.folder) | {
        "run.dir": "runs",
        "run.steps": STEPS,
        "checkpoint.export_at_end": False,
    }
    section = section.replace(
        "[weightbus]", f'[weightbus]\ntransport = "collective"\nbulk = "{bulk}"'
    )
    text = toml_of(settings) + section.replace("10.0.0.1", "10.77.0.1")
    (head.folder / "run.toml").write_text(text)
    (far.folder / "my_rewards.py").write_text(reward)
    head.run(make_key)
    assert "judge-1.key" in head.run(make_worker_key)

    shown: set[str] = set()

    looks = count()

    def look() -> None:
        if next(looks) % 5 == 0:  # it takes a tenth of a second of a core
            pids = [process.pid for process in roles.processes.values()]
            shown.update(arguments_and_environments(*pids))

    with Roles() as roles:
        roles.start(head, "run", run_for_rewards)
        far.run(fetch)
        roles.start(far, "generator", start)
        assert "digits" in far.run(prepare)
        assert (far.folder / "judge-1.key").stat().st_mode & 0o077 == 0
        # Without a worker no step is trained: publishes are for both engines.
        until(lambda: "adopted v1.0" in roles.log("generator"), roles.logs, every_s=0.2)
        roles.start(far, "worker", start_worker)
        roles.wait("run", "generator", "worker", look=look, every_s=0.2)
        assert "scoring for run tiny with my_rewards.py:score" in roles.log("worker")
    (folder,) = (head.folder / "runs").glob("tiny*")
    assert_complete(folder, STEPS * 4)
    assert_both_networks_carried_the_same(folder, bulk)
    assert_scored_by_the_page_s_reward(folder)
    assert_no_secret(secrets_of(head.folder / "runs" / "keys"), shown, [head.folder, far.folder])


def assert_both_networks_carried_the_same(folder: Path, bulk: str) -> None:
    summary = json.loads((folder / SUMMARY).read_text())
    publishes = [one for one in summary[PUBLISHES] if FAR in one["adopted_by"]]
    assert {one["transports"][FAR] for one in publishes} == {"tcp", "collective"}
    held = held_by_both(folder)
    assert held
    for digests in held:
        assert digests[FAR] == digests["generator-0"]
    written = "".join(path.read_text() for path in folder.glob("logs/*.log"))
    assert ("buckets go unencrypted" in written) is (bulk == "plain")
    tokens = {role["name"]: role["tokens_per_second"] for role in summary["roles"]}
    assert tokens[FAR] > 0


def assert_scored_by_the_page_s_reward(folder: Path) -> None:
    rows = rows_of(folder / "rollouts" / "trained.jsonl")
    assert len(rows) == STEPS * 4 * 2
    for row in rows:
        assert row["parts"]["digits"] == sum(map(str.isdigit, row["answer"]))
        assert row["parts"]["score"] == row["reward"]


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
    texts = [(keys / "clients" / f"{name}.key").read_text() for name in ("judge-1", "gpu-7")]
    found = [one for text in texts for one in re.findall(r'secret = "(.{40})"', text)]
    return [*found, (keys / "broker.key").read_text().split()[1]]


def assert_no_secret(secrets: list[str], shown: set[str], folders: list[Path]) -> None:
    """No key is where others could read it; passwords have no arguments at all."""
    assert len(secrets) == 3
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

"""The rendered batch script really runs the tiny run, beside stand-ins for Slurm's three commands.

The nodes are addresses of loopback: every connection between roles is made as between hosts.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from slipstream.wire.files.run_folder import ACCOUNT
from tests.e2e.hosts import end, toml_of
from tests.support.tiny_run import ROOT, tiny_inputs, tiny_settings
from tests.support.waiting import HANG_S, until

pytestmark = [pytest.mark.e2e]
STANDINS = ROOT / "tests" / "support" / "slurm"
NODES = "127.0.0.2 127.0.0.3"
HELD_REWARD = """
import time
from pathlib import Path


def score(data_source, solution_str, ground_truth, extra_info):
    log = Path({log!r})
    while not Path({gate!r}).exists() and log.exists() and "step 2 reward" in log.read_text():
        time.sleep(0.05)
    return sum(one.isdigit() for one in solution_str) / (1 + len(solution_str))
"""  # a run of any speed is preempted before its end


class Job:
    """A rendered job that is submitted."""

    def __init__(self, folder: Path, **changed: object) -> None:
        self.folder = folder
        self.runs = folder / "its runs"  # a space: everything is quoted
        self.run = self.runs / "tiny"
        self.state = folder / "slurm"
        self.state.mkdir()
        tiny_inputs(folder)
        settings = tiny_settings(folder) | {
            "run.dir": "its runs",
            "generators.device": "cpu",
            "generators.count": 1,
            "checkpoint.export_at_end": False,
        }
        (folder / "run.toml").write_text(toml_of(settings | changed))
        self.environment = {
            **os.environ,  # noqa: TID251 handed on
            "PATH": f"{STANDINS}:{Path(sys.executable).parent}:/usr/bin:/bin",
            "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
            "TMPDIR": "/tmp",  # noqa: S108 short enough for sockets
            "SLURM_STANDIN": str(self.state),
            "SLURM_STANDIN_NODES": NODES,
        }
        self.call("slipstream", "render", "slurm", "--config", "run.toml", "--out", "a job")
        with (folder / "job.log").open("wb") as log:
            self.process = subprocess.Popen(
                ["sbatch", "a job/job.sbatch"],
                cwd=folder,
                env=self.environment,
                stdout=log,
                stderr=log,
            )

    def call(self, *words: str) -> str:
        done = subprocess.run(
            words,
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=HANG_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def logs(self) -> str:
        files = [self.folder / "job.log", *sorted((self.run / "logs").glob("*.log"))]
        return "\n".join(f"== {file.name}\n{file.read_text(errors='replace')}" for file in files)

    def steps(self) -> list[str]:
        return (self.state / "steps").read_text().splitlines()

    def account(self) -> dict[str, object]:
        found: dict[str, object] = json.loads((self.run / ACCOUNT).read_text())
        return found


@contextmanager
def submitted(folder: Path, **changed: object) -> Iterator[Job]:
    job = Job(folder, **changed)
    try:
        yield job
    finally:
        end(job.process)


def test_the_job_runs_every_role_and_survives_a_generator(tmp_path: Path):
    with submitted(tmp_path, **{"generators.count": 2}) as job:
        victim = wait_for_process(job, "generator-1")
        victim.kill()  # it is started again, whatever it did
        assert job.process.wait(HANG_S) == 0, job.logs()
        account = job.account()
        assert (account["finished"], account["unaccounted"], account["trained"]) == (True, 0, 16)
        assert "the run is complete" in (tmp_path / "job.log").read_text()
        named = [step for step in job.steps() if " --name " in step]
        nodes = {step.split(" --name ")[1].split()[0]: step.split()[0] for step in named}
        assert nodes == {
            "generator-0": "127.0.0.2",
            "generator-1": "127.0.0.3",
            "reward-worker-0": "127.0.0.2",
        }
        starts = [step for step in job.steps() if "--name generator-1" in step]
        assert len(starts) == 2
        keys = [path for path in (job.run / "keys").rglob("*") if path.is_file()]
        assert len(keys) == 7
        assert {path.stat().st_mode & 0o777 for path in keys} == {0o600}


def test_a_learner_of_two_nodes_is_one_step_of_the_job(tmp_path: Path):
    with submitted(tmp_path, **{"learner.ranks": 2, "learner.ranks_per_node": 1}) as job:
        assert job.process.wait(HANG_S) == 0, job.logs()
        account = job.account()
        assert (account["finished"], account["unaccounted"], account["trained"]) == (True, 0, 16)
        assert len([step for step in job.steps() if "start-learner" in step]) == 1
        log = (job.run / "logs" / "learner.log").read_text()
        assert "node 1 (host" in log, "the second node did not join"


def wait_for_process(job: Job, name: str) -> psutil.Process:
    found: list[psutil.Process] = []

    def is_there() -> bool:
        assert job.process.poll() is None, job.logs()
        for process in psutil.Process(job.process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                words = process.cmdline()  # of srun too, which has not noted the step at first
                if words[1:2] and words[1].endswith("/start-generator") and name in words:
                    found.append(process)
        return bool(found)

    until(is_there, job.logs)
    return found[0]


@pytest.mark.parametrize(
    "signalled",
    # The script alone ends its steps itself; where they are signalled too, each ends the same way.
    ["the script", pytest.param("the script and all steps", marks=pytest.mark.slow)],
)
def test_a_job_that_is_preempted_is_queued_again_and_completes(signalled: str, tmp_path: Path):
    gate, log = tmp_path / "gate", tmp_path / "its runs" / "tiny" / "logs" / "learner.log"
    (tmp_path / "held.py").write_text(HELD_REWARD.format(gate=str(gate), log=str(log)))
    changed = {
        "run.steps": 9,
        "reward.function": f"{tmp_path / 'held.py'}:score",
        "reward.timeout_s": HANG_S,
    }
    with submitted(tmp_path, **changed) as job:

        def has_trained() -> bool:
            assert job.process.poll() is None, job.logs()
            log = job.run / "logs" / "learner.log"
            return log.exists() and "step 2 reward" in log.read_text()

        until(has_trained, job.logs)
        batch = int((job.state / "batch.pid").read_text())
        steps = [one for one in psutil.Process(batch).children(recursive=True) if is_step(one)]
        assert len(steps) == 4
        os.kill(batch, signal.SIGTERM)
        for step in steps if signalled != "the script" else ():
            step.terminate()
        until(lambda: "queued again to resume" in (tmp_path / "job.log").read_text(), job.logs)
        gate.touch()
        assert job.process.wait(HANG_S) == 0, job.logs()
        learner = (job.run / "logs" / "learner.log").read_text()
        assert learner.count("took over as") == 2, learner
        assert "took over as v1.0" in learner
        resumed = learner.split("took over as")[2].split()[0]
        assert int(resumed.removeprefix("v").split(".")[1]) >= 2, "it resumed from what it saved"
        account = job.account()
        assert (account["finished"], account["unaccounted"], account["trained"]) == (True, 0, 36)


def is_step(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return any("/bin/start-" in word for word in process.cmdline())
    return False


def test_a_job_without_a_single_reward_worker_left_ends_as_failed(tmp_path: Path):
    """They refuse their settings, which trying again would not change."""
    with submitted(tmp_path, **{"reward.function": "nowhere.py:score"}) as job:
        assert job.process.wait(HANG_S) == 1, job.logs()
        text = (tmp_path / "job.log").read_text()
        assert "all processes of a role are given up" in text
        assert "nowhere.py" in (job.run / "logs" / "reward-worker-0.log").read_text()

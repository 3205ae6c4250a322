"""The rendered batch script really runs the tiny run, beside stand-ins for Slurm's three commands.

The nodes are addresses of loopback: every connection between roles is made as between hosts.
"""

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from slipstream.weightbus.version.engine_checksums import digest_of, expected_checksums
from slipstream.wire.files.checkpoints import newest_checkpoint, read_checkpoint_info
from slipstream.wire.files.run_folder import SUMMARY
from tests.e2e.hosts import Host, end, toml_of
from tests.support.served import SAME
from tests.support.tiny_run import (
    ROOT,
    assert_complete,
    differences_in,
    slipstream,
    tiny_inputs,
    tiny_settings,
)
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
LATE_REFUSAL = """
import time
from pathlib import Path

log = Path({log!r})
while not log.exists() or "took over as" not in log.read_text():
    time.sleep(0.05)
raise ImportError("too late")
"""  # of a worker whose run has begun


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
            "checkpoint.export_at_end": False,
        }
        (folder / "run.toml").write_text(toml_of(settings | changed))
        environment = {
            **os.environ,  # noqa: TID251 handed on
            "PATH": f"{STANDINS}:{Path(sys.executable).parent}:/usr/bin:/bin",
            "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
            "TMPDIR": "/tmp",  # noqa: S108 short enough for sockets
            "SLURM_STANDIN": str(self.state),
            "SLURM_STANDIN_NODES": NODES,
        }
        here = Host("", folder, environment)
        here.run("slipstream render slurm --config run.toml --out 'a job'")
        self.process = here.start("sbatch 'a job/job.sbatch'", folder / "job.log")

    def logs(self) -> str:
        files = [self.folder / "job.log", *sorted((self.run / "logs").glob("*.log"))]
        return "\n".join(f"== {file.name}\n{file.read_text(errors='replace')}" for file in files)

    def starts_of(self, words: str) -> list[str]:
        """Return the steps that were begun, of those with these words."""
        steps = (self.state / "steps").read_text().splitlines()
        return [step for step in steps if words in step]

    def until_it_says(self, log: Path, words: str) -> None:
        """Wait for words in a file, while the job runs."""

        def says() -> bool:
            assert self.process.poll() is None, self.logs()
            return log.exists() and words in log.read_text()

        until(says, self.logs, every_s=0.2)


@contextmanager
def submitted(folder: Path, **changed: object) -> Iterator[Job]:
    job = Job(folder, **changed)
    try:
        yield job
    finally:
        end(job.process)


# Kills, stops and resumes of the same processes, without Slurm: tests/chaos. That a job is queued
# again, its script says: tests/unit/deploy/interop/render/test_slurm.py.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("signalled", "generators"),
    [
        ("the script", 1),
        # The script alone ends its steps itself; where they are signalled too, each ends the same
        # way. Places of several generators: tests/unit/deploy/interop/render/test_slurm.py.
        ("the script and all steps", 2),
    ],
)
def test_a_job_survives_a_generator_and_where_it_is_preempted_is_queued_again_and_completes(
    signalled: str, generators: int, tmp_path: Path
):
    """A learner on two nodes trains adapters in step with its engines, to the end of the data."""
    gate, log = tmp_path / "gate", tmp_path / "its runs" / "tiny" / "logs" / "learner.log"
    (tmp_path / "held.py").write_text(HELD_REWARD.format(gate=str(gate), log=str(log)))
    (tmp_path / "last.jsonl").write_text('{"prompt": "11+24="}\n{"prompt": "12+24="}\n')
    changed = {
        "run.mode": "sync",
        "run.steps": 100,
        "run.epochs": 0.9,
        "lora.rank": 4,
        "lora.publish": "merged",
        "learner.lr": 1e-2,
        "algo.kl.coefficient": 0.1,
        "eval.file": tmp_path / "last.jsonl",  # so that the last version is adopted
        "eval.before_train": False,
        "checkpoint.export_at_end": True,
        "reward.function": f"{tmp_path / 'held.py'}:score",
        "reward.timeout_s": HANG_S,
        "generators.count": generators,
        "learner.ranks": 2,
        "learner.ranks_per_node": 1,
    }
    with submitted(tmp_path, **changed) as job:
        last = f"generator-{generators - 1}"
        wait_for_process(job, last).kill()  # it is started again, whatever it did
        until(lambda: len(job.starts_of(f"--name {last}")) == 2, job.logs, every_s=0.2)
        job.until_it_says(log, "step 2 reward")
        batch = int((job.state / "batch.pid").read_text())
        steps = [one for one in psutil.Process(batch).children(recursive=True) if is_step(one)]
        assert len(steps) >= 4 + generators, "a broker, two of a learner, a reward worker"
        os.kill(batch, signal.SIGTERM)
        for step in steps if signalled != "the script" else ():
            step.terminate()
        job.until_it_says(tmp_path / "job.log", "queued again to resume")
        gate.touch()
        assert job.process.wait(HANG_S) == 0, job.logs()
        assert_complete(job.run, 36)
        assert "the run is complete" in (tmp_path / "job.log").read_text()
    learner = log.read_text()
    assert learner.count("took over as") == 2, learner
    assert "took over as v1.0" in learner
    resumed = learner.split("took over as")[2].split()[0]
    assert int(resumed.removeprefix("v").split(".")[1]) >= 2, "it resumed from what it saved"
    assert "node 1 (host" in learner, "the second node did not join"
    assert_placed(job, generators)
    assert_adapters_were_trained_in_sync(job)


def assert_placed(job: Job, generators: int) -> None:
    """Roles had their nodes, the learner one step for all its nodes, and keys nobody else."""
    named = job.starts_of(" --name ")
    nodes = {step.split(" --name ")[1].split()[0]: step.split()[0] for step in named}
    placed = zip(("generator-0", "generator-1"), NODES.split(), strict=True)
    assert nodes == {"reward-worker-0": "127.0.0.2", **dict(list(placed)[:generators])}
    assert len(job.starts_of("start-learner")) == 2, "one of each time that it was queued"
    keys = [path for path in (job.run / "keys").rglob("*") if path.is_file()]
    assert len(keys) == 9
    assert {path.stat().st_mode & 0o777 for path in keys} == {0o600}


def assert_adapters_were_trained_in_sync(job: Job) -> None:
    """Each answer is of the newest version, and the engine holds the weights with the adapters."""
    summary = json.loads((job.run / SUMMARY).read_text())
    assert (summary["issued"], summary["trained"], summary["steps"]) == (36, 36, 9)
    assert (summary["outcome"], set(summary["staleness_histogram"])) == ("finished", {"0"})
    assert "run.epochs" in summary["stop_reason"]
    lags = differences_in(job.run)
    assert {lag for lag, _ in lags} == {0}
    assert max(difference for _, difference in lags) < SAME

    final = load_file(job.run / "model" / "model.safetensors")
    before = load_file(job.folder / "model" / "model.safetensors")
    assert {name for name in final if not final[name].equal(before[name].float())} == {
        name for name in final if "_proj." in name
    }
    expected = digest_of(expected_checksums(final))
    assert set(summary["last_publish"]["engine_digests"].values()) == {expected}
    checkpoint = newest_checkpoint(job.run)
    assert checkpoint is not None
    adapters = read_checkpoint_info(checkpoint).adapters
    assert adapters is not None
    assert adapters.rank == 4
    slipstream("export", job.run)
    names = load_file(job.run / "adapter" / "adapter_model.safetensors").keys()
    assert len(names) == 2 * 2 * 7


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

    until(is_there, job.logs, every_s=0.2)
    return found[0]


def is_step(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return any("/bin/start-" in word for word in process.cmdline())
    return False


def test_a_job_without_a_single_reward_worker_left_ends_as_failed(tmp_path: Path):
    """They refuse their settings, which trying again would not change; the learner has begun."""
    late, log = tmp_path / "late.py", tmp_path / "its runs" / "tiny" / "logs" / "learner.log"
    late.write_text(LATE_REFUSAL.format(log=str(log)))
    with submitted(tmp_path, **{"reward.function": f"{late}:score"}) as job:
        assert job.process.wait(HANG_S) == 1, job.logs()
        text = (tmp_path / "job.log").read_text()
        assert "all processes of a role are given up" in text
        assert "too late" in (job.run / "logs" / "reward-worker-0.log").read_text()
        assert "took over as v1.0" in log.read_text()

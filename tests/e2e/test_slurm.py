"""The script of `slipstream render slurm` is run; srun and scontrol act on this machine alone."""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from slipstream.wire.files.run_folder import ACCOUNT, SUMMARY
from tests.e2e.hosts import toml_of
from tests.support.tiny_run import ROOT, slipstream, tiny_inputs, tiny_settings
from tests.support.waiting import HANG_S, until

pytestmark = [pytest.mark.e2e]
BIN = ROOT / "tests" / "support" / "slurm"


class Job:
    """A batch script, and the Slurm that would start it."""

    def __init__(self, folder: Path, port: int, **settings: object) -> None:
        tiny_inputs(folder)
        self.id = f"{os.getpid()}{port}"
        self.run = folder / "runs" / "tiny"
        self.requeued = folder / "requeued"
        self.output = folder / "slurm.out"
        chosen = {key.replace("__", "."): value for key, value in settings.items()}
        merged = tiny_settings(folder) | {"generators.count": 1, "reward.workers": 1} | chosen
        self.config = folder / "run.toml"
        self.config.write_text(toml_of(merged))
        out, setting = folder / "job", f"deploy.slurm.port={port}"
        slipstream("render", "slurm", "--config", self.config, "--out", out, setting)
        self.script = out / "run.sbatch"

    @contextmanager
    def started(self) -> Iterator["subprocess.Popen[bytes]"]:
        """Start it as its own session; every process left in it is ended."""
        with self.output.open("ab") as output:
            process = subprocess.Popen(
                ["bash", self.script],
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={
                    **os.environ,  # noqa: TID251 handed on
                    "PATH": f"{BIN}:{os.environ['PATH']}",  # noqa: TID251 handed on
                    "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
                    "SLURM_JOB_ID": self.id,
                    "SLURM_JOB_NODELIST": "127.0.0.11,127.0.0.12",
                    "SLURM_TEST_REQUEUED": str(self.requeued),
                },
            )
        try:
            yield process
        finally:
            for one in psutil.process_iter():  # Slurm ends what a step leaves, such as a relay
                with suppress(psutil.Error, ProcessLookupError):
                    if os.getsid(one.pid) == process.pid or str(self.config) in one.cmdline():
                        one.kill()
            process.wait()
            for scratch in Path("/tmp").glob(f"slipstream-*-{self.id}*"):  # noqa: S108
                shutil.rmtree(scratch, ignore_errors=True)

    def kill(self, process: "subprocess.Popen[bytes]", module: str) -> None:
        """Kill one role, as the kernel does when memory is short."""
        for one in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if module in one.cmdline():
                    one.kill()
                    return
        raise AssertionError(f"no {module} is running:\n{self.logs()}")

    def logs(self) -> str:
        """Return all that a failure may be explained by."""
        files = [self.output, *sorted((self.run / "logs").glob("*.log"))]
        return "".join(f"\n== {one.name}\n{one.read_text()[-2500:]}" for one in files)

    def json(self, name: str) -> dict[str, Any]:
        figures: dict[str, Any] = json.loads((self.run / name).read_text())
        return figures

    def steps(self) -> int:
        return int(self.json(SUMMARY)["steps"]) if (self.run / SUMMARY).exists() else -1

    def assert_whole(self, steps: int) -> None:
        """The run has ended, and the ledger knows where every group went."""
        account = self.json(ACCOUNT)
        assert (account["finished"], account["unaccounted"]) == (True, 0), account
        assert self.steps() == steps


def test_a_rendered_script_trains_to_the_end(tmp_path: Path):
    folder = tmp_path / "with space & 'quote'"
    folder.mkdir()
    job = Job(folder, 5711)
    with job.started() as process:
        assert process.wait(2 * HANG_S) == 0, job.logs()
    job.assert_whole(4)
    assert not job.requeued.exists()
    key = job.run / "keys" / "clients" / "node-1.key"
    assert key.stat().st_mode & 0o777 == 0o600
    assert "node-1/generator-0" in {role["name"] for role in job.json(SUMMARY)["roles"]}


def test_a_preempted_job_is_requeued_and_resumes(tmp_path: Path):
    job = Job(tmp_path, 5721, run__steps=12)
    with job.started() as process:
        until(lambda: job.steps() >= 2 or process.poll() is not None, "two steps")
        process.send_signal(signal.SIGTERM)
        assert process.wait(HANG_S) == 0, job.logs()
    assert job.requeued.read_text().split() == [job.id], job.logs()
    assert job.steps() < 12
    assert list((job.run / "checkpoints").glob("step-*")), job.logs()
    with job.started() as process:
        assert process.wait(2 * HANG_S) == 0, job.logs()
    job.assert_whole(12)
    assert job.requeued.read_text().split() == [job.id]


def test_a_killed_generator_comes_back_and_the_learners_end_is_the_jobs(tmp_path: Path):
    job = Job(tmp_path, 5731, run__steps=400)
    with job.started() as process:
        until(lambda: job.steps() >= 1 or process.poll() is not None, "a step")
        job.kill(process, "slipstream.generators.main")
        until(lambda: "generator 0 ended with exit code" in job.output.read_text(), "its end")
        before = job.steps()
        until(lambda: job.steps() >= before + 3 or process.poll() is not None, "further steps")
        assert process.poll() is None, job.logs()
        job.kill(process, "slipstream.learner.main")
        assert process.wait(HANG_S) == 128 + signal.SIGKILL, job.logs()
    assert not job.requeued.exists()

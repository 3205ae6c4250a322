"""Stage 5: `slipstream run` with the quickstart's policy; engine and learner are killed once."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.device.engines import WITHOUT_KERNELS, has_cuda
from benchmarks.device.report import Report, run_stage
from slipstream.deploy.examples.addition import prepare

_STEPS = 20
_POLL_S = 0.2
_KILLS = {  # after so many steps, what is killed
    5: "slipstream.generators.sglang.server",
    10: "slipstream.learner.main",
}


def work(report: Report, out: Path) -> None:
    folder = (out / "loop").resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    prepare(folder)
    settings: dict[str, object] = {
        "run.name": "device",
        "run.dir": folder / "runs",
        "run.model": folder / "model",
        "run.steps": _STEPS,
        "run.groups_per_step": 8,
        "data.file": folder / "train.jsonl",
        "eval.file": folder / "held_out.jsonl",
        "eval.every_steps": _STEPS,
        "generators.count": 1,
        "checkpoint.every_steps": 4,
    }
    if has_cuda():  # one GPU for both: NCCL takes no two ranks on it
        settings |= {"weightbus.backend": "gloo", "weightbus.transport": "collective"}
        settings["deploy.share_gpus"] = True
        settings |= {f"generators.sglang.{name}": flag for name, flag in WITHOUT_KERNELS.items()}
    overrides = [
        f"{name}={str(value).lower() if isinstance(value, bool) else value}"
        for name, value in settings.items()
    ]
    with (out / "loop-output.txt").open("w") as output:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "slipstream.deploy.main", "run"),
                *("--config", "configs/quickstart.toml", *overrides),
            ],
            env={**os.environ, "COLUMNS": "160"},
            stdout=output,
            stderr=output,
        )
    summary = folder / "runs" / "device" / "summary.json"
    killed = _watch(report, process, summary)
    report.fact("killed", killed)
    report.holds("the run ends well", process.returncode == 0)
    found: dict[str, Any] = json.loads(summary.read_text())
    report.fact("outcome", found.get("outcome"))
    report.holds("it has trained every step", found["steps"] == _STEPS)
    report.at_most("trajectories unaccounted", found["equation"]["unaccounted"], "", needs=0)
    report.at_least("processes killed", len(killed), "processes", needs=len(_KILLS))
    report.fact("last_publish", found.get("last_publish"))
    report.fact("eval", found.get("eval"))


def _watch(report: Report, process: "subprocess.Popen[bytes]", summary: Path) -> list[str]:
    """Wait until the run ends, and kill what is to be killed; note the most memory of the GPU."""
    killed: list[str] = []
    most = 0
    due = dict(_KILLS)
    while process.poll() is None:
        if not report.left_s:
            raise TimeoutError("the run goes on at the deadline of its stage")
        steps = _steps(summary)
        for step in [step for step in due if steps >= step]:
            for child in psutil.Process(process.pid).children(recursive=True):
                try:
                    if due[step] in " ".join(child.cmdline()):
                        child.kill()
                        killed.append(f"{due.pop(step)} after step {steps}")
                        break
                except psutil.NoSuchProcess:
                    continue
        if has_cuda():
            free, whole = torch.cuda.mem_get_info()
            most = max(most, whole - free)
        time.sleep(_POLL_S)
    if has_cuda():
        report.fact("most GPU memory of all, GiB", most / 2**30)
    return killed


def _steps(summary: Path) -> int:
    try:
        return int(json.loads(summary.read_text())["steps"])
    except (OSError, ValueError, KeyError):
        return -1


if __name__ == "__main__":
    run_stage("loop", work)

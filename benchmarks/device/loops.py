"""`slipstream run` on this machine's device, watched: what is killed, how much memory is used."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.device.engines import SMALL, has_cuda
from benchmarks.device.report import Report

ENGINE = "slipstream.generators.sglang.server"
LEARNER = "slipstream.learner.main"
_POLL_S = 0.2
_OFF = 5e-2 if has_cuda() else 1e-4  # nats


def run_loop(
    report: Report,
    folder: Path,
    settings: Mapping[str, object],
    *,
    steps: int,
    kills: Mapping[int, str],
) -> tuple[dict[str, Any], float]:
    """Run the quickstart's configuration with other settings; return its summary and GPU memory.

    Args:
        report: gets what holds of every run.
        folder: of the run, named "device".
        settings: by their dotted names.
        steps: that it must have trained.
        kills: after so many steps, part of the command line of the process that is killed.

    The memory is the most of all processes at once, in bytes; 0 without a GPU.
    """
    wanted = {
        "run.name": "device",
        "run.dir": folder / "runs",
        "run.steps": steps,
        "run.groups_per_step": 8,
        "generators.count": 1,
        "checkpoint.every_steps": 4,
    }
    if has_cuda():  # one GPU for both: NCCL takes no two ranks on it
        wanted |= {"weightbus.backend": "gloo", "weightbus.transport": "collective"}
        wanted["deploy.share_gpus"] = True
        wanted |= {f"generators.sglang.{name}": flag for name, flag in SMALL.items()}
        wanted["reward.sandbox"] = "none"  # a borrowed machine may have no bubblewrap
    wanted |= settings
    overrides = [
        f"{name}={str(value).lower() if isinstance(value, bool) else value}"
        for name, value in wanted.items()
    ]
    with (folder / "output.txt").open("w") as output:
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
    killed, most = _watch(report, process, summary, kills)
    if process.returncode:
        print((folder / "output.txt").read_text()[-3000:])
    report.holds("the run ends well", process.returncode == 0)
    found: dict[str, Any] = json.loads(summary.read_text())
    report.fact("outcome", found.get("outcome"))
    report.holds("it has trained every step", found["steps"] == steps)
    report.at_most("trajectories unaccounted", found["equation"]["unaccounted"], "", needs=0)
    if kills:
        report.fact("killed", killed)
        report.at_least("processes killed", len(killed), "processes", needs=len(kills))
    report.fact("last_publish", found.get("last_publish"))
    if process.returncode == 0:
        _compare_logprobs(report, summary.with_name("rollouts") / "trained.jsonl")
    report.fact("eval", found.get("eval"))
    return found, most


def _compare_logprobs(report: Report, rollouts: Path) -> None:
    """Compare the engine's logprobs with the learner's, of tokens of the version that it trains."""
    rows = [json.loads(line) for line in rollouts.read_text().splitlines()]
    same = [
        difference
        for row in rows
        for run, difference in zip(row["version_runs"], row["logprob_abs_diff_by_run"], strict=True)
        if run["step"] == row["step"]
    ]
    report.fact("answers of the version that is trained", len(same))
    if same:
        report.at_most("logprobs vs learner", sum(same) / len(same), "nats on average", needs=_OFF)


def _watch(
    report: Report, process: "subprocess.Popen[bytes]", summary: Path, kills: Mapping[int, str]
) -> tuple[list[str], float]:
    """Wait until the run ends, and kill what is to be killed; return that and the most memory."""
    killed: list[str] = []
    most = 0.0
    due = dict(kills)
    while process.poll() is None:
        if not report.left_s:
            raise TimeoutError("the run still runs at the deadline of its stage")
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
            most = max(most, float(whole - free))
        time.sleep(_POLL_S)
    return killed, most


def _steps(summary: Path) -> int:
    try:
        return int(json.loads(summary.read_text())["steps"])
    except (OSError, ValueError, KeyError):
        return -1

"""Stage 9: the learner on a GPU against the learner on a CPU, for a model of every family."""

import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.device.report import ON_A_CPU, Report, Skipped, run_stage
from tests.support.families import main as write
from tests.support.family_models import MODELS

_OFF_F32 = 1e-3  # nats: experts are chosen, and a choice that is nearly equal may fall otherwise
# Narrow weights against wide ones: rounding, and on a CPU it is as large. Nats, on average.
_OFF_BF16, _OFF_BF16_TIMES = 1e-2, 1.5


def work(report: Report, out: Path) -> None:
    folder = out / "families"
    shutil.rmtree(folder, ignore_errors=True)
    models = folder / "models"
    models.mkdir(parents=True)
    for name in MODELS:
        write(models / name, name)
    on_gpu = torch.cuda.is_available()
    ranks = {"cpu": "float32", "device": "float32"}
    if on_gpu:
        ranks |= {"cpu-bfloat16": "bfloat16", "bfloat16": "bfloat16"}
    running = {
        name: _start(
            folder,
            name,
            "benchmarks.device.families_rank",
            models,
            folder / f"{name}.json",
            dtype,
            on_cpu=name.startswith("cpu"),
        )
        for name, dtype in ranks.items()
    }
    found: dict[str, dict[str, Any]] = {}
    for name, process in running.items():
        process.wait(report.left_s)
        found[name] = json.loads((folder / f"{name}.json").read_text())
    for name, right in found["cpu"].items():
        with report.part(f"float32 {name}"):
            off = max(_offs(found["device"], found["cpu"], name))
            report.at_most(f"float32 {name}", off, "nats", needs=_OFF_F32)
            report.fact(
                f"norm of the gradient {name}", [found[one][name].get("norm") for one in found]
            )
        with report.part(f"bfloat16 {name}"):
            if not on_gpu:
                raise Skipped(ON_A_CPU)
            off, off_on_cpu = (
                statistics.fmean(_offs(found[one], {name: {"before": right["before"]}}, name))
                for one in ("bfloat16", "cpu-bfloat16")
            )
            report.fact(f"bfloat16 {name} on a CPU", off_on_cpu)
            needs = _OFF_BF16 + _OFF_BF16_TIMES * off_on_cpu
            report.at_most(f"bfloat16 {name}", off, "nats on average", needs=needs)


def _start(
    folder: Path, name: str, module: str, *words: object, on_cpu: bool
) -> "subprocess.Popen[bytes]":
    variables = {"CUDA_VISIBLE_DEVICES": ""} if on_cpu else {}
    with (folder / f"{name}.log").open("w") as log:
        return subprocess.Popen(
            [sys.executable, "-m", module, *map(str, words)],
            env={**os.environ, **variables},
            stdout=log,
            stderr=log,
        )


def _offs(some: dict[str, Any], others: dict[str, Any], name: str) -> list[float]:
    """Return the differences of all logprobs that both have of a family."""
    for one in (some, others):
        if "error" in one[name]:
            raise RuntimeError(one[name]["error"])
    return [
        abs(a - b)
        for when in others[name].keys() & {"before", "after"}
        for a, b in zip(some[name][when], others[name][when], strict=True)
    ]


if __name__ == "__main__":
    run_stage("families", work)

"""Stage 2: the learner on a GPU against the learner on a CPU."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.device.report import ON_A_CPU, Report, Skipped, run_stage
from tests.support.tiny_models import write_tiny_model

_OFF_F32 = 1e-4  # nats, and relative of figures
_OFF_BF16 = 3e-2  # nats, on average
_ALGORITHMS = ("default", "critic")


class Ranks:
    """Learners as child processes, two at a time at most."""

    def __init__(self, model: Path, folder: Path, report: Report) -> None:
        self._model, self._folder, self._report = model, folder, report
        self._started: dict[str, subprocess.Popen[str]] = {}

    def start(self, name: str, dtype: str, *, on_cpu: bool, loads: str = "") -> None:
        variables = {"CUDA_VISIBLE_DEVICES": ""} if on_cpu else {}
        other = [str(self._folder / loads)] if loads else []
        with (self._folder / f"{name}.log").open("w") as log:
            self._started[name] = subprocess.Popen(
                [
                    *(sys.executable, "-m", "benchmarks.device.learner_rank", self._model),
                    *(self._folder / name, dtype, *other),
                ],
                env={**os.environ, **variables},
                stdout=log,
                stderr=log,
                text=True,
            )

    def result(self, name: str) -> dict[str, Any]:
        """Wait for a rank and return what it found."""
        code = self._started[name].wait(self._report.left_s)
        if code:
            lines = (self._folder / f"{name}.log").read_text().splitlines()
            raise RuntimeError(f"the learner {name} ended with {code}:\n" + "\n".join(lines[-8:]))
        found: dict[str, Any] = json.loads((self._folder / name / "report.json").read_text())
        return found


def work(report: Report, out: Path) -> None:
    folder = out / "learner"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    model = write_tiny_model(folder / "start", "qwen3")
    ranks = Ranks(model, folder, report)
    on_gpu = torch.cuda.is_available()
    ranks.start("cpu", "float32", on_cpu=True)
    ranks.start("device", "float32", on_cpu=False)
    with report.part("float32"):
        right, found = ranks.result("cpu"), ranks.result("device")
        report.fact("device", found["device"])
        _compare(report, right, found)
        tensors = [
            load_file(folder / one / "model" / "model.safetensors") for one in ("cpu", "device")
        ]
        report.at_most("trained weights", _off_tensors(*tensors), "of 1", needs=_OFF_F32)
        report.holds("a version has the bytes of the export", found["writes"])
    if on_gpu:
        ranks.start("bfloat16", "bfloat16", on_cpu=False)
    with report.part("checkpoint"):
        ranks.start("loaded", "float32", on_cpu=True, loads="device")
        saved, loaded = ranks.result("device"), ranks.result("loaded")
        report.holds("saved on the device, loaded on a CPU", loaded["loaded"] == saved["saved"])
        report.holds("it had other weights before", loaded["fresh"] != saved["saved"])
    with report.part("bfloat16"):
        if not on_gpu:
            raise Skipped(ON_A_CPU)
        narrow = ranks.result("bfloat16")
        for name in _ALGORITHMS:
            pairs = zip(narrow[name]["logprobs"], right[name]["logprobs"], strict=True)
            mean = sum(abs(a - b) for a, b in pairs) / len(right[name]["logprobs"])
            report.at_most(f"bfloat16 logprobs {name}", mean, "nats on average", needs=_OFF_BF16)
        report.holds("a bfloat16 version has the bytes of the export", narrow["writes"])


def _compare(report: Report, right: dict[str, Any], found: dict[str, Any]) -> None:
    for name in _ALGORITHMS:
        for what in ("logprobs", "trained"):
            off = _off(found[name][what], right[name][what])
            report.at_most(f"float32 {what} {name}", off, "nats", needs=_OFF_F32)
        figures = right[name]["figures"]
        worst = max(
            abs(found[name]["figures"][one] - value) / max(1.0, abs(value))
            for one, value in figures.items()
        )
        report.at_most(f"float32 figures {name}", worst, "relative", needs=_OFF_F32)
        report.fact(f"reads {name}", {"cpu": right[name]["reads"], "device": found[name]["reads"]})
        report.fact(f"waits for the device {name}", [found[name]["waits"], found[name]["where"]])


def _off(found: Sequence[float], right: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(found, right, strict=True))


def _off_tensors(right: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> float:
    return max(float((found[name] - tensor).abs().max()) for name, tensor in right.items())


if __name__ == "__main__":
    run_stage("learner", work)

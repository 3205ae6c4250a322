"""Stage 10: every algorithm on a GPU and on a CPU; bits twice; what offloading leaves as it is."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.device.report import ON_A_CPU, Report, Skipped, run_stage
from tests.support.ranks.policy import algorithms
from tests.support.tiny_models import write_tiny_model

_OFF_FIGURES = 1e-3  # relative
_OFF_WEIGHTS = 1e-3  # of 1
_POLICY = "tests.support.ranks.policy"
_SAME_BITS = (
    "import runpy; from slipstream.learner.model import device; device.set_deterministic(); "
    f"runpy.run_module({_POLICY!r}, run_name='__main__', alter_sys=True)"
)
# Settings of tests.support.ranks.offload that must give the same bits.
_MOVED = {
    "all": "plain",
    "weights": "plain",
    "gradients": "plain",
    "optimizer": "plain",
    "all-divided": "divided",
    "all-narrow": "narrow",
    "all-bfloat16": "bfloat16",
}


def work(report: Report, out: Path) -> None:
    folder = out / "algorithms"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    model = write_tiny_model(folder / "start", "qwen3")
    reference = write_tiny_model(folder / "reference", "qwen3") / "model.safetensors"
    scaled = {name: 0.9 * tensor for name, tensor in load_file(reference).items()}
    save_file(scaled, reference, metadata={"format": "pt"})
    on_gpu = torch.cuda.is_available()

    def policy(name: str, *program: str, on_cpu: bool = False) -> "subprocess.Popen[bytes]":
        (folder / name).mkdir()
        words = [model, folder / name, 0, 1, "{}"]
        return _start(folder, name, program or ("-m", _POLICY), words, on_cpu=on_cpu)

    running = {"cpu": policy("cpu", on_cpu=True), "device": policy("device")}
    if on_gpu:
        running |= {name: policy(name, "-c", _SAME_BITS) for name in ("once", "again")}
    (folder / "offload").mkdir()
    running["offload"] = _start(
        folder, "offload", ("-m", "tests.support.ranks.offload"), [model, folder / "offload"]
    )
    for name, process in running.items():
        with report.part(f"program {name}"):
            code = process.wait(report.left_s)
            if code:
                lines = (folder / f"{name}.log").read_text().splitlines()
                raise RuntimeError(f"it ended with {code}:\n" + "\n".join(lines[-8:]))
    with report.part("CPU and device"):
        right, found = (
            json.loads((folder / one / "0.json").read_text())
            for one in running
            if one in ("cpu", "device")
        )
        report.holds("a version has the bytes of the export", found["published"] == [])
        for name in algorithms(folder):
            off = _off_figures(found["figures"][name], right["figures"][name])
            report.at_most(f"figures {name}", off, "relative", needs=_OFF_FIGURES)
            off = _off_weights(folder / "device" / name, folder / "cpu" / name)
            report.at_most(f"trained weights {name}", off, "of 1", needs=_OFF_WEIGHTS)
    with report.part("twice"):
        if not on_gpu:
            raise Skipped(ON_A_CPU)
        for name in algorithms(folder):
            off = _off_weights(folder / "once" / name, folder / "again" / name)
            report.holds(f"deterministic {name} twice, same bits", off == 0)
    with report.part("offload"):
        for name, plain in _MOVED.items():
            off = _off_weights(folder / "offload" / name, folder / "offload" / plain)
            report.holds(f"offload {name} is {plain}, same bits", off == 0)


def _start(
    folder: Path,
    name: str,
    program: Sequence[str],
    words: Sequence[object],
    *,
    on_cpu: bool = False,
) -> "subprocess.Popen[bytes]":
    variables = {"CUDA_VISIBLE_DEVICES": ""} if on_cpu else {}
    with (folder / f"{name}.log").open("w") as log:
        return subprocess.Popen(
            [sys.executable, *program, *map(str, words)],
            env={**os.environ, **variables},
            stdout=log,
            stderr=log,
        )


def _off_figures(found: dict[str, Any], right: dict[str, Any]) -> float:
    return max(
        abs(found[name] - value) / max(1.0, abs(value))
        for name, value in right.items()
        if isinstance(value, float)
    )


def _off_weights(some: Path, others: Path) -> float:
    found, right = (load_file(one / "model.safetensors") for one in (some, others))
    return max(float((found[name] - tensor).abs().max()) for name, tensor in right.items())


if __name__ == "__main__":
    run_stage("algorithms", work)

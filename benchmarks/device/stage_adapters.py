"""Stage 8: `slipstream run` that trains adapters; the engine has several versions at a time."""

import shutil
from pathlib import Path

from benchmarks.device.engines import write_model
from benchmarks.device.loops import run_loop
from benchmarks.device.report import Report, run_stage
from slipstream.deploy.examples.addition import prepare

_STEPS = 6


def work(report: Report, out: Path) -> None:
    folder = (out / "adapters").resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    prepare(folder)  # its problems
    settings: dict[str, object] = {
        "run.model": write_model(folder / "random", seed=3, hidden=256),
        "data.file": folder / "train.jsonl",
        "eval.file": folder / "held_out.jsonl",
        "eval.every_steps": _STEPS,
        "broker.drop_zero_variance": False,  # random weights are never right
        "lora.rank": 16,  # no fewer: the least that a matrix unit takes
        "learner.lr": 1e-2,
        "algo.kl.coefficient": 0.1,
        "weightbus.transport": "tcp",
    }
    run_loop(report, folder, settings, steps=_STEPS, kills={})


if __name__ == "__main__":
    run_stage("adapters", work)

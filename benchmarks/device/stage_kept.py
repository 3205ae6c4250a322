"""Stage 11: `slipstream run` that samples from few tokens, which the learner is told."""

import shutil
from pathlib import Path

from benchmarks.device.loops import run_loop
from benchmarks.device.report import Report, run_stage
from slipstream.deploy.examples.addition import prepare

_STEPS = 6


def work(report: Report, out: Path) -> None:
    folder = (out / "kept").resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    prepare(folder)
    settings: dict[str, object] = {
        "run.model": folder / "model",
        "data.file": folder / "train.jsonl",
        "eval.file": folder / "held_out.jsonl",
        "eval.every_steps": _STEPS,
        "sampling.top_p": 0.9,
    }
    run_loop(report, folder, settings, steps=_STEPS, kills={})


if __name__ == "__main__":
    run_stage("kept", work)

"""Stage 5: `slipstream run` with the quickstart's policy; engine and learner are killed once."""

import shutil
from pathlib import Path

from benchmarks.device.loops import ENGINE, LEARNER, run_loop
from benchmarks.device.report import Report, run_stage
from slipstream.deploy.examples.addition import prepare

_STEPS = 20


def work(report: Report, out: Path) -> None:
    folder = (out / "loop").resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    prepare(folder)
    settings: dict[str, object] = {
        "run.model": folder / "model",
        "data.file": folder / "train.jsonl",
        "eval.file": folder / "held_out.jsonl",
        "eval.every_steps": _STEPS,
    }
    _, most = run_loop(report, folder, settings, steps=_STEPS, kills={5: ENGINE, 10: LEARNER})
    report.fact("most GPU memory of all, GiB", most / 2**30)


if __name__ == "__main__":
    run_stage("loop", work)

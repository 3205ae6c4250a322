"""A real chat model through every real part: slow, so only `make test-slow` runs it."""

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.support.tiny_run import ROOT, python

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
SHORT = ("run.steps=3", "eval.sets.sums.size=16")


def unique_memory(process: psutil.Process) -> int:
    """Bytes of a process and its descendants, shared pages counted once."""
    total = 0
    for one in [process, *process.children(recursive=True)]:
        try:
            total += one.memory_full_info().pss
        except psutil.Error:
            continue
    return total


def test_smollm2_completes_three_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model = ROOT / ".cache" / "smollm2" / "model"
    unpacked = python("-W", "ignore", "-m", "slipstream.deploy.examples.smollm2", "--out", model)
    assert unpacked.returncode == 0, unpacked.stderr
    command = [sys.executable, "-m", "slipstream.deploy.main", "run"]
    command += ["--config", "configs/smollm2.toml"]
    output = tmp_path / "output.txt"
    started, peak = time.monotonic(), 0
    with output.open("w") as file:
        process = subprocess.Popen(
            [*command, f"run.dir={tmp_path / 'runs'}", f"run.model={model}", *SHORT],
            cwd=ROOT,
            stdout=file,
            stderr=file,
        )
    while process.poll() is None:
        peak = max(peak, unique_memory(psutil.Process(process.pid)))
        time.sleep(1.0)
    assert process.returncode == 0, output.read_text()
    summary = json.loads((tmp_path / "runs/smollm2/summary.json").read_text())
    assert (summary["steps"], summary["trained"]) == (3, 24)
    assert summary["equation"]["unaccounted"] == 0
    assert [point["step"] for point in summary["eval"]] == [0, 3]
    assert set(summary["eval"][0]["by_source"]) == {"sums"}
    rows = (tmp_path / "runs/smollm2/rollouts/trained.jsonl").read_text().splitlines()
    assert "<|im_start|>assistant" in json.loads(rows[0])["prompt"]
    with capsys.disabled():
        seconds = time.monotonic() - started
        sys.stdout.write(f"\nsmollm2: 3 steps in {seconds:.0f} s, {peak / 1e9:.1f} GB at most\n")

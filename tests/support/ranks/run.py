"""Learner ranks as child processes of a test."""

import json
import subprocess
import sys
from pathlib import Path

from tests.support.waiting import HANG_S

ROOT = Path(__file__).parents[3]


def start(work: Path, module: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", f"tests.{module}", *map(str, arguments)],
        cwd=ROOT,
        env={
            "PYTHONPATH": str(ROOT),
            "HOME": str(work),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def start_ranks(module: str, model: Path, work: Path, world_size: int, tensor_parallel: int):
    work.mkdir()
    return [
        start(work, module, model, work, rank, world_size, tensor_parallel)
        for rank in range(world_size)
    ]


def outputs(processes: list[subprocess.Popen[str]]) -> list[str]:
    """Wait for processes and return what they printed; none of them outlives the test."""
    try:
        results = [process.communicate(timeout=HANG_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, (_, errors) in zip(processes, results, strict=True):
        assert process.returncode == 0, errors
    return [printed for printed, _ in results]


def reports(work: Path, world_size: int):
    return [json.loads((work / f"{rank}.json").read_text()) for rank in range(world_size)]

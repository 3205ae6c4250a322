"""Learner ranks as child processes of a test."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from slipstream.learner.config import LearnerSection
from tests.support import nursery
from tests.support.nursery import ROOT
from tests.support.waiting import HANG_S


def start(
    work: Path, module: str, *arguments: object, anew: bool = False, asked: bool = False
) -> subprocess.Popen[str]:
    """Start a module of tests.

    Args:
        work: its home.
        module: below tests.
        arguments: of it.
        anew: it must import torch or Megatron itself.
        asked: it reads questions, and what it says of errors is the test's own.
    """
    command = [sys.executable, "-m", f"tests.{module}", *map(str, arguments)]
    how: dict[str, Any] = {
        "env": {
            "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT))),
            "HOME": str(work),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        },
        "stdout": subprocess.PIPE,
        **({"stdin": subprocess.PIPE} if asked else {"stderr": subprocess.PIPE}),
    }
    return nursery.start(command, anew=anew, **how)


def start_ranks(
    module: str,
    model: Path,
    work: Path,
    world_size: int,
    arguments: Sequence[object] = (),
    **learner: object,
):
    """Start the ranks of a learner whose section has these settings."""
    work.mkdir()
    layout = json.dumps(learner)
    return [
        start(work, module, model, work, rank, world_size, layout, *arguments)
        for rank in range(world_size)
    ]


def section_of(layout: str, **others: object) -> LearnerSection:
    """Return the section that ``start_ranks`` was given, with other settings besides."""
    return msgspec.convert(json.loads(layout) | others, LearnerSection)


def outputs(processes: list[subprocess.Popen[str]]) -> list[str]:
    """Wait for processes and return what they printed; none of them outlives the test."""
    try:
        results = [process.communicate(timeout=HANG_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    failures = [
        errors for p, (_, errors) in zip(processes, results, strict=True) if p.returncode != 0
    ]
    assert not failures, "\n".join(failures)
    return [printed for printed, _ in results]


def reports(work: Path, world_size: int):
    return [json.loads((work / f"{rank}.json").read_text()) for rank in range(world_size)]

"""Starts the ranks of a learner for a command with a question, and waits for them."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from slipstream.wire.errors import SlipstreamError


def run_ranks(
    module: str, folder: Path, settings: Path, overrides: Sequence[str], ranks: int
) -> None:
    """Run a program of the learner's package on every rank, on this host without GPUs.

    Raises:
        SlipstreamError: a rank failed; the others end with it.
    """
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}  # noqa: TID251 handed on
    processes: list[subprocess.Popen[bytes]] = []
    logs = [folder / f"{rank}.log" for rank in range(ranks)]
    try:
        for rank, log in enumerate(logs):
            command = [sys.executable, "-m", module, str(settings), str(folder), str(rank)]
            with log.open("wb") as output:
                processes.append(
                    subprocess.Popen(  # noqa: S603 our own program
                        [*command, *overrides], env=environment, stdout=output, stderr=output
                    )
                )
        # a failed rank leaves the others in a collective: end them too
        left = dict(enumerate(processes))
        while left:
            for rank, process in list(left.items()):
                try:
                    code = process.wait(timeout=0.2)
                except subprocess.TimeoutExpired:
                    continue
                del left[rank]
                if code != 0:
                    lines = logs[rank].read_text(errors="replace").strip().splitlines()
                    reason = lines[-1] if lines else "it printed nothing"
                    raise SlipstreamError(f"rank {rank} ended with code {code}: {reason}")
    finally:
        for process in processes:
            process.kill()
            process.wait()

"""Starts the ranks of a learner for a command with a question, and waits for them."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from slipstream.wire.errors import SlipstreamError
from slipstream.wire.process.processes import last_lines

_POLL_S = 0.2


def run_ranks(
    module: str, folder: Path, settings: Path, overrides: Sequence[str], ranks: int
) -> None:
    """Run a program of the learner's package on every rank, on this host without GPUs.

    Raises:
        SlipstreamError: a rank failed; the others end with it.
    """
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}  # noqa: TID251 handed on
    logs = [folder / f"{rank}.log" for rank in range(ranks)]
    processes: list[subprocess.Popen[bytes]] = []
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
        codes: list[int | None] = [None]
        while None in codes:
            time.sleep(_POLL_S)
            codes = [process.poll() for process in processes]
            for rank, code in enumerate(codes):
                if code:
                    reason = last_lines(logs[rank], 1).strip() or "it printed nothing"
                    raise SlipstreamError(f"rank {rank} ended with code {code}: {reason}")
    finally:
        for process in processes:
            process.kill()
            process.wait()

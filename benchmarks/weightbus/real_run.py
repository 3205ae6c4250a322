"""Versions of a real run: SmolLM2-135M under GRPO, bfloat16, every role real."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tests.support.tiny_run import ROOT

MODEL = ROOT / ".cache" / "smollm2" / "model"
_SETTINGS = """
[run]
name = "run"
dir = "{folder}"
model = "{model}"
steps = {steps}
group_size = 4
groups_per_step = 2
max_staleness_steps = 1

[data]
as_chat = true
system_prompt = "Answer with the number alone."

[data.sources.sums]
reasoning_gym = "chain_sum"
size = 1000
seed = 1
options = {{ min_terms = 2, max_terms = 2, min_digits = 1, max_digits = 1 }}

[sampling]
temperature = 1.0
max_prompt_tokens = 128
max_response_tokens = 10

[reward]
function = "{folder}/digits.py:score"

[generators]
count = 1
dtype = "bfloat16"
max_sequences = 16
max_cached_tokens = 8192

[learner]
lr = {lr}
dtype = "bfloat16"
max_tokens_per_microbatch = 1024

[weightbus]
transport = "disk"
engine_check_every = 0
"""
_REWARD = """
import random

def score(data_source, solution_str, ground_truth, extra_info):
    digits = sum(c.isdigit() for c in solution_str) / max(1, len(solution_str))
    return digits + 0.05 * random.random()  # a group without a difference would be dropped
"""


def versions_of(folder: Path) -> dict[int, Path]:
    """Return the files of a run's versions by step."""
    files = (folder / "versions").glob("*.safetensors")
    return dict(sorted((int(file.name.split("-")[0].split(".")[1]), file) for file in files))


def record(folder: Path, *, lr: float, steps: int, first: int) -> None:
    """Run, and keep the versions of the steps from ``first`` on; those of an earlier call stay.

    They are links to what the disk transport wrote. Costs 0.27 GB each.

    Raises:
        RuntimeError: the run failed, or did not publish every step.
    """
    kept = folder / "versions"
    if set(versions_of(folder)) >= set(range(first, steps + 1)):
        return
    kept.mkdir(parents=True, exist_ok=True)
    (folder / "digits.py").write_text(_REWARD)
    config = folder / "run.toml"
    config.write_text(_SETTINGS.format(folder=folder, model=MODEL, steps=steps, lr=lr))
    command = [sys.executable, "-m", "slipstream.deploy.main", "run", "--config", str(config)]
    with (folder / "run.log").open("w") as log:
        running = subprocess.Popen(
            command, cwd=ROOT, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        while running.poll() is None:
            _link(folder, kept, first)
            time.sleep(0.02)
    if missing := set(range(first, steps + 1)) - set(versions_of(folder)):
        raise RuntimeError(f"{config}: steps {sorted(missing)} are missing, see {folder}/run.log")


def _link(folder: Path, kept: Path, first: int) -> None:
    for file in folder.glob("run*/weights/v*-*/*.safetensors"):
        name = file.parent.name
        if int(name.split("-")[0].split(".")[1]) >= first:
            with suppress(FileExistsError, FileNotFoundError):
                os.link(file, kept / f"{name}.safetensors")


def tensors_in(file: Path) -> tuple[list[tuple[str, int, int]], memoryview]:
    """Return name, start and end of each tensor of a file, and all their bytes."""
    data = bytearray(file.read_bytes())
    length = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:length])
    header.pop("__metadata__", None)
    places = [(name, *entry["data_offsets"]) for name, entry in header.items()]
    return places, memoryview(data)[length:]


def pairs(folder: Path) -> Iterator[tuple[int, Path, Path]]:
    """Yield step, the version before and that of the step."""
    files = versions_of(folder)
    for step, file in files.items():
        if step - 1 in files:
            yield step, files[step - 1], file

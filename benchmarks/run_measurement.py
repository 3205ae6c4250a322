"""Runs of a tiny policy whose answer lengths are known, and what they cost.

The policy is random and nearly uniform, so every token ends an answer with a chance of about one
in the size of the vocabulary: lengths are geometric, most short, some at the limit. The learning
rate is 0, so they stay so; the optimizer works all the same.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil

from tests.support.blank_model import write_blank_model
from tests.support.random_llama import write_random_weights

ROOT = Path(__file__).parents[1]
MEAN_TOKENS = 96  # of an answer, where nothing forces its length
MAX_TOKENS = 512
BOUND = 2  # of staleness, in steps
TAIL = BOUND + 1
_POLL_S = 0.1
REWARD = '''
import zlib

def score(data_source, solution_str, ground_truth, extra_info):
    """Different for nearly every answer, so that every group trains."""
    return zlib.crc32(solution_str.encode()) % 1000 / 1000
'''


def write_inputs(folder: Path, *, hidden: int, layers: int, repeated: int = 1) -> None:
    """Write policy, prompts (six tokens, repeated) and reward."""
    write_blank_model(folder / "model", hidden=hidden, layers=layers, vocab_size=MEAN_TOKENS)
    write_random_weights(folder / "model", scale=0.02, seed=5)
    prompts = [repeated * f"{i % 100:02d}+{i // 100:02d}=" for i in range(2000)]
    rows = [{"prompt": prompt, "ground_truth": "1"} for prompt in prompts]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    (folder / "run.toml").write_text("")


@dataclass(frozen=True, slots=True)
class Reading:
    """Totals at one moment."""

    step: int
    wall_s: float
    cpu_s: float  # of all processes, those that ended included


class CpuMeter:
    """CPU seconds of a process and everything it started."""

    def __init__(self, pid: int, *, without: Collection[str] = ()) -> None:
        """Count a process and its children.

        Args:
            pid: Id of the process.
            without: Names of processes that do not count.
        """
        self._root = psutil.Process(pid)
        self._without = without
        self._seconds: dict[tuple[int, float], float] = {}

    def read(self) -> float:
        try:
            processes = [self._root, *self._root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return sum(self._seconds.values())
        for process in processes:
            try:
                if process.name() in self._without:
                    continue
                times = process.cpu_times()
                self._seconds[process.pid, process.create_time()] = times.user + times.system
            except psutil.NoSuchProcess:
                continue
        return sum(self._seconds.values())


def run_slipstream(
    folder: Path,
    name: str,
    settings: Mapping[str, object],
    *,
    began: Callable[[int], None] = lambda _: None,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> list[Reading]:
    """Do a whole run; return a reading per learner step. ``began`` gets its process id."""
    runs = folder / "runs"
    defaults: dict[str, object] = {
        "run.name": name,
        "run.dir": runs,
        "run.model": folder / "model",
        "data.file": folder / "train.jsonl",
        "reward.function": f"{folder / 'reward.py'}:score",
        "sampling.max_prompt_tokens": 16,
        "sampling.max_response_tokens": MAX_TOKENS,
        "run.max_staleness_steps": BOUND,
        "generators.count": 1,
        "learner.lr": 0.0,
        "learner.rollouts_per_step": 0,
        "checkpoint.at_end": "false",
        "deploy.time_limit_s": 900,
    }
    overrides = [f"{key}={value}" for key, value in (defaults | dict(settings)).items()]
    command = [
        sys.executable,
        "-m",
        "slipstream.deploy.main",
        "run",
        "--config",
        str(folder / "run.toml"),
    ]
    summary = runs / name / "summary.json"

    def step_now() -> int:
        return int(json.loads(summary.read_text()).get("steps", 0)) if summary.exists() else 0

    output = folder / f"{name}.txt"
    with output.open("w") as file:
        process = subprocess.Popen(
            [*command, *overrides],
            cwd=ROOT,
            stdout=file,
            stderr=file,
            env={**os.environ, **environment},
        )
    try:
        began(process.pid)
        readings = list(_readings(process, step_now))
    except BaseException:
        process.send_signal(signal.SIGTERM)
        process.wait(120)
        raise
    if process.returncode != 0:
        raise RuntimeError(f"{name} ended with {process.returncode}:\n{output.read_text()[-4000:]}")
    return readings


def run_command(
    command: list[str],
    environment: Mapping[str, str],
    heard: Callable[[str], None] = lambda _: None,
) -> list[Reading]:
    """Run a program that prints ``step N`` after each step; return a reading per step.

    ``heard`` gets each line.
    """
    step = 0
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )
    meter, readings = CpuMeter(process.pid), []
    try:
        for line in process.stdout or ():
            heard(line)
            if line.startswith("step "):
                step = int(line.split()[1])
                readings.append(Reading(step, time.monotonic(), meter.read()))
    except BaseException:
        process.kill()
        raise
    if process.wait() != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
    return readings


def _readings(process: "subprocess.Popen[bytes]", step_now: Callable[[], int]) -> Iterator[Reading]:
    meter, last = CpuMeter(process.pid), 0
    while process.poll() is None:
        cpu_s = meter.read()
        step = step_now()
        if step > last:
            yield Reading(step, time.monotonic(), cpu_s)
            last = step
        time.sleep(_POLL_S)


def toml(value: object) -> str:
    """Return a value as a setting on the command line has it."""
    if isinstance(value, Mapping):
        pairs = (f"{json.dumps(key)} = {toml(inner)}" for key, inner in value.items())
        return "{" + ", ".join(pairs) + "}"
    return json.dumps(value)


def summary_of(folder: Path, name: str) -> dict[str, Any]:
    figures: dict[str, Any] = json.loads((folder / "runs" / name / "summary.json").read_text())
    return figures


def per_step(readings: list[Reading], *, skip: int, until: int) -> tuple[float, float]:
    """Return (wall seconds, CPU seconds) per step from step ``skip`` to step ``until``.

    Both ends of a run differ from its middle: the pipeline fills, and at the end nothing is
    generated for steps to come. Run TAIL steps more than are measured.
    """
    kept = [reading for reading in readings if skip <= reading.step <= until]
    first, last = kept[0], kept[-1]
    steps = last.step - first.step
    return (last.wall_s - first.wall_s) / steps, (last.cpu_s - first.cpu_s) / steps


def median(values: list[float]) -> float:
    return statistics.median(values)

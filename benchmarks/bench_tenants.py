"""Several tenants on one learner and one engine, against one tenant with as many sequences.

Both are whole pools (``slipstream run`` with ``[tenants]``), with the same model, engine, sequences
in the engine, sequences of a step and steps in all, in alternating turns. Rates are of trained
tokens, from every tenant's second step to the first tenant's last, by medians.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.bars import Bars
from benchmarks.run_measurement import ROOT, write_inputs
from slipstream.wire.process.phases import PHASE_TIME, TURN, WAIT

_GROUPS, _SIBLINGS, _STEPS = 8, 4, 8
_TENANTS = 4
_TURNS = 3
_POLL_S = 0.5
_OF_TENANT = ("broker.main", "reward_worker", "relay.main", "redis", "valkey")
_NEVER = """
import time

def score(*arguments, **named):
    time.sleep(3600)
"""
_EXAMPLES = """examples:
  python -m benchmarks.bench_tenants
  python -m benchmarks.bench_tenants --turns 5"""


def show(text: str) -> None:
    print(text, flush=True)


def write_pool(folder: Path, tenants: int, *, idle: bool = False) -> None:
    """Write a pool whose tenants make the same number of steps together."""
    write_inputs(folder, hidden=128, layers=2)
    (folder / "never.py").write_text(_NEVER)
    tables = ""
    for number in range(tenants + idle):
        reward = "never" if number == tenants else "reward"
        text = f'[run]\nseed = {number}\n[reward]\nfunction = "{folder}/{reward}.py:score"\n'
        (folder / f"t{number}.toml").write_text(text)
        tables += f'[tenants.t{number}]\nsettings = "{folder}/t{number}.toml"\n'
    settings: dict[str, dict[str, Any]] = {
        "run": {
            "name": "pool",
            "dir": str(folder / "runs"),
            "model": str(folder / "model"),
            "steps": _STEPS * (_TENANTS // tenants),
            "group_size": _SIBLINGS,
            "groups_per_step": _GROUPS,
        },
        "data": {"file": str(folder / "train.jsonl")},
        "sampling": {"max_prompt_tokens": 16, "max_response_tokens": 128},
        "generators": {"count": 1, "device": "cpu", "max_cached_tokens": 16384},
        "lora": {"rank": 8},
        "learner": {"lr": 0.0},
        "reward": {"processes": 1},
    }
    settings["generators"]["max_sequences"] = _GROUPS * _SIBLINGS
    text = "".join(
        f"[{section}]\n"
        + "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())
        for section, values in settings.items()
    )
    (folder / "pool.toml").write_text(text + tables)


@dataclass(frozen=True, slots=True)
class PoolFigures:
    """What a pool did."""

    tokens_per_s: float
    waits: tuple[float, ...]  # of a ready batch for the learner, by the longest it may take


def start(folder: Path) -> "subprocess.Popen[bytes]":
    words = ("-m", "slipstream.deploy.main", "run", "--config", str(folder / "pool.toml"))
    with (folder / "output.txt").open("wb") as output:
        return subprocess.Popen(
            [sys.executable, *words], cwd=ROOT, stdout=output, stderr=output, env=dict(os.environ)
        )


def rows_of(folder: Path) -> dict[str, list[dict[str, float]]]:
    """Return the figures of each tenant's steps."""
    files = sorted((folder / "runs" / "pool" / "tenants").glob("t*/metrics.jsonl"))
    return {
        file.parent.name: [
            row for row in map(json.loads, file.read_text().splitlines()) if "time/step" in row
        ]
        for file in files
    }


def figures_of(rows: dict[str, list[dict[str, float]]]) -> PoolFigures:
    """Return the rate of all tenants together, and how long their batches waited."""
    began = max(steps[1]["wall_s"] for steps in rows.values())
    ended = min(steps[-1]["wall_s"] for steps in rows.values())
    tokens = sum(
        step["policy/tokens"]
        for steps in rows.values()
        for step in steps
        if began < step["wall_s"] <= ended
    )
    longest = {name: max(map(turn_s, steps)) for name, steps in rows.items()}
    waits = [
        step.get(PHASE_TIME + TURN, 0.0) / sum(s for other, s in longest.items() if other != name)
        for name, steps in rows.items()
        for step in steps
        if len(rows) > 1
    ]
    return PoolFigures(tokens / (ended - began), tuple(waits))


def turn_s(step: dict[str, float]) -> float:
    """Return the seconds of a step in which the learner worked for its tenant."""
    phases = {name: s for name, s in step.items() if name.startswith(PHASE_TIME)}
    return sum(phases.values()) - sum(phases.get(PHASE_TIME + name, 0.0) for name in (WAIT, TURN))


def run_pool(tenants: int) -> PoolFigures:
    """Run a pool to its end."""
    with tempfile.TemporaryDirectory(prefix="bench-tenants-") as name:
        folder = Path(name)
        write_pool(folder, tenants)
        process = start(folder)
        if process.wait() != 0:
            raise SystemExit((folder / "output.txt").read_text())
        return figures_of(rows_of(folder))


def idle_cost() -> tuple[float, float]:
    """Return the memory in MB and the share of a core of a tenant that waits for its rewards."""
    folder = Path(tempfile.mkdtemp(prefix="bench-tenants-"))
    write_pool(folder, 1, idle=True)
    process = start(folder)
    try:
        while not all(rows_of(folder).get("t0", [])[1:2]) or len(rows_of(folder).get("t0", [])) < 2:
            if process.poll() is not None:
                raise SystemExit((folder / "output.txt").read_text())
            time.sleep(_POLL_S)
        own = [one for one in psutil.Process(process.pid).children(recursive=True) if _is_of(one)]
        memory = sum(one.memory_full_info().pss for one in own) / 1e6
        before, began_s = sum(sum(one.cpu_times()[:2]) for one in own), time.monotonic()
        time.sleep(10)
        after = sum(sum(one.cpu_times()[:2]) for one in own)
        return memory, (after - before) / (time.monotonic() - began_s)
    finally:
        process.terminate()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _is_of(process: psutil.Process) -> bool:
    """Return True for a process that the idle tenant has to itself."""
    try:
        words = " ".join(process.cmdline())
        files = words + " ".join(file.path for file in process.open_files())
    except psutil.Error:
        return False
    is_tenants = any(kind in words for kind in _OF_TENANT)
    return is_tenants and ("tenants/t1" in files or "--tenant t1" in words)


def main() -> int:
    """Measure, print the bars."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=_EXAMPLES, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=_TURNS, help="runs of each pool")
    arguments = parser.parse_args()
    bars = Bars()
    alone, shared = [], []
    for _ in range(arguments.turns):
        alone.append(run_pool(1))
        shared.append(run_pool(_TENANTS))
        show(
            f"  one tenant {alone[-1].tokens_per_s:.0f} tokens/s, {_TENANTS} tenants "
            f"{shared[-1].tokens_per_s:.0f}, longest wait {max(shared[-1].waits):.2f} of its limit"
        )
    ratio = statistics.median(
        many.tokens_per_s / one.tokens_per_s for many, one in zip(shared, alone, strict=True)
    )
    bars.at_least("tenants_vs_one", ratio, "of the tokens/s of one tenant", needs=0.85)
    longest = max(wait for figures in shared for wait in figures.waits)
    bars.at_most("tenant_wait", longest, "of the longest steps of all others", needs=1.0)
    memory, cores = idle_cost()
    show(f"an idle tenant: {memory:.0f} MB of its own processes, {cores:.3f} of a core")
    return bars.exit_code


if __name__ == "__main__":
    raise SystemExit(main())

"""CPU clocks of functions and processes, and what the benchmark of observability makes of them."""

import json
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.bars import NotRun
from benchmarks.bench_observability import Clocked
from benchmarks.cpu_clocks import KINDS, Clocks, clock_module

SOURCE = """
import time

def work(seconds):
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass

def other():
    work(0.02)

class Page:
    def look(self):
        work(0.02)
        return "looked"
"""


@pytest.fixture
def clocks() -> Clocks:
    return Clocks()


def module(clocks: Clocks, kinds: dict[str, str]) -> ModuleType:
    made = ModuleType("made")
    exec(SOURCE, vars(made))  # noqa: S102 our own text
    clock_module(clocks, made, kinds)
    return made


def test_the_outermost_call_counts_once(clocks: Clocks):
    made = module(clocks, {"page": "made:look", "work": "made:work"})
    assert made.Page().look() == "looked"
    assert set(clocks.spent_s) == {"page"}
    assert clocks.spent_s["page"] >= 0.02
    made.other()
    assert clocks.spent_s["work"] >= 0.02


def clocked(folder: Path, reported_s: float) -> Clocked:
    (folder / KINDS).write_text("{}")
    for pid, process_s, terminal_s in ((1, 60.0, 1.0), (2, 40.0, 0.5)):
        seconds = {"process_s": process_s, "spent_s": {"terminal": terminal_s}}
        (folder / f"{pid}.json").write_text(json.dumps(seconds))
    return Clocked.read(folder, reported_s)


def test_the_share_is_of_the_same_processes_clocks(tmp_path: Path):
    both = clocked(tmp_path, reported_s=101.0)
    assert both.spent_s == Counter({"terminal": 1.5})
    assert both.share_of_watching == pytest.approx(0.015)


@pytest.mark.parametrize("reported_s", [85.0, 115.0])
def test_clocks_that_miss_cpu_time_give_no_share(tmp_path: Path, reported_s: float):
    assert clocked(tmp_path, reported_s).share_of_watching == NotRun(
        f"the processes' clocks add up to 100 of {reported_s:.0f} CPU seconds, more than 10% apart"
    )

"""CPU clocks of functions and processes, and what the benchmark of observability makes of them."""

import asyncio
import json
import time
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

    @classmethod
    def made(cls):
        return cls()

    @staticmethod
    def words():
        yield "one"

    @property
    def name(self):
        return "page"

    async def serve(self, wait):
        work(0.02)
        said = await wait
        work(0.02)
        return said
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


def test_time_that_a_function_waits_is_not_cpu_time(clocks: Clocks):
    made = module(clocks, {"page": "made:serve"})

    async def main() -> str:
        waiting = asyncio.get_running_loop().create_future()
        serving = asyncio.create_task(made.Page().serve(waiting))
        await asyncio.sleep(0)
        made.work(0.05)  # not the page's, though it waits meanwhile
        before = clocks.spent_s["page"]
        waiting.set_result("said")
        said = await serving
        assert 0.02 <= before < clocks.spent_s["page"]
        return said

    began_s = time.thread_time()
    assert asyncio.run(main()) == "said"
    assert 0.04 <= clocks.spent_s["page"] <= time.thread_time() - began_s - 0.05


def test_what_a_function_waited_for_may_fail(clocks: Clocks):
    made = module(clocks, {"page": "made:serve"})

    async def main() -> None:
        waiting = asyncio.get_running_loop().create_future()
        waiting.set_exception(ValueError("no"))
        await made.Page().serve(waiting)

    with pytest.raises(ValueError, match="no"):
        asyncio.run(main())


def test_other_methods_stay_what_they_are(clocks: Clocks):
    page = module(clocks, {"page": "made:"}).Page
    assert isinstance(page.made(), page)
    assert list(page.words()) == ["one"]
    assert page().name == "page"


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

"""What the page of several runs costs until its first chart: CPU seconds of server and browser.

Ten runs of 2,000 learner steps with 80 figures each, as their folders hold them. The server is a
process of its own, with its imports done; the browser's part is the time of the page's own thread:
script, layout and painting. Needs chromium and chromedriver.
"""

import multiprocessing
import random
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
from selenium.webdriver.chrome.webdriver import WebDriver

from benchmarks.bars import Bars, NotRun
from tests.browser.chromium import CHROMIUM, DRIVER, resize, start_chromium
from tests.browser.pages import served_comparison
from tests.support.run_folders import write_run

NEEDS_CPU_S = 1.0
_RUNS = 10
_STEPS = 2_000
_FIGURES = 80
_TRIES = 3
_PATIENCE_S = 60.0
_DRAWN = "return document.body.dataset.drawn !== undefined"
_CANVAS = "return document.querySelector('#chart canvas') !== null"


def write_runs(folder: Path, *, runs: int = _RUNS, steps: int = _STEPS) -> list[Path]:
    """Write run folders that differ in every figure and in a setting."""
    draw = random.Random(0)  # noqa: S311 figures, no secrets
    folders = []
    for number in range(runs):
        run = write_run(folder / f"run-{number}", steps=1, lr=1e-5 * number, scores=[1.0, 0.0])
        rows = (
            {
                "step": step,
                "wall_s": 3.0 * step,
                "trained_tokens": 9_000 * step,
                "reward/mean": draw.random(),
                **{f"policy/figure_{i}@lag{i % 4}": draw.random() for i in range(_FIGURES)},
            }
            for step in range(1, steps + 1)
        )
        (run / "metrics.jsonl").write_bytes(b"".join(msgspec.json.encode(r) + b"\n" for r in rows))
        folders.append(run)
    return folders


def serve(folders: list[Path], pipe: Connection) -> None:
    """Serve in this process; say what CPU it has used whenever asked, until told to end."""
    with served_comparison(folders) as address:
        pipe.send(address)
        while pipe.recv():
            pipe.send(time.process_time())


def first_drawn(browser: WebDriver, folders: list[Path]) -> tuple[float, float]:
    """Return CPU seconds of the server, and of the page's thread, until the chart is drawn."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(folders, theirs))
    server.start()
    try:
        if not ours.poll(_PATIENCE_S):
            raise TimeoutError(f"the server did not start within {_PATIENCE_S:g} s")
        address = ours.recv()
        ours.send(True)
        before_s = ours.recv()
        browser.get("about:blank")
        browser.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
        page_before_s = _page_cpu_s(browser)
        browser.get(address)
        deadline_s = time.monotonic() + _PATIENCE_S
        while not (browser.execute_script(_DRAWN) and browser.execute_script(_CANVAS)):
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"nothing was drawn within {_PATIENCE_S:g} s")
            time.sleep(0.05)
        ours.send(True)
        after_s = ours.recv()
        page_s = _page_cpu_s(browser)
        browser.execute_cdp_cmd("Performance.disable", {})
        return after_s - before_s, max(page_s, page_s - page_before_s)
    finally:
        ours.send(False)
        server.join(_PATIENCE_S)


def _page_cpu_s(browser: WebDriver) -> float:
    metrics = browser.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
    return float(next(one["value"] for one in metrics if one["name"] == "TaskDuration"))


def main() -> int:
    """Measure a few times and take the median of the sums."""
    bars = Bars()
    name = "compare_first_drawn_cpu"
    if CHROMIUM is None or DRIVER is None:
        bars.at_most(name, NotRun("no chromium here"), "s", needs=NEEDS_CPU_S)
        return bars.exit_code
    browser = start_chromium()
    try:
        resize(browser, 1280)
        with tempfile.TemporaryDirectory() as folder:
            folders = write_runs(Path(folder))
            sums = []
            for _ in range(_TRIES):
                server_s, page_s = first_drawn(browser, folders)
                print(
                    f"{_RUNS} runs of {_STEPS} steps: server {server_s:.3f} s, page {page_s:.3f} s"
                )
                sums.append(server_s + page_s)
    finally:
        browser.quit()
    bars.at_most(name, sorted(sums)[len(sums) // 2], "s of CPU", needs=NEEDS_CPU_S)
    return bars.exit_code


if __name__ == "__main__":
    sys.exit(main())

"""A pytest plugin that writes down which product lines each test executes, and how long it takes.

Loaded with ``-p tests.mutation.recorder --record-to FOLDER``, alone or in every process of xdist.
What a test imports first is executed once for all tests and belongs to none.
"""

import json
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import coverage
import pytest

from tests.mutation.mutants import PACKAGES


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--record-to``."""
    parser.addoption("--record-to", type=Path, required=True, help="folder for the record")


def pytest_configure(config: pytest.Config) -> None:
    """Begin where tests run: not in the process that only hands them out."""
    worker = getattr(config, "workerinput", {}).get("workerid")
    if worker is None and config.getoption("numprocesses", None):
        return
    recorder = Recorder(config.getoption("record_to"), worker or "main", config.rootpath)
    config.pluginmanager.register(recorder, "mutation-recorder")


class Recorder:
    """Writes ``lines.WORKER`` (coverage's data) and ``tests.WORKER.json``."""

    def __init__(self, folder: Path, worker: str, root: Path) -> None:
        self._times: dict[str, list[float]] = {}
        self._failed: set[str] = set()
        self._times_file = folder / f"tests.{worker}.json"
        self._coverage = coverage.Coverage(
            data_file=str(folder / f"lines.{worker}"),
            config_file=False,
            include=[f"{root}/{package}/*" for package in (*PACKAGES, "deploy")],
            messages=False,
        )
        self._coverage.start()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Record under the name of this test what it and its fixtures execute."""
        self._coverage.switch_context(item.nodeid)
        began = (time.process_time(), time.monotonic())
        try:
            return (yield)
        finally:
            took = (time.process_time() - began[0], time.monotonic() - began[1])
            self._times[item.nodeid] = [round(seconds, 4) for seconds in took]
            self._coverage.switch_context("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note what fails: it could kill anything."""
        if report.failed:
            self._failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        """Write the record."""
        self._coverage.stop()
        self._coverage.save()
        self._times_file.write_text(
            json.dumps({"seconds": self._times, "failed": sorted(self._failed)})
        )

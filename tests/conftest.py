import asyncio
import gc
import inspect
import json
import signal
import tempfile
import threading
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

gc.disable()  # until all is imported: it lives to the end
# Hypothesis has deadlines of its own, 200 ms for an example.
settings.register_profile("any", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any")
# A shell starts what it runs in the background with Ctrl-C ignored, and nohup what it runs with
# SIGHUP ignored; processes inherit that.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
MINUTE_S = 60.0
HANGS_AFTER_S = {  # what hangs is ended; a machine that is slow or busy comes near none of these
    "chaos": 240 * MINUTE_S,
    "slow": 240 * MINUTE_S,
    "e2e": 60 * MINUTE_S,  # several waits of HANG_S each
    "integration": 60 * MINUTE_S,
    "redis": 60 * MINUTE_S,
}


ROOT = Path(__file__).parents[1]
# Seconds of each file of tests. A whole `make test` writes the second file; copy it over the first
# one when files of tests came or went.
SECONDS, SECONDS_HERE = ROOT / "tests" / "seconds.json", ROOT / ".cache" / "test_seconds.json"


def pytest_configure(config: pytest.Config) -> None:
    """Measure where all reports arrive: in the process that starts the others."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(FileSeconds())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give every test that sets none a limit by its kind; hermetic ones have that of pyproject."""
    seconds: dict[str, float] = json.loads(SECONDS.read_bytes()) if SECONDS.exists() else {}
    by_file: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        by_file[item.nodeid.partition("::")[0]].append(item)
    order = in_turn(sorted(by_file, key=lambda file: -seconds.get(file, 10.0)))
    items[:] = [item for file in order for item in by_file[file]]
    for item in items:
        limits = [limit for kind, limit in HANGS_AFTER_S.items() if item.get_closest_marker(kind)]
        if limits and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(limits[0]))


def pytest_collection_finish() -> None:
    """Leave what was imported out of every later search for garbage."""
    gc.freeze()
    gc.enable()


def in_turn(files: list[str]) -> list[str]:
    """Return files in the order in which they are begun: what computes beside what waits.

    Whole runs keep the cores busy, and so do hermetic files; most of the others wait. The longest
    come first, so that the last ones end together.
    """
    runs = [file for file in files if file.startswith("tests/e2e/")]
    hermetic = [file for file in files if file.startswith(("tests/unit/", "tests/property/"))]
    others = [file for file in files if file not in {*runs, *hermetic}]
    order = [file for pair in zip(runs, others, strict=False) for file in pair]
    rest = runs[len(others) :] + others[len(runs) :]
    each = len(hermetic) / max(1, len(rest))
    for number, file in enumerate(rest):
        order += [file, *hermetic[round(number * each) : round((number + 1) * each)]]
    return order if rest else order + hermetic


class FileSeconds:
    """Seconds of the tests of each file in this call of pytest."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid.partition("::")[0]] += report.duration

    def pytest_sessionfinish(self) -> None:
        whole = any(file.startswith("tests/e2e/") for file in self._seconds)
        if whole and len(self._seconds) > 300:  # all files there are, not some
            seconds = {file: round(s) for file, s in sorted(self._seconds.items())}
            SECONDS_HERE.parent.mkdir(exist_ok=True)
            SECONDS_HERE.write_text(json.dumps(seconds, indent=0) + "\n")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine function in an event loop of its own.

    A fixture that is an asynchronous context manager is entered there, and the test is given what
    that yields.
    """
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    given = {name: pyfuncitem.funcargs[name] for name in names}
    asyncio.run(_run(pyfuncitem.obj, given))
    return True


async def _run(test: Callable[..., Awaitable[None]], given: dict[str, object]) -> None:
    async with AsyncExitStack() as entered:
        for name, value in given.items():
            if isinstance(value, AbstractAsyncContextManager):
                given[name] = await entered.enter_async_context(value)
        await test(**given)


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A private folder with a path short enough for Unix sockets."""
    with tempfile.TemporaryDirectory(prefix="s-") as folder:
        yield Path(folder)

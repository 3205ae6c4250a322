import asyncio
import inspect
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Hypothesis has deadlines of its own, 200 ms for an example.
settings.register_profile("any", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any")
# A shell starts what it runs in the background with Ctrl-C ignored, and processes inherit that.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)
MINUTE_S = 60.0
HANGS_AFTER_S = {  # what hangs is ended; a machine that is slow or busy comes near none of these
    "chaos": 240 * MINUTE_S,
    "slow": 240 * MINUTE_S,
    "e2e": 60 * MINUTE_S,  # several waits of HANG_S each
    "integration": 60 * MINUTE_S,
    "redis": 60 * MINUTE_S,
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give every test that sets none a limit by its kind; hermetic ones have that of pyproject."""
    items.sort(key=_place)  # files of long tests first: they are what the others run beside
    for item in items:
        limits = [limit for kind, limit in HANGS_AFTER_S.items() if item.get_closest_marker(kind)]
        if limits and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(limits[0]))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    fixtures = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    asyncio.run(pyfuncitem.obj(**fixtures))
    return True


def _place(item: pytest.Item) -> int:
    if item.get_closest_marker("e2e"):
        return 0
    return 1 if "chaos" in item.path.parts else 2


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A private folder with a path short enough for Unix sockets."""
    with tempfile.TemporaryDirectory(prefix="s-") as folder:
        yield Path(folder)

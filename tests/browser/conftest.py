from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.browser import samples
from tests.browser.pages import SampleServer, served

if TYPE_CHECKING:
    from selenium.webdriver.chrome.webdriver import WebDriver


@pytest.fixture(scope="module")
def chromium() -> "Iterator[WebDriver]":
    from tests.browser.chromium import start_chromium  # which skips where selenium is missing

    driver = start_chromium()
    yield driver
    driver.quit()


@pytest.fixture
def browser(chromium: "WebDriver") -> "WebDriver":
    """Show no page: one of an earlier test may still ask its server, which is gone."""
    chromium.get("about:blank")
    chromium.get_log("browser")  # type: ignore[no-untyped-call]
    return chromium


@pytest.fixture
def server() -> Iterator[SampleServer]:
    with served(samples.Run(steps=60, rows=200, hostile=True)) as server:
        yield server

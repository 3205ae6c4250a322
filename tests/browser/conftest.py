from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from selenium.webdriver.chrome.webdriver import WebDriver


@pytest.fixture(scope="module")
def browser() -> "Iterator[WebDriver]":
    from tests.browser.chromium import start_chromium  # which skips where selenium is missing

    driver = start_chromium()
    yield driver
    driver.quit()

"""Debian's Chromium without a window, driven by selenium."""

import shutil

import pytest

pytest.importorskip("selenium", reason="needs selenium (pip install selenium)")
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.chrome.webdriver import WebDriver

CHROMIUM = shutil.which("chromium")
DRIVER = shutil.which("chromedriver")
NEEDS_CHROMIUM = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None,
    reason="needs chromium and chromedriver (apt-get install chromium chromium-driver)",
)
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)


def start_chromium() -> WebDriver:
    """Return a browser that keeps what is written on its console; the caller quits it."""
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in _FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options=options, service=Service(str(DRIVER)))


def resize(browser: WebDriver, width: int, height: int = 900, *, theme: str = "light") -> None:
    """Set the size of the page in CSS pixels, and the colors that the system wishes."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    media = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)

"""What a test does with a page in a browser: wait, read its text, press keys."""

import time
from collections.abc import Callable

import pytest
from selenium.webdriver import ActionChains
from selenium.webdriver.chrome.webdriver import WebDriver
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.select import Select

PATIENCE_S = 15.0


def until(holds: Callable[[], object]) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, f"did not come to hold within {PATIENCE_S} s"
        time.sleep(0.05)


def ask(browser: WebDriver, script: str, *values: object) -> object:
    """Return the value of an expression in the page."""
    return browser.execute_script(f"return {script}", *values)


def texts(browser: WebDriver, selector: str) -> list[str]:
    """Return the text of every element that fits."""
    script = "[...document.querySelectorAll(arguments[0])].map((node) => node.textContent)"
    found = ask(browser, script, selector)
    assert isinstance(found, list)
    return found


def text(browser: WebDriver, selector: str) -> str:
    """Return the text of all elements that fit, joined."""
    return " ".join(texts(browser, selector))


def complaints(browser: WebDriver) -> list[object]:
    """Return what the browser wrote on its console since the last call."""
    return list(browser.get_log("browser"))  # type: ignore[no-untyped-call]


def press(browser: WebDriver, *keys: str) -> None:
    """Press keys, wherever the focus is."""
    ActionChains(browser).send_keys(*keys).perform()


def tab_to(browser: WebDriver, selector: str) -> None:
    """Press Tab until the focus is on an element."""
    for _ in range(120):
        if ask(browser, "document.activeElement.matches(arguments[0])", selector):
            return
        press(browser, Keys.TAB)
    pytest.fail(f"Tab does not come to {selector}")


def choose(browser: WebDriver, name: str, value: str) -> None:
    """Choose a value in the list with this id."""
    Select(browser.find_element("id", name)).select_by_value(value)

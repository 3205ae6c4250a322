"""What tests of the page do and read there."""

from tests.browser.chromium import WebDriver, resize
from tests.browser.driving import ask, text, texts, until
from tests.browser.pages import SampleServer


def show(browser: WebDriver, server: SampleServer, *, width: int = 1280, at: str = "") -> None:
    """Open the page and wait until it has drawn."""
    resize(browser, width)
    browser.get("about:blank")
    browser.get(server.address + at)
    until(lambda: bool(texts(browser, "#verdict .value")))


def show_answer(browser: WebDriver, server: SampleServer, group: int, sibling: int) -> None:
    """Open the page at an answer and wait until its tokens are drawn."""
    show(browser, server, at=f"#g{group}/{sibling}")
    until(lambda: texts(browser, "#answer .token"))


def figure(browser: WebDriver, name: str) -> str:
    return text(browser, f"#verdict-{name} .value")


_LANES = "document.querySelector('.lanes').ariaLabel"


def _all_drawn(browser: WebDriver, panel: str) -> bool:
    plots = f"document.querySelectorAll('#{panel} figure:not([hidden]) .plot')"
    return ask(browser, f"[...{plots}].every((plot) => plot.querySelector('canvas'))") is True

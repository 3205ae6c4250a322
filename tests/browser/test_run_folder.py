"""What the page of a run shows of its folder beside the trajectories: settings and logs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser import samples
from tests.browser.pages import served
from tests.support.run_folders import write_run

pytest.importorskip("selenium", reason="needs selenium (pip install selenium)")
from selenium.webdriver.chrome.webdriver import WebDriver

from tests.browser.chromium import CHROMIUM, DRIVER, resize, start_chromium
from tests.browser.driving import ask, complaints, text, texts, until

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(
        CHROMIUM is None or DRIVER is None,
        reason="needs chromium and chromedriver (apt-get install chromium chromium-driver)",
    ),
]
HOSTILE = "<img src=x onerror=window.hurt=1>"


@pytest.fixture(scope="module")
def browser() -> Iterator[WebDriver]:
    driver = start_chromium()
    yield driver
    driver.quit()


@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (390, "dark")])
def test_logs_are_text_and_the_evaluation_says_how_its_answers_were_chosen(
    browser: WebDriver, tmp_path: Path, width: int, theme: str
) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "logs").mkdir()
    (folder / "logs" / "learner.log").write_text(f"first\n{HOSTILE}\n" + "word " * 60)
    with served(samples.Run(steps=60), folder) as server:
        complaints(browser)
        resize(browser, width, theme=theme)
        browser.get(server.address)
        until(lambda: "greedy" in text(browser, "#verdict-evaluation .more"))
        until(lambda: "evaluation (greedy)" in texts(browser, "#reward-chart .keys span"))
        browser.execute_script("document.getElementById('logs').scrollIntoView()")
        until(lambda: texts(browser, "#logs-list .name") == ["learner"])
        browser.find_element("css selector", "#logs-list summary").click()
        assert text(browser, "#logs-list pre").startswith(f"first\n{HOSTILE}\nword")
        assert ask(browser, "window.hurt === undefined")
        scrolled = ask(browser, "document.documentElement.scrollWidth")
        assert isinstance(scrolled, int)
        assert scrolled <= width
        assert complaints(browser) == []

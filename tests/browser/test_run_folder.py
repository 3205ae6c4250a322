"""What the page of a run shows of its folder beside the trajectories: settings and logs."""

from pathlib import Path

import pytest

from tests.browser import samples
from tests.browser.chromium import NEEDS_CHROMIUM, WebDriver, resize
from tests.browser.driving import ask, complaints, text, texts, until
from tests.browser.pages import served
from tests.support.run_folders import write_run

pytestmark = [pytest.mark.integration, NEEDS_CHROMIUM]
HOSTILE = "<img src=x onerror=window.hurt=1>"


@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (390, "dark")])
def test_logs_are_text_and_the_evaluation_says_how_its_answers_were_chosen(
    browser: WebDriver, tmp_path: Path, width: int, theme: str
):
    folder = write_run(tmp_path / "run")
    (folder / "logs").mkdir()
    (folder / "logs" / "learner.log").write_text(f"first\n{HOSTILE}\n" + "word " * 60)
    with served(samples.Run(steps=60), folder) as server:
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

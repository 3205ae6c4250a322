"""The page of several runs in a real browser, of two tiny recorded runs."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser.chromium import NEEDS_CHROMIUM, WebDriver, resize
from tests.browser.driving import Keys, ask, choose, complaints, press, tab_to, text, texts, until
from tests.browser.pages import served_comparison
from tests.support.run_folders import write_run

pytestmark = [pytest.mark.integration, NEEDS_CHROMIUM]
HOSTILE = "<img src=x onerror=window.hurt=1>"
NULL = f"null {HOSTILE.replace('/', '')}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    right, wrong = [1.0] * 30 + [0.0] * 10, [0.0] * 30 + [1.0] * 10
    hostile = f"note = '{HOSTILE}'\n"
    return [
        write_run(folder / "learns", scores=right, settings=hostile),
        write_run(folder / NULL, lr=0.0, gain=0.0, scores=wrong, extra={HOSTILE: 1.0}),
    ]


@pytest.fixture(scope="module")
def address(runs: list[Path]) -> Iterator[str]:
    with served_comparison(runs) as address:
        yield address


def show(browser: WebDriver, address: str, *, width: int = 1280, theme: str = "light") -> None:
    """Open the page and wait until it has drawn."""
    resize(browser, width, theme=theme)
    browser.get("about:blank")
    browser.get(address)
    until(lambda: ask(browser, "document.body.dataset.drawn !== undefined"))
    until(lambda: ask(browser, "document.querySelector('#chart canvas') !== null"))
    until(lambda: text(browser, "#verdict-line"))


def shown(browser: WebDriver) -> str:
    """Return the words that describe the chart to a screen reader."""
    return str(ask(browser, "document.querySelector('#chart .plot').getAttribute('aria-label')"))


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_two_runs_are_listed_drawn_and_compared(browser: WebDriver, address: str, theme: str):
    show(browser, address, theme=theme)

    rows = texts(browser, "#list tbody tr")
    assert "finished" in rows[0]
    assert "0.750 at step 40 (40 problems, greedy)" in rows[0]
    assert "learner.lr = 0.0001" in rows[0]
    assert texts(browser, "#chart .title") == ["eval/mean@1"]
    assert "learns: now 0.750, from 0 to 0.750" in shown(browser)
    verdict = text(browser, "#verdict-line")
    assert verdict.startswith("B less A: \N{MINUS SIGN}0.500, from \N{MINUS SIGN}0.7")
    assert f"{NULL} is worse than learns" in verdict
    assert "the same 40 problems, resampled in pairs" in text(browser, "#verdict-note")
    assert ["learner.lr", "0.0001", "0.0"] in [
        texts(browser, f"#differing tbody tr:nth-child({row}) td") for row in (1, 2)
    ]
    assert ask(browser, "document.documentElement.dataset.theme") == theme
    assert ask(browser, "window.hurt === undefined")
    assert complaints(browser) == []


def test_a_figure_is_found_by_its_words_and_the_address_holds_the_view(
    browser: WebDriver, address: str
):
    show(browser, address)
    tab_to(browser, "#wanted")
    press(browser, "mean rew")
    until(lambda: texts(browser, "#names li") == ["reward/mean"])
    press(browser, Keys.ENTER)
    until(lambda: texts(browser, "#chart .title") == ["reward/mean"])
    tab_to(browser, "#axis input")
    press(browser, Keys.ARROW_RIGHT)
    until(lambda: "by time since the start" in shown(browser))
    tab_to(browser, "#smooth")
    press(browser, *[Keys.ARROW_RIGHT] * 5)
    tab_to(browser, "#log")
    press(browser, Keys.SPACE)
    until(lambda: "40 values of 0 or less cannot be drawn" in text(browser, "#chart-note"))
    until(lambda: "smooth=0.05" in str(ask(browser, "location.hash")))

    link = str(ask(browser, "location.href"))
    show(browser, link)
    assert texts(browser, "#chart .title") == ["reward/mean"]
    assert texts(browser, "#chart .unit") == ["logarithmic"]
    assert "by time since the start" in shown(browser)
    assert ask(browser, "document.getElementById('log').checked")
    assert texts(browser, "#smooth-value") == ["0.05"]
    assert texts(browser, "#chart .keys li:not([hidden]) span") == ["learns", NULL]


def test_a_run_can_be_left_out_and_the_two_of_a_difference_chosen(browser: WebDriver, address: str):
    show(browser, address)
    choose(browser, "run-a", NULL)
    until(lambda: text(browser, "#verdict-line") == "Choose two different runs.")
    choose(browser, "run-b", "learns")
    until(lambda: f"learns is better than {NULL}" in text(browser, "#verdict-line"))
    browser.find_element("css selector", "#list tbody tr:nth-child(2) input").click()
    until(lambda: texts(browser, "#chart .keys li:not([hidden]) span") == ["learns"])
    assert text(browser, "#settings-note") == "Choose two runs or more."


def test_picture_and_csv_hold_the_chart(browser: WebDriver, address: str):
    show(browser, address)
    browser.execute_script(
        "URL.createObjectURL = (blob) => { window.saved = [blob.type, blob.size]; return '#'; };"
    )
    browser.find_element("id", "png").click()
    until(lambda: ask(browser, "window.saved !== undefined"))
    kind, size = json.loads(str(ask(browser, "JSON.stringify(window.saved)")))
    assert kind == "image/png"
    assert size > 5_000
    answer = browser.execute_async_script(
        "const done = arguments[0];"
        "fetch(document.getElementById('csv').href).then((a) => a.text()).then(done);"
    )
    assert answer.splitlines()[:2] == [
        "run,step,wall_s,trained_tokens,eval/mean@1",
        "learns,0,0,0,0",
    ]


def test_a_phone_shows_everything_without_scrolling_to_the_side(browser: WebDriver, address: str):
    show(browser, address, width=390)
    width = ask(browser, "document.documentElement.scrollWidth")
    assert isinstance(width, int)
    assert width <= 390
    until(lambda: "eval/mean@1" in shown(browser))


def test_a_folder_of_runs_is_a_list(browser: WebDriver, runs: list[Path]):
    with served_comparison([], runs[0].parent) as address:
        show(browser, address)
        assert len(texts(browser, "#list tbody tr")) == 2
        assert texts(browser, "#parent") == [str(runs[0].parent)]

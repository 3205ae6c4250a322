import json
import re
import time
from collections.abc import Callable, Iterator

import pytest

from tests.browser import samples
from tests.browser.pages import SampleServer, served

pytest.importorskip("selenium", reason="needs selenium (pip install selenium)")
from selenium.webdriver import ActionChains
from selenium.webdriver.chrome.webdriver import WebDriver
from selenium.webdriver.common.keys import Keys

from tests.browser.chromium import CHROMIUM, DRIVER, resize, start_chromium

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(60),
    pytest.mark.skipif(
        CHROMIUM is None or DRIVER is None,
        reason="needs chromium and chromedriver (apt-get install chromium chromium-driver)",
    ),
]
PATIENCE_S = 15.0
CPU_S = 1.0


@pytest.fixture(scope="module")
def browser() -> Iterator[WebDriver]:
    driver = start_chromium()
    yield driver
    driver.quit()


@pytest.fixture
def server() -> Iterator[SampleServer]:
    with served(samples.Run(steps=60, rows=200)) as server:
        yield server


def show(browser: WebDriver, server: SampleServer, *, width: int = 1280, at: str = "") -> None:
    """Open the page and wait until it has drawn."""
    resize(browser, width)
    browser.get("about:blank")
    browser.get(server.address + at)
    until(lambda: bool(texts(browser, "#verdict .value")))


def until(holds: Callable[[], object]) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, f"did not come to hold within {PATIENCE_S} s"
        time.sleep(0.05)


def ask(browser: WebDriver, script: str, *values: object) -> object:
    return browser.execute_script(f"return {script}", *values)


def texts(browser: WebDriver, selector: str) -> list[str]:
    script = "[...document.querySelectorAll(arguments[0])].map((node) => node.textContent)"
    found = ask(browser, script, selector)
    assert isinstance(found, list)
    return found


def text(browser: WebDriver, selector: str) -> str:
    return " ".join(texts(browser, selector))


def complaints(browser: WebDriver) -> list[object]:
    """Return what the browser wrote on its console since the last call."""
    return list(browser.get_log("browser"))  # type: ignore[no-untyped-call]


def press(browser: WebDriver, *keys: str) -> None:
    ActionChains(browser).send_keys(*keys).perform()


def tab_to(browser: WebDriver, selector: str) -> None:
    """Press Tab until the focus is on an element."""
    for _ in range(120):
        if ask(browser, "document.activeElement.matches(arguments[0])", selector):
            return
        press(browser, Keys.TAB)
    pytest.fail(f"Tab does not come to {selector}")


def figure(browser: WebDriver, name: str) -> str:
    return text(browser, f"#verdict-{name} .value")


def test_figures_on_the_page_equal_the_status(browser: WebDriver, server: SampleServer) -> None:
    status = server.run.status()

    show(browser, server)

    assert figure(browser, "step") == "60 / 500"
    assert figure(browser, "evaluation") == f"{status.eval[-1].mean:.3f}"
    lags = status.staleness_histogram
    mean = sum(int(lag) * tokens for lag, tokens in lags.items()) / sum(lags.values())
    assert figure(browser, "staleness") == f"{mean:.2f} steps"
    assert figure(browser, "unaccounted") == "0"
    numbers = [int(n.replace(",", "")) for n in texts(browser, "#equation-groups b")]
    flying = sum(status.in_flight.values())
    dropped = sum(status.dropped.values())
    assert numbers == [status.issued, status.trained, dropped, flying, 0]
    answers = [int(n.replace(",", "")) for n in texts(browser, "#equation-trajectories b")]
    assert answers == [*status.trajectories.values(), 0]
    bars = texts(browser, "#histogram .value")
    assert bars == [f"{n / sum(lags.values()):.1%} ({n:,})" for n in lags.values()]
    dead = status.queue["dead_letters"]
    assert f"dead letters{dead}" in texts(browser, "#queues tr")


def test_advice_says_what_to_set_and_where_to_read_why(
    browser: WebDriver, server: SampleServer
) -> None:
    show(browser, server)

    for shown, rule in zip(texts(browser, "#advisories li"), samples.ADVISORIES, strict=True):
        assert rule.text in shown
        assert rule.setting in shown
        assert f"docs/operations.md#{rule.why}" in shown


def test_charts_have_units_a_summary_in_words_and_their_numbers(
    browser: WebDriver, server: SampleServer
) -> None:
    show(browser, server)
    browser.execute_script(
        "document.querySelectorAll('details.numbers').forEach((d) => d.open = true)"
    )
    browser.execute_script("document.body.style.zoom = 0.2")  # all charts in sight

    until(lambda: len(texts(browser, ".plot[aria-label]")) == len(texts(browser, ".plot")))
    labels = ask(browser, "[...document.querySelectorAll('.plot')].map((p) => p.ariaLabel)")
    assert isinstance(labels, list)
    assert len(labels) == 13
    assert all("now " in label and " from " in label for label in labels)
    assert all(texts(browser, "figcaption .unit"))
    until(lambda: "step 60" in text(browser, "#entropy-chart table"))
    assert "generator-0" in text(browser, "#lanes th")


def test_hovering_a_chart_shows_the_values_at_that_place(
    browser: WebDriver, server: SampleServer
) -> None:
    show(browser, server)
    until(lambda: texts(browser, "#entropy-chart .u-over"))

    place = browser.find_element("css selector", "#entropy-chart .u-over")
    ActionChains(browser).move_to_element(place).perform()

    until(lambda: text(browser, "#entropy-chart .at").startswith("step "))
    step = int(text(browser, "#entropy-chart .at").removeprefix("step "))
    entropy = server.run.step(step).metrics["policy/entropy"]
    assert text(browser, "#entropy-chart .keys b") == f"{entropy:.3f}"


def test_the_page_follows_the_run_and_pauses_while_hidden(
    browser: WebDriver, server: SampleServer
) -> None:
    hide = (
        "Object.defineProperty(document, 'hidden', {get: () => arguments[0], configurable: true});"
        "document.dispatchEvent(new Event('visibilitychange'))"
    )
    show(browser, server)

    server.news = (61,)
    server.run.steps = 61
    until(lambda: figure(browser, "step") == "61 / 500")
    browser.execute_script(hide, True)
    time.sleep(0.3)
    server.run.steps = 62
    time.sleep(2.0)
    assert figure(browser, "step") == "61 / 500"
    browser.execute_script(hide, False)
    until(lambda: figure(browser, "step") == "62 / 500")


def test_the_past_stays_bounded_and_lost_steps_are_forgotten(
    browser: WebDriver, server: SampleServer
) -> None:
    script = """
        const done = arguments[0];
        import("/static/history.js").then(({ Columns }) => {
          const time = new Columns("at_s", null), steps = new Columns("step", null);
          for (let i = 0; i <= 2000; i += 1) time.add(i, { "busy:a": i % 2, issued: i });
          for (const step of [1, 2, 3, 4, 3]) steps.add(step, { loss: step });
          const [busy, issued] = [time.get("busy:a"), time.get("issued")];
          done([time.length, busy[0], issued.slice(0, 2), time.x.at(-1), steps.x]);
        });
    """
    show(browser, server)

    rows, mean, counts, newest, steps = browser.execute_async_script(script)

    assert (rows, mean, counts, newest) == (1001, 0.5, [1, 3], 2000)
    assert steps == [1, 2, 3]


def test_a_publish_tells_who_was_left_out_and_why(browser: WebDriver, server: SampleServer) -> None:
    show(browser, server)
    browser.execute_script("document.querySelector('#publish-chart details').open = true")
    browser.execute_script("document.getElementById('weights').scrollIntoView()")

    until(lambda: texts(browser, "#publish-chart td"))
    left_out = [row for row in texts(browser, "#publish-chart tr") if "left out" in row]
    assert "v1.48" in left_out[0]
    assert "generator-3 left out (no answer to LoadBucket within 30 s)" in left_out[0]
    assert "adopted by generator-0 in " in left_out[0]
    members = texts(browser, "#members tr")
    assert members[-1].startswith("generator-3torn-")


def test_a_process_that_is_not_heard_is_marked(browser: WebDriver, server: SampleServer) -> None:
    show(browser, server)
    assert set(texts(browser, "#workers .tag")) == {"alive"}

    server.run.silent_s = {"generator-1": 3.2, "generator-2": 11.0}

    until(lambda: texts(browser, "#workers .tag") == [*_STATES_WITH_TWO_SILENT])
    assert figure(browser, "silent") == "2"


_STATES_WITH_TWO_SILENT = ["alive", "alive", "silent", "gone", "alive", "alive", "alive", "alive"]


def test_markup_in_prompts_and_answers_is_text(browser: WebDriver, server: SampleServer) -> None:
    show(browser, server, at="#g17/1")
    until(lambda: texts(browser, "#answer .token"))

    assert text(browser, "#prompt") == samples.HOSTILE
    assert samples.HOSTILE in texts(browser, "#answer .token")
    assert samples.HOSTILE in texts(browser, "#items .prompt")
    assert ask(browser, "window.hurt === undefined")
    assert ask(browser, "document.querySelectorAll('main script, main img').length") == 0


def test_tokens_are_colored_by_version_or_by_logprob_difference(
    browser: WebDriver, server: SampleServer
) -> None:
    show(browser, server, at="#g18/0")
    until(lambda: texts(browser, "#answer .token"))
    color = (
        "[...document.querySelectorAll('.token')].map((t) => getComputedStyle(t).backgroundColor)"
    )
    tokens = samples.trajectory(18, 0).tokens

    by_version = ask(browser, color)
    assert isinstance(by_version, list)
    versions = [token.version for token in tokens]
    assert len(set(by_version)) == 2
    assert len(set(zip(by_version, versions, strict=True))) == 2
    assert "v1.238, lag 2: tokens 1 to 9" in texts(browser, "#legend li")

    browser.find_element("css selector", "input[value=diff]").click()

    shades = ask(browser, color)
    assert isinstance(shades, list)
    pairs = [
        ([int(n) for n in re.findall(r"\d+", shade)], token.diff)
        for shade, token in zip(shades, tokens, strict=True)
    ]
    assert all(rgb[0] >= rgb[2] for rgb, diff in pairs if diff < -0.05)  # reddish: less likely
    assert all(rgb[0] <= rgb[2] for rgb, diff in pairs if diff > 0.05)


def test_a_bar_of_the_histogram_leads_to_its_trajectories(
    browser: WebDriver, server: SampleServer
) -> None:
    show(browser, server)

    browser.find_elements("css selector", "#histogram button")[1].click()

    until(lambda: "of staleness 1" in text(browser, "#found"))
    assert len(texts(browser, "#items .more")) == 8
    assert all("lag 1," in more for more in texts(browser, "#items .more"))


def test_dead_letters_are_listed_and_lead_to_the_life_of_their_prompt(
    browser: WebDriver, server: SampleServer
) -> None:
    show(browser, server)
    browser.find_element("css selector", "#letters summary").click()
    until(lambda: len(texts(browser, "#letters-list button")) == 2)

    assert "reward_unavailable at step 60; sibling 3, timeout, reward-0" in text(
        browser, "#letters-list"
    )
    assert "lease_exhausted at step 59; no attempt is kept" in text(browser, "#letters-list")
    browser.find_element("css selector", "#letters-list button").click()
    until(lambda: "Group g4000: its answers are not recorded" in text(browser, "#one-title"))
    assert text(browser, "#prompt") == samples.HOSTILE
    assert len(texts(browser, "#life li")) == 3
    assert texts(browser, "#answer .token") == []
    assert ask(browser, "window.hurt === undefined") is True


def test_keyboard_alone_reaches_search_trajectory_and_switch(
    browser: WebDriver, server: SampleServer
) -> None:
    show(browser, server)

    tab_to(browser, "#query")
    assert ask(browser, "getComputedStyle(document.activeElement).outlineStyle") == "solid"
    press(browser, "g18", Keys.ENTER)
    until(lambda: 'with "g18"' in text(browser, "#found"))
    tab_to(browser, "#items button")
    press(browser, Keys.ENTER)
    until(lambda: "Group g18, sibling 0" in text(browser, "#one-title"))
    tab_to(browser, "input[name=coloring]")
    press(browser, Keys.ARROW_RIGHT)

    assert ask(browser, "document.getElementById('answer').dataset.coloring") == "diff"


def test_a_stream_that_breaks_is_told_and_comes_back(
    browser: WebDriver, server: SampleServer
) -> None:
    show(browser, server)
    until(lambda: text(browser, "#state") == "live")

    server.cut()
    until(lambda: text(browser, "#state").startswith("no connection to the broker"))
    server.run.steps = 64
    server.mend()

    until(lambda: text(browser, "#state") == "live")
    until(lambda: figure(browser, "step") == "64 / 500")


def test_a_finished_run_is_said_to_be_one_and_opens_no_stream(browser: WebDriver) -> None:
    silent = dict.fromkeys(samples.PROCESSES, 3600.0)
    with served(samples.Run(steps=60, rows=200, live=False, silent_s=silent)) as server:
        show(browser, server)

        assert text(browser, "#state") == "finished run, from its files"
        assert server.waited == 0
        assert set(texts(browser, "#workers .tag")) == {"ended"}
        assert figure(browser, "silent") == ""
        assert figure(browser, "step") == "60 / 500"


def test_colors_follow_the_system_until_chosen_and_the_choice_stays(
    browser: WebDriver, server: SampleServer
) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    show(browser, server)
    light = ask(browser, ground)
    resize(browser, 1280, theme="dark")
    until(lambda: ask(browser, ground) != light)

    browser.find_element("css selector", "#theme").click()
    assert ask(browser, ground) == light
    browser.refresh()
    assert ask(browser, ground) == light
    browser.execute_script("localStorage.clear()")


@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_is_never_wider_than_the_screen(
    browser: WebDriver, server: SampleServer, width: int
) -> None:
    show(browser, server, width=width, at="#g17/1")
    until(lambda: texts(browser, "#answer .token"))

    assert ask(browser, "document.documentElement.scrollWidth") == width


def test_nothing_is_asked_of_another_host_and_nothing_breaks_the_policy(
    browser: WebDriver, server: SampleServer
) -> None:
    complaints(browser)  # of earlier tests
    show(browser, server, at="#g18/0")
    until(lambda: texts(browser, "#answer .token"))

    asked = ask(browser, "performance.getEntriesByType('resource').map((one) => one.name)")
    assert isinstance(asked, list)
    assert len(asked) > 10
    own = server.address.split("?")[0]
    assert all(one.startswith((own, "data:")) for one in asked)
    assert complaints(browser) == []


def test_two_thousand_rows_are_drawn_in_less_than_a_second_of_cpu(browser: WebDriver) -> None:
    with served(samples.Run(steps=2000, rows=2000)) as server:
        resize(browser, 1280)
        browser.get("about:blank")
        browser.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
        before = _spent_s(browser)
        show(browser, server)
        until(lambda: texts(browser, "#rate-chart canvas"))
        for panel in ("learning", "pools", "staleness", "weights", "correction"):
            browser.execute_script(f"document.getElementById('{panel}').scrollIntoView()")
            until(lambda name=panel: _all_drawn(browser, name))  # type: ignore[misc]
        spent = _spent_s(browser)
        browser.execute_cdp_cmd("Performance.disable", {})

    print(json.dumps({"cpu_s": spent, "before_s": before}))  # noqa: T201
    assert spent < CPU_S


def _all_drawn(browser: WebDriver, panel: str) -> bool:
    plots = f"document.querySelectorAll('#{panel} .plot')"
    return ask(browser, f"[...{plots}].every((plot) => plot.querySelector('canvas'))") is True


def _spent_s(browser: WebDriver) -> float:
    """Return the seconds that the page's main thread has worked."""
    answer = browser.execute_cdp_cmd("Performance.getMetrics", {})
    return {one["name"]: float(one["value"]) for one in answer["metrics"]}["TaskDuration"]

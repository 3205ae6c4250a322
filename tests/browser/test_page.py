import json
import re

import msgspec
import pytest

from slipstream.broker.advisories.advise import RULES
from tests.browser import samples
from tests.browser.chromium import NEEDS_CHROMIUM, WebDriver
from tests.browser.driving import ask, press, text, texts, until
from tests.browser.pages import SampleServer, served
from tests.browser.steps import figure, show

pytestmark = [pytest.mark.integration, NEEDS_CHROMIUM]


def test_figures_on_the_page_equal_the_status(browser: WebDriver, server: SampleServer):
    status = server.run.status()

    show(browser, server)

    assert figure(browser, "step") == "60 / 500"
    assert re.search(r"12%; .+ a step, about .+ left", text(browser, "#verdict-step"))
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


def test_a_key_comes_to_the_search_and_is_a_letter_there(browser: WebDriver, server: SampleServer):
    show(browser, server)
    press(browser, "/")
    assert ask(browser, "document.activeElement.id") == "query"
    press(browser, "a", "/")
    assert ask(browser, "document.activeElement.value") == "a/"


def test_a_staleness_target_is_shown_with_what_it_changed_and_why(browser: WebDriver):
    with served(samples.Run(steps=60, rows=200, held=True)) as server:
        show(browser, server)
        assert "bound 2, 1 in force" in text(browser, "#verdict-staleness")
        note = text(browser, "#target-note")
        assert "p95_lag = 1: bound in force 1 of" in note
        assert "at most 64 of 96 groups under way; the figure is 0.40 times the target" in note
        rows = texts(browser, "#target-changes tbody tr")
        assert all(row.startswith(step) for row, step in zip(rows, ("40", "12"), strict=True))
        assert "is above its target" in rows[1]


def test_advice_names_a_setting_and_why_opens_the_section_of_the_guide(
    browser: WebDriver, server: SampleServer
):
    guide = {"learner-starved": {"title": "Learner starved", "text": f"Look\n{samples.HOSTILE}"}}
    show(browser, server)
    browser.execute_script(_ANSWERS, "/why.json", json.dumps(guide))

    for shown, rule in zip(texts(browser, "#advisories li"), server.advisories, strict=True):
        assert rule.rule in RULES
        assert rule.text in shown
        assert rule.setting in shown
    for why in browser.find_elements("css selector", "#advisories summary"):
        why.click()
    until(lambda: all(texts(browser, "#advisories .section")))
    assert text(browser, "#advisories .section h4") == "Learner starved"
    assert text(browser, "#advisories .guide") == f"Look\n{samples.HOSTILE}"
    assert "docs/operations.md#fsync-too-weak" in text(browser, "#advisories .section code")
    assert ask(browser, "window.hurt === undefined")


_ANSWERS = """
    const [path, body] = arguments, real = window.fetch;
    window.fetch = async (address, ...rest) =>
      address === path ? new Response(body) : real(address, ...rest);
"""


def test_what_is_open_and_focused_stays_so_when_its_number_changes(
    browser: WebDriver, server: SampleServer
):
    def advise(number: str) -> None:
        server.advisories = [
            msgspec.structs.replace(rule, text=f"{number} of {rule.rule}")
            for rule in samples.Run().advisories()
        ]

    focused = "document.activeElement.closest('li')?.innerText ?? ''"
    show(browser, server)
    browser.find_element("css selector", "[data-kept=learner-starved] summary").click()
    for number in ("41%", "42%"):
        advise(number)
        until(lambda number=number: number in text(browser, "#advisories .text"))  # type: ignore[misc]
        assert "learner-starved" in str(ask(browser, focused))
        assert len(texts(browser, "[data-kept=learner-starved] details[open]")) == 1
    first_text = server.advisories[0].text
    server.advisories = server.advisories[::-1]
    until(lambda: texts(browser, "#advisories .text")[-1] == first_text)
    assert "learner-starved" in str(ask(browser, focused))

    browser.execute_script("document.querySelectorAll('#histogram button')[1].focus()")
    server.run.tokens_by_lag = {"0": 10, "1": 30, "2": 10}
    until(lambda: "60.0% (30)" in texts(browser, "#histogram .value"))
    assert "60.0% (30)" in str(ask(browser, focused))


def test_too_early_for_advice_is_not_nothing_to_change(browser: WebDriver, server: SampleServer):
    server.advisories = []
    server.advice_ready = False
    show(browser, server)
    assert text(browser, "#advisories").startswith("Too early to say: ")

    server.advice_ready = True

    until(lambda: text(browser, "#advisories") == "Nothing to change: no rule fires.")


def test_busy_states_the_time_it_is_averaged_over(browser: WebDriver):
    for every_s, rows, period in ((2.0, 30, "last minute"), (64.0, 1, "last 64 s")):
        browser.get("about:blank")
        run = samples.Run(steps=60, rows=200, every_s=every_s)
        with served(run) as server:
            show(browser, server)
            newest = server.run.rows + server.waited
            busy = [run.point(row)["busy:learner"] for row in range(newest - rows, newest)]
            mean = sum(one or 0.0 for one in busy) / rows

            assert text(browser, "#verdict-busy .more").endswith(period)
            shown = int(figure(browser, "busy").removesuffix("% learner"))
            assert abs(shown - 100 * mean) < (2 if rows > 1 else 30)


def test_without_evaluations_the_sampled_reward_is_compared_with_the_start(browser: WebDriver):
    run = samples.Run(steps=60, rows=200, evaluated=False)
    with served(run) as server:
        show(browser, server)

        def mean(steps: range) -> float:
            return sum(run.step(step).metrics["reward/sampled"] for step in steps) / len(steps)

        now, first = mean(range(51, 61)), mean(range(1, 11))
        assert figure(browser, "reward") == f"{now:.3f}"
        assert text(browser, "#verdict-reward .more") == (
            f"sampled answers, steps 51 to 60; +{now - first:.3f} since steps 1 to 10"
        )


def test_run_without_data_shows_dashes_and_reasons(browser: WebDriver):
    with served(samples.Run(steps=0, rows=0, waiting_for="the first batch")) as server:
        show(browser, server)

        assert figure(browser, "step") == "0 / 500"
        assert figure(browser, "busy") == "-"
        assert figure(browser, "reward") == "-"
        assert figure(browser, "staleness") == "-"
        assert "0.0" not in text(browser, "main")
        assert "NaN" not in text(browser, "main")
        assert text(browser, "#workers td") == "No process has reported yet."
        assert "No process has reported yet." in text(browser, "#lanes .empty:not([hidden])")
        empty = "[...document.querySelectorAll('.chart > .empty')].every((one) => !one.hidden)"
        assert ask(browser, empty)
        assert text(browser, "#waiting") == "The learner waits for the first batch."
        until(lambda: text(browser, "#found").startswith("nothing is recorded yet"))

        server.run.steps, server.run.rows = 60, 200
        until(lambda: "60 / 500" in figure(browser, "step"))
        assert ask(browser, "document.querySelector('#rate-chart .empty').hidden")
        browser.execute_script("document.getElementById('lanes').scrollIntoView()")
        until(lambda: texts(browser, "#rate-chart canvas"))


def test_worker_figures_since_the_start_are_labeled_so(browser: WebDriver, server: SampleServer):
    show(browser, server)

    heads = texts(browser, "#workers th")

    assert heads[3:6] == ["busy now", "busy since its start", "tokens/s since its start"]
    assert heads[-1] == "spends its time on, since its start"
    torn = next(row for row in texts(browser, "#workers tr") if row.startswith("generator-3"))
    assert "generator-3generatoralive0%" in torn

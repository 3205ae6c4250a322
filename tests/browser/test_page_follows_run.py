"""The page follows a run: events, breaks, silence and the end."""

import time

import pytest

from tests.browser import samples
from tests.browser.chromium import NEEDS_CHROMIUM, WebDriver
from tests.browser.driving import ask, text, texts, until
from tests.browser.pages import SampleServer, served
from tests.browser.steps import _LANES, figure, show

pytestmark = [pytest.mark.integration, NEEDS_CHROMIUM]


def show_live(browser: WebDriver, server: SampleServer) -> None:
    """Open the page and wait until events come."""
    show(browser, server)
    until(lambda: text(browser, "#state") == "live")


def cut(browser: WebDriver, server: SampleServer) -> None:
    """Break the stream and wait until the page says so."""
    server.cut()
    until(lambda: text(browser, "#state").startswith("no connection to the broker"))


def test_the_page_follows_the_run_and_pauses_while_hidden(browser: WebDriver, server: SampleServer):
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


def test_publish_lists_the_generators_left_out_with_the_reason(
    browser: WebDriver, server: SampleServer
):
    show(browser, server)
    browser.execute_script("document.querySelector('#publish-chart details').open = true")
    browser.execute_script("document.getElementById('weights').scrollIntoView()")

    until(lambda: texts(browser, "#publish-chart td"))
    left_out = [row for row in texts(browser, "#publish-chart tr") if "left out" in row]
    assert "v1.60" in left_out[0]
    assert "generator-3 left out (no answer to LoadBucket within 30 s)" in left_out[0]
    assert "adopted by generator-0 in " in left_out[0]
    members = texts(browser, "#members tr")
    assert members[-1].startswith("generator-3torn-")


def test_silent_process_is_marked(browser: WebDriver, server: SampleServer):
    show(browser, server)
    assert set(texts(browser, "#workers .tag")) == {"alive"}

    server.run.silent_s = {"generator-0": 0.9, "generator-1": 3.2, "generator-2": 11.0}

    until(lambda: texts(browser, "#workers .tag") == [*_STATES_WITH_TWO_SILENT])
    assert figure(browser, "silent") == "2"


def test_a_late_process_is_marked_as_it_passes_the_limit_not_by_the_next_event(
    browser: WebDriver, server: SampleServer
):
    show_live(browser, server)

    server.run.silent_s = {"generator-0": 0.8, "generator-1": 1.2}
    until(lambda: any("1.2 s ago" in row for row in texts(browser, "#workers tr")))
    server.every_s = 4.0
    waited = server.waited
    until(lambda: server.waited > waited)

    until(lambda: figure(browser, "silent") == "1")
    assert "silent" in texts(browser, "#workers .tag")
    assert server.waited == waited + 1
    assert "generator-1" in text(browser, "#verdict-silent .more")


_STATES_WITH_TWO_SILENT = ["alive", "alive", "silent", "gone", "alive", "alive", "alive", "alive"]


def test_after_a_break_the_page_reconnects_and_asks_for_the_steps_that_it_missed(
    browser: WebDriver, server: SampleServer
):
    show_live(browser, server)
    cut(browser, server)
    server.run.steps = 63
    server.news = (61, 62, 63)
    server.asked_after.clear()
    server.mend()
    until(lambda: text(browser, "#state") == "live")
    until(lambda: figure(browser, "step") == "63 / 500")

    assert server.asked_after[0] == 60


def test_events_received_while_the_history_loads_are_kept(browser: WebDriver, server: SampleServer):
    script = """
        const done = arguments[0];
        import("/static/history.js").then(({ Columns }) => {
          const served = new Columns("at_s", { at_s: [1, 2, 3], series: { a: [1, 2, 3] } });
          const series = { a: [0, 0, 4, null], b: [0, 0, 0, 5] };
          const held = new Columns("at_s", { at_s: [1, 3, 4, 5], series });
          served.goOn(held);
          done([served.x, served.get("a"), served.get("b")]);
        });
    """
    show(browser, server)

    x, a, b = browser.execute_async_script(script)

    assert (x, a, b) == ([1, 2, 3, 4, 5], [1, 2, 3, 4, None], [None, None, None, 0, 5])


def test_a_state_that_comes_late_does_not_take_the_page_back(
    browser: WebDriver, server: SampleServer
):
    script = """
        const real = window.fetch;
        window.late = 0;
        window.fetch = async (address, ...rest) => {
          const answer = await real(address, ...rest);
          if (address !== "/state.json") return answer;
          const body = await answer.text();
          await new Promise((done) => setTimeout(done, 2500));
          window.late += 1;
          return new Response(body);
        };
    """
    show_live(browser, server)
    browser.execute_script(script)
    cut(browser, server)
    server.run.steps = 63
    server.mend()
    until(lambda: figure(browser, "step") == "63 / 500")
    server.run.steps = 95
    server.news = tuple(range(61, 96))
    until(lambda: figure(browser, "step") == "95 / 500")
    server.news = ()
    assert ask(browser, "window.late") == 0
    evaluated = figure(browser, "evaluation")

    until(lambda: ask(browser, "window.late") == 1)
    server.cut()  # nothing that arrives later mends it
    time.sleep(1.5)

    assert figure(browser, "step") == "95 / 500"
    assert figure(browser, "evaluation") == evaluated == f"{server.run.status().eval[-1].mean:.3f}"
    label = str(ask(browser, "document.querySelector('#entropy-chart .plot').ariaLabel"))
    assert f"now {server.run.step(95).metrics['policy/entropy']:.3f}" in label


def test_event_adds_publishes_and_evaluations_to_the_earlier_ones(
    browser: WebDriver, server: SampleServer
):
    show(browser, server)
    browser.execute_script("document.querySelector('#publish-chart details').open = true")
    browser.execute_script("document.getElementById('weights').scrollIntoView()")
    until(lambda: len(texts(browser, "#publish-chart td:first-child")) > 15)
    oldest = texts(browser, "#publish-chart td:first-child")[-1]

    server.run.steps = 61
    until(lambda: texts(browser, "#publish-chart td:first-child")[0] == "v1.61")

    server.run.steps = 63
    until(lambda: texts(browser, "#publish-chart td:first-child")[0] == "v1.63")
    assert len(texts(browser, "#publish-chart td:first-child")) > 15
    assert oldest.startswith("v1.")
    assert "since step 0" in text(browser, "#verdict-evaluation .more")


def test_run_that_was_over_before_the_page_opened_is_shown_as_over(browser: WebDriver):
    with served(samples.Run(steps=60, rows=200, outcome="finished")) as server:
        show(browser, server)

        assert text(browser, "#state").startswith("the run is over: finished; ")
        assert server.waited == 0


def test_end_of_a_run_is_shown_and_no_stream_is_reopened(browser: WebDriver, server: SampleServer):
    over = "the run is over: stopped; `slipstream dashboard RUN` shows it later"
    show_live(browser, server)

    server.run.silent_s = {"generator-1": 30.0}
    until(lambda: figure(browser, "silent") == "1")
    server.run.outcome = "stopped"
    until(lambda: text(browser, "#state") == over)
    server.cut()
    waited = server.waited
    time.sleep(2.5)

    assert text(browser, "#state") == over
    assert server.waited <= waited + 1
    assert figure(browser, "silent") == ""
    assert set(texts(browser, "#workers .tag")) == {"ended"}
    assert "whole run" in text(browser, "#verdict-busy .more")


def test_refused_token_asks_for_the_address_of_the_new_broker(
    browser: WebDriver, server: SampleServer
):
    show_live(browser, server)

    browser.delete_all_cookies()
    server.cut()

    until(lambda: "open the one that `slipstream top --once` prints" in text(browser, "#state"))
    browser.find_element("css selector", "#search button").click()
    until(lambda: "`slipstream top --once` prints" in text(browser, "#found"))


def test_silent_processes_are_shown_as_unknown_instead_of_busy(
    browser: WebDriver, server: SampleServer
):
    show(browser, server)
    browser.execute_script("document.getElementById('lanes').scrollIntoView()")
    until(lambda: "generator-0 9" in str(ask(browser, _LANES)))

    server.run.unheard = frozenset({"generator-0"})
    until(lambda: "generators (1 of 4 unknown), " in text(browser, "#verdict-busy .more"))
    server.run.unheard = frozenset(server.run.generators)

    until(lambda: text(browser, "#verdict-busy .more").startswith("- generators"))
    until(lambda: "generator-0 unknown" in str(ask(browser, _LANES)))
    assert texts(browser, ".lane .value")[1:5] == ["-"] * 4
    assert "generator-0generatoralive-" in text(browser, "#workers tr")
    assert figure(browser, "busy").endswith("% learner")

    server.run.unheard = frozenset(server.run.processes)
    until(lambda: figure(browser, "busy") == "-")


def test_finished_run_is_marked_and_has_no_event_stream(browser: WebDriver):
    silent = dict.fromkeys(samples.Run().processes, 3600.0)
    with served(samples.Run(steps=60, rows=200, live=False, silent_s=silent)) as server:
        show(browser, server)

        assert text(browser, "#state") == "finished run, from its files"
        assert server.waited == 0
        assert set(texts(browser, "#workers .tag")) == {"ended"}
        assert figure(browser, "silent") == ""
        assert figure(browser, "step") == "60 / 500"

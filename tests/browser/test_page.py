import json
import re
import time
from collections.abc import Iterator

import msgspec
import pytest

from slipstream.broker.advisories.advise import RULES
from slipstream.broker.history.trajectories import Item
from tests.browser import samples
from tests.browser.chromium import NEEDS_CHROMIUM, WebDriver, resize
from tests.browser.driving import (
    ActionChains,
    Keys,
    ask,
    complaints,
    press,
    tab_to,
    text,
    texts,
    until,
)
from tests.browser.pages import SampleServer, served

pytestmark = [pytest.mark.integration, NEEDS_CHROMIUM]
CPU_S = 1.0


@pytest.fixture
def server() -> Iterator[SampleServer]:
    with served(samples.Run(steps=60, rows=200, hostile=True)) as server:
        yield server


def show(browser: WebDriver, server: SampleServer, *, width: int = 1280, at: str = "") -> None:
    """Open the page and wait until it has drawn."""
    resize(browser, width)
    browser.get("about:blank")
    browser.get(server.address + at)
    until(lambda: bool(texts(browser, "#verdict .value")))


def show_live(browser: WebDriver, server: SampleServer) -> None:
    """Open the page and wait until events come."""
    show(browser, server)
    until(lambda: text(browser, "#state") == "live")


def show_answer(browser: WebDriver, server: SampleServer, group: int, sibling: int) -> None:
    """Open the page at an answer and wait until its tokens are drawn."""
    show(browser, server, at=f"#g{group}/{sibling}")
    until(lambda: texts(browser, "#answer .token"))


def cut(browser: WebDriver, server: SampleServer) -> None:
    """Break the stream and wait until the page says so."""
    server.cut()
    until(lambda: text(browser, "#state").startswith("no connection to the broker"))


def figure(browser: WebDriver, name: str) -> str:
    return text(browser, f"#verdict-{name} .value")


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


def test_what_there_is_not_is_not_shown_and_a_chart_out_of_sight_is_not_called_empty(
    browser: WebDriver, server: SampleServer
):
    show(browser, server)
    shown = "[...document.querySelectorAll('.chart:not([hidden]) > .empty:not([hidden])')].length"
    assert ask(browser, shown) == 0
    assert not texts(browser, "#kl-chart canvas")
    assert ask(browser, "document.querySelector('#target').checkVisibility()") is False


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


def test_charts_have_units_a_summary_in_words_and_their_numbers(
    browser: WebDriver, server: SampleServer
):
    show(browser, server)
    browser.execute_script(
        "document.querySelectorAll('details.numbers').forEach((d) => d.open = true)"
    )
    browser.execute_script("document.body.style.zoom = 0.2")  # all charts in sight

    shown = "figure:not([hidden]) .plot"
    until(lambda: len(texts(browser, ".plot[aria-label]")) == len(texts(browser, shown)))
    labels = ask(browser, f"[...document.querySelectorAll('{shown}')].map((p) => p.ariaLabel)")
    assert isinstance(labels, list)
    assert len(labels) == 16
    assert all("now " in label and " from " in label for label in labels)
    assert all(texts(browser, "figcaption .unit"))
    until(lambda: "step 60" in text(browser, "#entropy-chart table"))
    assert "generator-0" in text(browser, "#lanes th")


def test_hovering_a_chart_shows_the_values_at_that_place(browser: WebDriver, server: SampleServer):
    show(browser, server)
    until(lambda: texts(browser, "#entropy-chart .u-over"))

    place = browser.find_element("css selector", "#entropy-chart .u-over")
    ActionChains(browser).move_to_element(place).perform()

    until(lambda: text(browser, "#entropy-chart .at").startswith("step "))
    step = int(text(browser, "#entropy-chart .at").removeprefix("step "))
    entropy = server.run.step(step).metrics["policy/entropy"]
    assert text(browser, "#entropy-chart .keys b") == f"{entropy:.3f}"


def test_zoom_holds_while_the_run_continues_and_a_double_click_ends_it(
    browser: WebDriver, server: SampleServer
):
    def right_edge(chart: str) -> int:
        plot = browser.find_element("css selector", f"#{chart}-chart .u-over")
        ActionChains(browser).move_to_element_with_offset(
            plot, plot.size["width"] // 2 - 2, 0
        ).perform()
        until(lambda: text(browser, f"#{chart}-chart .at").startswith("at "))
        minutes, seconds = text(browser, f"#{chart}-chart .at").removeprefix("at ").split(":")
        return 60 * int(minutes) + int(seconds)

    def newest() -> float:
        return (server.run.rows + server.waited) * server.run.every_s

    show(browser, server)
    browser.execute_script("document.getElementById('lanes').scrollIntoView()")
    until(lambda: len(texts(browser, "#pools .u-over")) == 3)
    plot = browser.find_element("css selector", "#rate-chart .u-over")
    width = plot.size["width"]
    drag = ActionChains(browser).move_to_element_with_offset(plot, -width // 4, 0)
    drag.click_and_hold().move_by_offset(width // 4, 0).release().perform()
    assert right_edge("rate") < 210
    assert right_edge("depth") < 210
    waited = server.waited
    until(lambda: server.waited > waited + 5)
    assert text(browser, "#depth-chart .at").startswith("at ")
    assert right_edge("rate") < 210

    ActionChains(browser).double_click(plot).perform()
    waited = server.waited
    until(lambda: server.waited > waited + 8)
    before = newest()
    time.sleep(1.5)
    for chart in ("rate", "depth"):
        assert right_edge(chart) >= before - 2 * server.run.every_s
    shown = text(browser, "#depth-chart .keys b")
    waited = server.waited
    until(lambda: server.waited > waited + 4)
    assert text(browser, "#depth-chart .at").startswith("at ")
    assert shown


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


def test_the_past_stays_bounded_and_lost_steps_are_forgotten(
    browser: WebDriver, server: SampleServer
):
    script = """
        const done = arguments[0];
        import("/static/history.js").then(({ Columns }) => {
          const time = new Columns("at_s", null), steps = new Columns("step", null);
          for (let i = 0; i <= 2000; i += 1) {
            time.add(i, { "busy:a": i % 2, issued: i, "policy/ratio_max@lag1": -i });
          }
          for (const step of [1, 2, 3, 4, 3]) steps.add(step, { loss: step });
          const first = (name) => time.get(name).slice(0, 2);
          const highest = first("policy/ratio_max@lag1");
          done([time.length, first("busy:a")[0], first("issued"), highest, time.x.at(-1), steps.x]);
        });
    """
    show(browser, server)

    rows, mean, counts, highest, newest, steps = browser.execute_async_script(script)

    assert (rows, mean, counts, newest) == (1001, 0.5, [1, 3], 2000)
    assert highest == [0, -2]
    assert steps == [1, 2, 3]


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


def test_markup_in_prompts_and_answers_is_text(browser: WebDriver, server: SampleServer):
    show_answer(browser, server, samples.GROUPS[0], 1)

    assert text(browser, "#prompt") == samples.HOSTILE
    assert samples.HOSTILE in texts(browser, "#answer .token")
    assert samples.HOSTILE in texts(browser, "#items .prompt")
    assert ask(browser, "window.hurt === undefined")
    assert ask(browser, "document.querySelectorAll('main script, main img').length") == 0


def test_several_turns_are_drawn_with_what_came_between_and_branches_fold_what_is_known(
    browser: WebDriver,
):
    with served(samples.Run(steps=60, rows=200, agents=True, hostile=True)) as server:
        show_answer(browser, server, samples.GROUPS[1], 1)
        known = server.run.trajectory(samples.GROUPS[1], 1)
        versions = {"one": known.tokens[0].version, "other": known.tokens[-1].version}

        assert texts(browser, "#answer .token") == [token.text for token in known.tokens]
        assert texts(browser, "#answer .turn") == [
            "Turn 1{0} tokens by {one}, reward 0.100, calls compare".format(15, **versions),
            "Turn 2{0} tokens by {one}, {other}, reward 0.100, calls read_table".format(
                13, **versions
            ),
            "Turn 3{0} tokens by {other}, reward -0.0500".format(15, **versions),
            "Turn 4{0} tokens by {other}, reward 1.00".format(7, **versions),
        ]
        assert [one.split(",")[0] for one in texts(browser, "#answer summary")] == [
            "Context: 8 tokens",
            "Context: 165 tokens",
            "11 tokens as in branch 1",
            "Context: 14 tokens",
        ]
        unfolded = "[...document.querySelectorAll('#answer details')].map((one) => one.open)"
        assert ask(browser, unfolded) == [True, False, False, True]
        assert texts(browser, "#answer .branch") == ["Branch 2"]
        assert samples.OBSERVATION in text(browser, "#answer .context .text")
        assert samples.HOSTILE in text(browser, "#answer .context .text")
        assert ask(browser, "window.hurt === undefined")
        assert ask(browser, "document.querySelectorAll('main script, main img').length") == 0
        facts = texts(browser, "#facts div")
        assert facts[-3:] == [f"tokens{len(known.tokens)}", "turns4", "branches2"]
        assert "4 turns, 2 branches, 50 tokens" in texts(browser, "#items .more")[0]

        browser.execute_script("document.getElementById('learning').scrollIntoView()")
        until(lambda: _all_drawn(browser, "learning"))
        newest = server.run.step(60).metrics
        assert texts(browser, "#branched-chart .keys b") == [f"{newest['turns/branched']:.1%}"]
        assert len(texts(browser, "#turns-chart .keys b")) == 2
        assert "environment failures8" in texts(browser, "#queues tr")
        assert "restarted trajectories5" in texts(browser, "#queues tr")
        row = next(one for one in texts(browser, "#workers tr") if one.startswith("generator-0"))
        assert "40 of 4811 (25%)" in row


def test_runs_of_one_turn_show_nothing_of_turns(browser: WebDriver, server: SampleServer):
    show_answer(browser, server, samples.GROUPS[1], 1)

    assert texts(browser, "#answer .turn, #answer .context") == []
    assert not any("turns" in one for one in texts(browser, "#facts div"))
    assert ask(browser, "document.querySelector('#turns-chart').hidden")
    assert not any("environment" in one for one in texts(browser, "#queues tr, #workers th"))


def test_an_observation_of_megabytes_is_cut_and_what_was_cut_is_counted(browser: WebDriver):
    with served(samples.Run(steps=60, rows=200, agents=True, observed=8 << 20)) as server:
        show_answer(browser, server, samples.GROUPS[1], 1)

        assert re.search(r"\[8,38\d,\d{3} characters left out\]", text(browser, "#answer .cut"))
        assert len(text(browser, "#answer")) < 20_000
        assert ask(browser, "document.documentElement.scrollWidth") == 1280


def test_tokens_are_colored_by_version_or_by_logprob_difference(
    browser: WebDriver, server: SampleServer
):
    show_answer(browser, server, samples.GROUPS[1], 2)
    color = (
        "[...document.querySelectorAll('.token')].map((t) => getComputedStyle(t).backgroundColor)"
    )
    tokens = server.run.trajectory(samples.GROUPS[1], 2).tokens

    by_version = ask(browser, color)
    assert isinstance(by_version, list)
    versions = [token.version for token in tokens]
    assert len(set(by_version)) == 2
    assert len(set(zip(by_version, versions, strict=True))) == 2
    oldest = f"{tokens[0].version}, lag 2: tokens 1 to {versions.count(tokens[0].version)}"
    assert oldest in texts(browser, "#legend li")

    browser.find_element("css selector", "input[value=diff]").click()

    shades = ask(browser, color)
    assert isinstance(shades, list)
    pairs = [
        ([int(n) for n in re.findall(r"\d+", shade)], token.diff)
        for shade, token in zip(shades, tokens, strict=True)
    ]
    assert all(rgb[0] >= rgb[2] for rgb, diff in pairs if diff < -0.05)  # reddish: less likely
    assert all(rgb[0] <= rgb[2] for rgb, diff in pairs if diff > 0.05)


def test_a_bar_of_the_histogram_leads_to_its_trajectories(browser: WebDriver, server: SampleServer):
    show(browser, server)

    browser.find_elements("css selector", "#histogram button")[1].click()

    until(lambda: "with tokens of staleness 1" in text(browser, "#found"))
    found = server.run.items(lag=1)
    assert {item.lag for item in found} == {1, 2}
    assert [f"lag up to {item.lag}" in more for item, more in _listed(browser, found)]


def _listed(browser: WebDriver, items: list[Item]) -> list[tuple[Item, str]]:
    return list(zip(items, texts(browser, "#items .more"), strict=True))


def test_list_and_article_show_the_same_trajectory_figures(
    browser: WebDriver, server: SampleServer
):
    show(browser, server)
    until(lambda: texts(browser, "#items .more"))

    for place, (item, more) in enumerate(_listed(browser, server.run.items())[:5]):
        browser.find_elements("css selector", "#items button")[place].click()
        title = f"Group g{item.group_id}, sibling {item.sibling}"
        until(lambda title=title: text(browser, "#one-title") == title)  # type: ignore[misc]
        facts = dict(zip(texts(browser, "#facts dt"), texts(browser, "#facts dd"), strict=True))
        assert f"step {facts['trained at step']}, lag up to {item.lag}, " in more
        assert f"{facts['tokens']} tokens, reward {facts['reward']}" in more
        assert text(browser, "#prompt") == texts(browser, "#items .prompt")[place]
        assert texts(browser, "#items [aria-current=true] .more") == [more]


def test_the_newest_click_counts_however_late_an_answer_comes(
    browser: WebDriver, server: SampleServer
):
    script = """
        const real = window.fetch;
        window.fetch = async (address, ...rest) => {
          if (address.endsWith("sibling=0")) await new Promise((done) => setTimeout(done, 700));
          return real(address, ...rest);
        };
        for (const place of [0, 1]) document.querySelectorAll("#items button")[place].click();
    """
    show(browser, server)
    until(lambda: texts(browser, "#items .more"))
    browser.execute_script(script)

    until(lambda: "sibling 1" in text(browser, "#one-title"))
    time.sleep(1.2)

    assert "sibling 1" in text(browser, "#one-title")


@pytest.mark.parametrize("typed", ["g8300", "8300", ""], ids=["g8300", "8300", "address"])
def test_a_group_without_recorded_answers_is_found_by_its_number_and_its_address(
    browser: WebDriver, server: SampleServer, typed: str
):
    show(browser, server, at="" if typed else f"#g{samples.LOST}/0")
    if typed:
        tab_to(browser, "#query")
        press(browser, typed, Keys.ENTER)
        until(lambda: "Group g8300: its answers are not recorded" in text(browser, "#one-title"))
    until(lambda: text(browser, "#prompt").endswith("(the whole of it)"))
    assert text(browser, "#facts dd") == "dropped (reward_unavailable)"
    assert texts(browser, "#failures li") == ["sibling 3, timeout, reward-0"]


def test_dead_letters_are_listed_and_lead_to_the_life_of_their_prompt(
    browser: WebDriver, server: SampleServer
):
    show(browser, server)
    browser.find_element("css selector", "#letters summary").click()
    until(lambda: len(texts(browser, "#letters-list button")) == 2)

    assert "reward_unavailable at step 60; sibling 3, timeout, reward-0" in text(
        browser, "#letters-list"
    )
    assert "lease_exhausted at step 59; no attempt is kept" in text(browser, "#letters-list")
    browser.find_element("css selector", "#letters-list button").click()
    until(lambda: "Group g8300: its answers are not recorded" in text(browser, "#one-title"))
    assert text(browser, "#prompt").startswith(samples.HOSTILE)
    assert len(texts(browser, "#life li")) == 3
    assert texts(browser, "#answer .token") == []
    assert ask(browser, "window.hurt === undefined") is True


def test_keyboard_alone_reaches_search_trajectory_and_switch(
    browser: WebDriver, server: SampleServer
):
    show(browser, server)

    tab_to(browser, "#query")
    assert ask(browser, "getComputedStyle(document.activeElement).outlineStyle") == "solid"
    group = f"g{samples.GROUPS[1]}"
    press(browser, group, Keys.ENTER)
    until(lambda: f'with "{group}"' in text(browser, "#found"))
    tab_to(browser, "#items button")
    press(browser, Keys.ENTER)
    until(lambda: f"Group {group}, sibling 0" in text(browser, "#one-title"))
    tab_to(browser, "input[name=coloring]")
    press(browser, Keys.ARROW_RIGHT)

    assert ask(browser, "document.getElementById('answer').dataset.coloring") == "diff"


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

    until(lambda: "open the one that `slipstream status` prints" in text(browser, "#state"))
    browser.find_element("css selector", "#search button").click()
    until(lambda: "`slipstream status` prints" in text(browser, "#found"))


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


_LANES = "document.querySelector('.lanes').ariaLabel"


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


def test_sixty_four_generators_all_have_a_lane(browser: WebDriver):
    with served(samples.Run(steps=60, rows=200, num_generators=64)) as server:
        show(browser, server)
        browser.execute_script("document.getElementById('lanes').scrollIntoView()")
        until(lambda: "of 68 processes" in str(ask(browser, _LANES)))

        names = texts(browser, ".lane .name")
        assert len(names) == 68
        assert {f"generator-{i}" for i in range(64)} < set(names)
        assert ask(browser, "document.querySelector('.lane-box').tabIndex") == 0
        assert int(str(ask(browser, "document.getElementById('lanes').clientHeight"))) < 600
        engines = texts(browser, "#version-chart .keys span")
        assert len(engines) == 8
        assert "generator-63" in engines  # the torn one
        browser.execute_script("document.getElementById('weights').scrollIntoView()")
        until(lambda: "The 8 of 64 engines" in text(browser, "#version-chart .at"))
        assert len(texts(browser, "#workers tbody tr")) == 68


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


def test_long_names_wrap_on_a_phone(browser: WebDriver):
    run = samples.Run(
        steps=60, rows=200, run_name="n" * 120, waiting_for="w" * 200, dropped={"r" * 100: 5}
    )
    with served(run) as server:
        for width in (390, 1280):
            show(browser, server, width=width)
            assert ask(browser, "document.documentElement.scrollWidth") == width
        resize(browser, 390)
        server.cut()
        until(lambda: text(browser, "#state").startswith("no connection to the broker"))
        assert ask(browser, "document.documentElement.scrollWidth") == 390
        inside = "document.getElementById('state').getBoundingClientRect().right <= 390"
        assert ask(browser, inside)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_histogram_bars_contrast_with_the_background(
    browser: WebDriver, server: SampleServer, theme: str
):
    show(browser, server)
    resize(browser, 1280, theme=theme)
    until(lambda: ask(browser, "document.documentElement.dataset.theme") == theme)
    until(lambda: texts(browser, "#histogram .fill"))
    color = "getComputedStyle(document.querySelector(arguments[0])).backgroundColor"

    bar, *grounds = (
        ask(browser, color, one) for one in ("#histogram .fill", "#histogram .track", "#staleness")
    )

    assert all(_contrast(str(bar), str(ground)) >= 3 for ground in grounds)


def _contrast(one: str, other: str) -> float:
    """Return the ratio of luminances that WCAG 2 defines, of two colors rgb(r, g, b)."""

    def luminance(color: str) -> float:
        parts = [int(n) / 255 for n in re.findall(r"\d+", color)[:3]]
        light = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), light, strict=True))

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_five_hundred_series_are_drawn(browser: WebDriver):
    with served(samples.Run(steps=60, rows=200, num_generators=240)) as server:
        show(browser, server)
        browser.execute_script("document.getElementById('lanes').scrollIntoView()")

        until(lambda: "of 244 processes" in str(ask(browser, _LANES)))
        assert len(server.run.point(0)) > 500
        assert len(texts(browser, ".lane canvas")) == 244


def test_worker_figures_since_the_start_are_labeled_so(browser: WebDriver, server: SampleServer):
    show(browser, server)

    heads = texts(browser, "#workers th")

    assert heads[3:6] == ["busy now", "busy since its start", "tokens/s since its start"]
    assert heads[-1] == "spends its time on, since its start"
    torn = next(row for row in texts(browser, "#workers tr") if row.startswith("generator-3"))
    assert "generator-3generatoralive0%" in torn


def test_finished_run_is_marked_and_has_no_event_stream(browser: WebDriver):
    silent = dict.fromkeys(samples.Run().processes, 3600.0)
    with served(samples.Run(steps=60, rows=200, live=False, silent_s=silent)) as server:
        show(browser, server)

        assert text(browser, "#state") == "finished run, from its files"
        assert server.waited == 0
        assert set(texts(browser, "#workers .tag")) == {"ended"}
        assert figure(browser, "silent") == ""
        assert figure(browser, "step") == "60 / 500"


def test_colors_follow_the_system_until_chosen_and_the_choice_stays(
    browser: WebDriver, server: SampleServer
):
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
):
    show(browser, server, width=width, at=f"#g{samples.GROUPS[0]}/1")
    until(lambda: texts(browser, "#answer .token"))

    assert ask(browser, "document.documentElement.scrollWidth") == width


def test_nothing_is_asked_of_another_host_and_nothing_breaks_the_policy(
    browser: WebDriver, server: SampleServer
):
    show_answer(browser, server, samples.GROUPS[1], 0)

    asked = ask(browser, "performance.getEntriesByType('resource').map((one) => one.name)")
    assert isinstance(asked, list)
    assert len(asked) > 10
    own = server.address.split("?")[0]
    assert all(one.startswith((own, "data:")) for one in asked)
    assert complaints(browser) == []


def test_two_thousand_rows_are_drawn_in_less_than_a_second_of_cpu(browser: WebDriver):
    with served(samples.Run(steps=2000, rows=2000)) as server:
        resize(browser, 1280)
        browser.get("about:blank")
        browser.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
        before = _spent_s(browser)
        show(browser, server)
        until(lambda: texts(browser, "#rate-chart canvas"))
        for panel in ("learning", "pools", "staleness", "weights", "trust", "correction"):
            browser.execute_script(f"document.getElementById('{panel}').scrollIntoView()")
            until(lambda name=panel: _all_drawn(browser, name))  # type: ignore[misc]
        spent = _spent_s(browser)
        browser.execute_cdp_cmd("Performance.disable", {})

    print(json.dumps({"cpu_s": spent, "before_s": before}))  # noqa: T201
    assert spent < CPU_S


def test_the_trust_region_shows_clips_masks_and_ratios_of_the_newest_step(
    browser: WebDriver, server: SampleServer
):
    show(browser, server)
    browser.execute_script("document.getElementById('trust').scrollIntoView()")
    until(lambda: _all_drawn(browser, "trust"))

    newest = server.run.step(60).metrics
    shares = ("policy/clip_up", "policy/clip_down", "policy/clip_dual", "staleness/masked")
    names = texts(browser, "#clipped-chart .keys span")
    assert names == ["up", "down", "dual", "masked"]
    assert texts(browser, "#clipped-chart .keys b") == [f"{newest[one]:.2%}" for one in shares]
    assert text(browser, "#ratio-chart .keys b") == f"{newest['policy/ratio']:.4f}"
    assert text(browser, "#ratio-max-chart .keys b") == f"{newest['policy/ratio_max']:.2f}"
    assert ask(browser, _HIDDEN) == ["reference", "explained", "critic-loss", "value"]


def test_ratios_that_are_all_one_are_said_and_not_drawn(browser: WebDriver):
    drawn = "[...document.querySelectorAll('#trust figure:not([hidden])')].map((one) => one.id)"
    with served(samples.Run(steps=60, rows=200, one_minibatch=True)) as server:
        show(browser, server)
        until(lambda: ask(browser, drawn) == [])
        assert "learner.minibatches = 1" in text(browser, "#trust-flat")
    with served(samples.Run(steps=60, rows=200)) as server:
        show(browser, server)
        until(lambda: "ratio-chart" in ask(browser, drawn))
        assert ask(browser, "document.getElementById('trust-flat').hidden")


@pytest.mark.parametrize("width", [1024, 1280, 1440, 1920])
def test_the_header_of_an_ended_run_is_whole(browser: WebDriver, width: int):
    with served(samples.Run(steps=60, rows=200, live=False)) as server:
        show(browser, server, width=width)
        about = "document.getElementById('about')"
        assert "finished after" in text(browser, "#about")
        assert ask(browser, f"{about}.scrollWidth <= {about}.clientWidth")
        assert ask(browser, "document.documentElement.scrollWidth <= innerWidth")


def test_critic_and_reference_are_shown_where_there_are_any(browser: WebDriver):
    run = samples.Run(steps=60, rows=200, reference=True, critic=True)
    with served(run) as server:
        show(browser, server)
        browser.execute_script("document.getElementById('trust').scrollIntoView()")
        until(lambda: _all_drawn(browser, "trust"))

        assert ask(browser, _HIDDEN) == []
        newest = run.step(60).metrics
        for chart, names, digits in (
            (
                "reference",
                tuple(f"policy/kl_{to}" for to in ("reference", "behavior", "teacher")),
                4,
            ),
            ("explained", ("critic/explained_variance",), 3),
            ("critic-loss", ("critic/loss",), 4),
            ("value", ("critic/value", "critic/return"), 3),
        ):
            values = texts(browser, f"#{chart}-chart .keys b")
            assert values == [f"{newest[name]:.{digits}f}" for name in names]
        label = ask(browser, "document.querySelector('#explained-chart .plot').ariaLabel")
        assert f"explained: now {newest['critic/explained_variance']:.3f}" in str(label)


_HIDDEN = """[...document.querySelectorAll("#trust figure[hidden]")]
    .map((one) => one.id.replace("-chart", ""))"""


def test_a_table_has_every_figure_of_the_newest_step_by_lag(
    browser: WebDriver, server: SampleServer
):
    def row(name: str, suffix: str) -> list[str]:
        of = {base: newest[base + suffix] for base in _BY_LAG}
        tokens = of["policy/tokens"]
        return [
            name,
            f"{tokens:,.0f} ({tokens / newest['policy/tokens']:.1%})",
            _figure(of["staleness/mismatch_kl"]),
            f"{of['staleness/ess']:.1%}",
            f"{of['policy/ratio']:.4f}",
            _figure(of["policy/ratio_max"]),
            *(f"{of[one]:.2%}" for one in _BY_LAG[-4:]),
            _figure(of["policy/entropy"]),
            _figure(of["reward/group_variance"]),
        ]

    newest = server.run.step(60).metrics
    show(browser, server)

    assert texts(browser, "#by-lag th") == [
        *("lag", "tokens", "mismatch KL", "ESS", "ratio", "largest ratio"),
        *("clip up", "clip down", "dual clip", "masked", "entropy", "reward variance"),
    ]
    names = ("0 steps", "1 step", "2 steps")
    wanted = [row(name, f"@lag{lag}") for lag, name in enumerate(names)] + [row("all", "")]
    cells = texts(browser, "#by-lag td")
    assert [cells[i : i + 12] for i in range(0, len(cells), 12)] == wanted
    assert text(browser, "#by-lag-note").startswith("Of step 60. ")
    tab_to(browser, "[aria-labelledby=by-lag-title]")

    server.news = (61,)
    server.run.steps = 61
    until(lambda: text(browser, "#by-lag-note").startswith("Of step 61. "))
    newest = server.run.step(61).metrics
    assert texts(browser, "#by-lag td")[-12:] == row("all", "")


_BY_LAG = (
    *("policy/tokens", "staleness/mismatch_kl", "staleness/ess", "policy/ratio"),
    *("policy/ratio_max", "policy/entropy", "reward/group_variance"),
    *("policy/clip_up", "policy/clip_down", "policy/clip_dual", "staleness/masked"),
)


def _figure(value: float) -> str:
    digits = 2 if value >= 1 else 3 if value >= 0.1 else 4 if value >= 0.001 else 5
    return f"{value:.{digits}f}"


def _all_drawn(browser: WebDriver, panel: str) -> bool:
    plots = f"document.querySelectorAll('#{panel} figure:not([hidden]) .plot')"
    return ask(browser, f"[...{plots}].every((plot) => plot.querySelector('canvas'))") is True


def _spent_s(browser: WebDriver) -> float:
    """Return the seconds that the page's main thread has worked."""
    answer = browser.execute_cdp_cmd("Performance.getMetrics", {})
    return {one["name"]: float(one["value"]) for one in answer["metrics"]}["TaskDuration"]

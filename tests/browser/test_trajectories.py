"""Trajectories and groups on the page: turns, tokens, search and addresses."""

import re
import time
from pathlib import Path

import pytest

from slipstream.broker.history.trajectories import Item
from slipstream.wire.files.image_folder import ImageFolder
from tests.browser import samples
from tests.browser.chromium import NEEDS_CHROMIUM, WebDriver
from tests.browser.driving import Keys, ask, press, tab_to, text, texts, until
from tests.browser.pages import SampleServer, served
from tests.browser.steps import _all_drawn, show, show_answer
from tests.support.drawn_images import drawn

pytestmark = [pytest.mark.integration, NEEDS_CHROMIUM]


def test_markup_in_prompts_and_answers_is_text(browser: WebDriver, server: SampleServer):
    show_answer(browser, server, samples.GROUPS[0], 1)

    assert text(browser, "#prompt") == samples.HOSTILE
    assert samples.HOSTILE in texts(browser, "#answer .token")
    assert samples.HOSTILE in texts(browser, "#items .prompt")
    assert ask(browser, "window.hurt === undefined")
    assert ask(browser, "document.querySelectorAll('main script, main img').length") == 0


def test_images_of_a_prompt_come_from_the_run_folder_and_a_missing_one_is_named(
    browser: WebDriver, tmp_path: Path
):
    kept = ImageFolder(tmp_path / "images").keep(drawn(640, 320))
    gone = "0" * 64
    with served(samples.Run(steps=60, rows=200, images=(kept, gone)), tmp_path) as server:
        show_answer(browser, server, samples.GROUPS[0], 1)
        until(lambda: ask(browser, "document.querySelector('#images img').naturalWidth") == 320)
        until(lambda: texts(browser, "#images .empty") == ["image 00000000 cannot be shown"])
        assert ask(browser, "document.querySelector('#images img').alt") == f"image {kept[:8]}"
        hosts = "performance.getEntriesByType('resource').map((one) => new URL(one.name).host)"
        assert ask(browser, f"[...new Set({hosts})].length") == 1, "another host was asked"


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

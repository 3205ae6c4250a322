"""Charts on the page: values, zoom, colors, bounds and speed."""

import json
import re
import time

import pytest

from tests.browser import samples
from tests.browser.chromium import NEEDS_CHROMIUM, WebDriver, resize
from tests.browser.driving import ActionChains, ask, complaints, tab_to, text, texts, until
from tests.browser.pages import SampleServer, served
from tests.browser.steps import _LANES, _all_drawn, show, show_answer

pytestmark = [pytest.mark.integration, NEEDS_CHROMIUM]
CPU_S = 1.0


def test_what_there_is_not_is_not_shown_and_a_chart_out_of_sight_is_not_called_empty(
    browser: WebDriver, server: SampleServer
):
    show(browser, server)
    shown = "[...document.querySelectorAll('.chart:not([hidden]) > .empty:not([hidden])')].length"
    assert ask(browser, shown) == 0
    assert not texts(browser, "#kl-chart canvas")
    assert ask(browser, "document.querySelector('#target').checkVisibility()") is False


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


def _spent_s(browser: WebDriver) -> float:
    """Return the seconds that the page's main thread has worked."""
    answer = browser.execute_cdp_cmd("Performance.getMetrics", {})
    return {one["name"]: float(one["value"]) for one in answer["metrics"]}["TaskDuration"]

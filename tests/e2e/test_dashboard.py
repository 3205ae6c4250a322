"""The page of a real run, in a real browser."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

selenium = pytest.importorskip("selenium")
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.remote.webdriver import WebDriver  # noqa: E402

from slipstream.deploy.terminal.observe import run_of_folder, status_now  # noqa: E402
from slipstream.wire.errors import PeerLostError  # noqa: E402
from slipstream.wire.messages.status import RunStatus  # noqa: E402
from tests.browser.chromium import CHROMIUM, DRIVER, start_chromium  # noqa: E402
from tests.support.tiny_run import ROOT, TinyRun  # noqa: E402
from tests.support.waiting import HANG_S  # noqa: E402

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="no chromium and chromedriver here"),
]
_ROWS = """
    const request = new XMLHttpRequest();
    request.open("GET", "/state.json", false);
    request.send();
    const { history } = JSON.parse(request.responseText);
    return { first_s: history.time.at_s[0], steps: history.steps.step };
"""


@pytest.fixture
def browser() -> Iterator[WebDriver]:
    driver = start_chromium()
    yield driver
    driver.quit()


def text(browser: WebDriver, place: str) -> str:
    """Return what is shown at a place, read at once: the page replaces elements all the time."""
    script = "return document.getElementById(arguments[0])?.innerText ?? ''"
    return str(browser.execute_script(script, place))


def numbers(shown: str) -> list[int]:
    return [int(one.replace(",", "")) for one in re.findall(r"\d[\d,]*", shown)]


def until(is_so: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + HANG_S
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def kill(run: TinyRun, words: str) -> None:
    victim = run.process_with(words)
    assert victim is not None
    victim.send_signal(signal.SIGKILL)


def roles_of(run: TinyRun) -> set[str]:
    """Return the roles known to the broker; none while its socket is not there yet."""
    with suppress(PeerLostError):
        return {role.name for role in status_now(run_of_folder(run.folder)).roles}
    return set()


def is_network(entry: dict[str, str]) -> bool:
    """Return whether the browser complains of a connection, as it does when the broker is gone."""
    return entry["source"] == "network" or "net::ERR" in entry["message"]


def assert_page_agrees_with_the_ledger(run: TinyRun, browser: WebDriver) -> RunStatus:
    """Return the ledger's figures as they were before the page was read."""
    before = status_now(run_of_folder(run.folder))
    recorded = (before.issued, before.trained, sum(before.dropped.values()))

    def is_as_new() -> bool:
        shown = numbers(text(browser, "equation-groups"))
        return len(shown) == 5 and all(a >= b for a, b in zip(shown, recorded, strict=False))

    until(is_as_new, "it does not move")
    issued, trained, dropped, in_flight, unaccounted = numbers(text(browser, "equation-groups"))
    after = status_now(run_of_folder(run.folder))
    assert issued == trained + dropped + in_flight
    assert unaccounted == 0
    assert before.issued <= issued <= after.issued
    assert before.trained <= trained <= after.trained
    assert sum(before.dropped.values()) <= dropped <= sum(after.dropped.values())
    return before


def test_the_page_shows_the_ledger_a_killed_generator_and_later_the_finished_run(
    start_run: Callable[..., TinyRun], browser: WebDriver
):
    run = start_run(
        run__steps=30,
        generators__count=1,  # one that is back trains more steps: the kill comes early
        deploy__max_restarts=3,
        sampling__max_response_tokens=32,
    )
    address = run.folder / "dashboard.url"
    run.wait_until(address.exists, "address of the page")
    browser.get(address.read_text().strip())
    run.wait_until(lambda: "generator-0" in roles_of(run), "the generator")
    run.wait_until(lambda: run.steps() >= 3, "third step")
    until(lambda: "live" in text(browser, "state"), "the page is not live")

    before = assert_page_agrees_with_the_ledger(run, browser)

    until(lambda: "generator-0" not in text(browser, "headline"), "a generator does not report")
    kill(run, "--name generator-0")  # it is back as soon as its SGLang is, and reports again
    until(
        lambda: "generator-0" in text(browser, "headline"),
        "the page does not show a generator that was killed",
    )

    steps = run.steps()
    kill(run, "slipstream.broker.main")
    until(lambda: "live" not in text(browser, "state"), "the page does not miss the broker")
    until(lambda: "live" in text(browser, "state"), "the page does not come back")
    run.wait_until(lambda: run.steps() > steps, "a step under the new broker")

    assert run.wait() == 0, run.output
    until(lambda: "finished" in text(browser, "state"), "the page does not show that the run ended")
    assert "generator-0" not in text(browser, "headline")
    summary = run.summary()
    assert [one["message"] for one in browser.get_log("browser") if not is_network(one)] == []

    server = subprocess.Popen(
        [sys.executable, "-m", "slipstream.deploy.main", "dashboard", str(run.folder)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": str(ROOT), "COLUMNS": "200", "PYTHONUNBUFFERED": "1"},
    )
    try:
        assert server.stdout is not None
        browser.get(server.stdout.readline().strip())
        until(lambda: str(summary["issued"]) in text(browser, "equation-groups"), "no figures")
        dropped = sum(summary["dropped"].values())
        assert numbers(text(browser, "equation-groups")) == [
            *(summary["issued"], summary["trained"], dropped),
            *(sum(summary["in_flight"].values()), summary["unaccounted"]),
        ]
        assert "live" not in text(browser, "state")
        rows = browser.execute_script(_ROWS)
        assert rows["first_s"] < before.elapsed_s, "what was before the second broker is gone"
        assert rows["steps"] == list(range(1, run.steps() + 1))
        browser.find_element(By.CSS_SELECTOR, "#items button, #items a").click()
        until(lambda: bool(text(browser, "answer")), "no answer is shown")
        server.send_signal(signal.SIGINT)
        assert server.wait(HANG_S) == 0
    finally:
        server.kill()
        server.communicate()
    run.assert_nothing_left()

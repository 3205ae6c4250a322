"""What `slipstream run` draws while it runs."""

import io
import logging
from pathlib import Path

import pytest
from rich.console import Console
from rich.live import Live

from slipstream.deploy.terminal.console import make_console
from slipstream.deploy.terminal.live import Show
from slipstream.deploy.terminal.observe import page_line
from slipstream.wire.files.run_folder import PAGE_ADDRESS
from slipstream.wire.settings.sections import RunSection
from tests.support.wire_samples import STATUS

ADDRESS = "http://127.0.0.1:1234/?token=secret"


@pytest.fixture
def run(tmp_path: Path) -> RunSection:
    section = RunSection(name="run", dir=str(tmp_path))
    section.folder.mkdir()
    (section.folder / "resolved.toml").write_text(f'[run]\nname = "run"\ndir = "{tmp_path}"\n')
    (section.folder / PAGE_ADDRESS).write_text(ADDRESS + "\n")
    return section


def test_the_token_of_the_page_is_shown_in_terminals_alone(run: RunSection):
    kept, seen = io.StringIO(), io.StringIO()
    Show(make_console(file=kept), run, None)(STATUS)
    assert "secret" not in kept.getvalue()
    assert f"dashboard: its address is in {run.folder / PAGE_ADDRESS}\n" in kept.getvalue()
    console = make_console(file=seen, force_terminal=True, width=200)
    with Live(console=console, auto_refresh=False) as live:
        Show(console, run, live)(STATUS)
    assert ADDRESS in seen.getvalue()


def test_the_page_is_named_without_its_token_elsewhere(run: RunSection):
    place = run.folder / PAGE_ADDRESS
    assert page_line(run, is_terminal=True) == f"dashboard {ADDRESS}"
    assert page_line(run, is_terminal=False) == f"dashboard: its address is in {place}"
    place.unlink()
    assert page_line(run, is_terminal=False) == "dashboard (off)"


def test_a_terminal_shows_the_screen_and_why_it_is_old(run: RunSection):
    seen = io.StringIO()
    console = make_console(file=seen, force_terminal=True, width=80, height=24, color_system=None)
    with Live(console=console, auto_refresh=False) as live:
        Show(console, run, live)(STATUS, "the broker has not answered for 4 s")
    lines = seen.getvalue().splitlines()
    assert "run  step 5 of 9" in lines[0]
    assert lines[1].startswith("the broker has not answered for 4 s")
    assert any(line.startswith("groups") for line in lines)


def test_a_file_gets_a_line_every_ten_seconds(run: RunSection):
    kept = io.StringIO()
    times = iter([0.0, 0.0, 9.9, 10.0, 10.0])
    show = Show(make_console(file=kept), run, None, now=lambda: next(times))
    for _ in range(3):
        show(STATUS)
    assert kept.getvalue().count("step 5/9") == 2


def test_view_that_cannot_be_drawn_is_logged_once_and_ends_nothing(
    run: RunSection, caplog: pytest.LogCaptureFixture
):
    class Broken(Console):
        def print(self, *_: object, **__: object) -> None:
            raise ValueError("no such style")

    clock = iter(range(0, 10_000, 100))
    show = Show(Broken(), run, None, now=lambda: next(clock))
    with caplog.at_level(logging.ERROR):
        show(STATUS)
        show(STATUS)
    assert [record.message for record in caplog.records] == [
        "the view cannot be drawn; the run continues"
    ]

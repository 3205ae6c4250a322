"""What `slipstream run` draws while it runs."""

import io
import logging
from pathlib import Path

import pytest
from rich.console import Console
from rich.live import Live

from slipstream.deploy.launch.local import Show
from slipstream.deploy.terminal.console import make_console
from slipstream.wire.files.run_folder import PAGE_ADDRESS
from slipstream.wire.settings.sections import RunSection
from tests.support.wire_samples import STATUS

ADDRESS = "http://127.0.0.1:1234/?token=secret"


@pytest.fixture
def run(tmp_path: Path) -> RunSection:
    section = RunSection(name="run", dir=str(tmp_path))
    section.folder.mkdir()
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


def test_a_view_that_cannot_be_drawn_is_said_once_and_ends_nothing(
    run: RunSection, caplog: pytest.LogCaptureFixture
):
    class Broken(Console):
        def print(self, *_: object, **__: object) -> None:
            raise ValueError("no such style")

    show = Show(Broken(), run, None)
    with caplog.at_level(logging.ERROR):
        show(STATUS)
        show(STATUS)
    assert [record.message for record in caplog.records] == [
        "the view cannot be drawn; the run goes on"
    ]

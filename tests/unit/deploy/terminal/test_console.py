"""Nothing that another process or host wrote is obeyed: no markup, no escape, no forged line."""

import io
import logging
import os
import pty
from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from slipstream.deploy.terminal.console import make_console
from slipstream.deploy.terminal.figures import final_table, one_line
from slipstream.deploy.terminal.recent import Recent
from slipstream.deploy.terminal.screen import draw
from slipstream.wire.process import logs
from slipstream.wire.process.safe_text import one_line as as_one_line
from slipstream.wire.process.safe_text import visible
from tests.support.wire_samples import STATUS

HOSTILE = "[/x] :bomb: \x1b]52;c;ZXZpbA==\x07\x1b[2J\u202e"
SHOWN = r"[/x] :bomb: \x1b]52;c;ZXZpbA==\x1b[2J\u202e"  # rich leaves bells out


def terminal() -> tuple[Console, io.StringIO]:
    written = io.StringIO()
    return make_console(file=written, force_terminal=True, width=400, color_system=None), written


def test_text_of_others_is_neither_markup_nor_emoji_nor_control():
    console, written = terminal()
    console.print(HOSTILE)
    console.print(Text(HOSTILE))
    assert written.getvalue() == f"{SHOWN}\n" * 2


def test_a_view_of_hostile_names_is_drawn_and_drawn_again():
    role = replace(STATUS.roles[0], name=HOSTILE, phase_seconds={HOSTILE: 1.0})
    status = replace(STATUS, roles=[role], run_name=HOSTILE, waiting_for=HOSTILE, issued=1)
    console, written = terminal()
    recent = Recent(None, high_water_bytes=1, fsync="")
    with Live(console=console, auto_refresh=False) as live:
        for _ in range(2):
            view = draw(status, recent, console, height=40, trouble=HOSTILE, footer=HOSTILE)
            live.update(view, refresh=True)
    console.print(final_table(status, outcome=HOSTILE))
    console.print(one_line(status))
    text = written.getvalue()
    assert "\x1b]52" not in text
    assert "\x07" not in text
    assert SHOWN in text


def test_rich_itself_still_moves_the_cursor_and_colors():
    written = io.StringIO()
    console = make_console(file=written, force_terminal=True, color_system="standard")
    with Live(console=console, auto_refresh=False) as live:
        live.update(Text("seen", style="red"), refresh=True)
    assert "\x1b[31mseen" in written.getvalue()


def test_a_log_shows_control_characters_as_text(capsys: pytest.CaptureFixture[str]):
    before = logging.getLogger().handlers[:]
    level = logging.getLogger().level
    try:
        logs.start_logging("broker")
        logging.getLogger("x").warning("%s", HOSTILE)
    finally:
        logging.basicConfig(handlers=before, level=level, force=True)
    line = capsys.readouterr().err
    assert line.endswith(f" W broker {visible(HOSTILE)}\n")


def test_client_text_is_printed_as_one_short_line():
    forged = "no judge\n20:00:00.000 E broker FORGED\x1b]0;x\x07" + "A" * 3_000
    shown = as_one_line(forged, most=60)
    assert shown == "no judge 20:00:00.000 E broker FORGED ]0;x " + "A" * 17
    assert visible("a\tb\nc") == "a\tb\nc"


def wide_table() -> Table:
    table = Table("a", "b", title="figures")
    table.add_row("x" * 150, "y" * 150)
    return table


def test_a_table_that_is_read_by_a_program_is_not_cut(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    written = io.StringIO()
    console = make_console(file=written)
    console.print(wide_table())
    assert "x" * 150 in written.getvalue()
    assert "y" * 150 in written.getvalue()
    console.rule()
    assert len(written.getvalue().splitlines()[-1]) < 150


def test_a_width_that_the_environment_names_was_chosen(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "90")
    written = io.StringIO()
    make_console(file=written).print(wide_table())
    assert max(map(len, written.getvalue().splitlines())) <= 90


def test_a_table_fits_a_terminal_and_a_width_that_was_chosen():
    for options in ({"force_terminal": True, "width": 60}, {"width": 60}):
        written = io.StringIO()
        make_console(file=written, color_system=None, **options).print(wide_table())
        assert max(map(len, written.getvalue().splitlines())) <= 60


@pytest.mark.parametrize("reader", ["pipe", "terminal"])
def test_a_run_goes_on_where_nobody_reads_its_screen_any_more(
    reader: str, caplog: pytest.LogCaptureFixture
):
    ours, theirs = os.pipe() if reader == "pipe" else pty.openpty()
    with os.fdopen(theirs, "w") as written:
        console = make_console(file=written, outlives_screen=True)
        console.print("step 1")
        os.close(ours)
        with Live(console=console, auto_refresh=False) as live:
            for _ in range(2):
                live.update(Text("step 2"), refresh=True)
                console.print("step 2")
        written.flush()  # as at the end of the process, which fails with exit code 120 otherwise
    why = {"pipe": "Broken pipe", "terminal": "Input/output error"}[reader]
    assert caplog.messages == [f"the run goes on without its screen: {why} (standard output)"]


def test_a_full_disk_under_the_screen_ends_no_run(caplog: pytest.LogCaptureFixture):
    with Path("/dev/full").open("w") as written:
        make_console(file=written, outlives_screen=True).print("step 1")
    assert caplog.messages == [
        "the run goes on without its screen: No space left on device (standard output)"
    ]

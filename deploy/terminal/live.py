"""The live view of `slipstream run`."""

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from rich.console import Console
from rich.live import Live

from slipstream.broker.history.columns import read_state
from slipstream.deploy.launch.observer import StatusWatcher
from slipstream.deploy.terminal.figures import final_table, one_line
from slipstream.deploy.terminal.observe import page_line, trouble_with
from slipstream.deploy.terminal.recent import Recent, recent_of
from slipstream.deploy.terminal.screen import draw
from slipstream.wire.files.run_folder import PAGE_STATE
from slipstream.wire.messages.status import RunStatus
from slipstream.wire.settings.sections import RunSection

_log = logging.getLogger(__name__)
_DRAW_EVERY_S = 1.0
_LINE_EVERY_S = 10.0


class TerminalView:
    """The view of `slipstream run`: the screen while it lasts, a table at its end."""

    def __init__(self, console: Console) -> None:
        self.console = console

    @contextmanager
    def following(self, run: RunSection) -> Iterator[Callable[[StatusWatcher], None]]:
        """Draw on a terminal while a run lasts, else print lines."""
        live = None
        if self.console.is_terminal:
            live = Live(console=self.console, auto_refresh=False, transient=True)
        show = Show(self.console, run, live)

        def draw_newest(watcher: StatusWatcher) -> None:
            if watcher.newest is not None:
                show(watcher.newest, trouble_with(watcher, run))

        with live or nullcontext():
            yield draw_newest

    def show_line(self, tenant: str, status: RunStatus) -> None:
        """Print the state of a tenant's run in a line."""
        self.console.print(f"{tenant}: {one_line(status)}", soft_wrap=True, highlight=False)

    def show_figures(self, status: RunStatus, outcome: str) -> None:
        """Print the table of a run that has ended."""
        self.console.print(final_table(status, outcome=outcome))


class Show:
    """Draws a run: the screen on a terminal, else a line now and then, kept in files.

    The page's address contains its token, so only a terminal shows it.
    """

    def __init__(
        self,
        console: Console,
        run: RunSection,
        live: Live | None,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._now = now
        self._console = console
        self._run = run
        self._live = live
        self._recent: Recent | None = None
        self._next_s = -math.inf
        self._announced = False
        self._is_broken = False

    def __call__(self, status: RunStatus, trouble: str = "") -> None:
        """Draw the newest state where it is time to; ``trouble`` is why it is old."""
        if self._now() < self._next_s:
            return
        self._next_s = self._now() + (_LINE_EVERY_S if self._live is None else _DRAW_EVERY_S)
        try:
            if self._live is None:
                if not self._announced:
                    self._announced = True
                    page = page_line(self._run, is_terminal=False)
                    self._console.print(page, soft_wrap=True)
                self._console.print(one_line(status), soft_wrap=True)
                return
            if self._recent is None:
                stored = read_state(self._run.folder / PAGE_STATE)
                self._recent = recent_of(self._run.folder, stored)
            self._recent.add(status)
            view = draw(
                status,
                self._recent,
                self._console,
                height=self._console.height - 1,
                trouble=trouble,
                footer=page_line(self._run, is_terminal=True),
            )
            self._live.update(view, refresh=True)
        except Exception:  # noqa: BLE001 a picture of the run must never end it
            if not self._is_broken:
                self._is_broken = True
                _log.exception("the view cannot be drawn; the run continues")

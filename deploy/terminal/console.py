"""The one console of all commands: text from others is shown without escape sequences."""

import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from typing_extensions import override

from slipstream.wire.process.safe_text import visible

_log = logging.getLogger(__name__)
_WIDEST = 10_000  # columns of a table for programs


def make_console(
    *,
    outlives_screen: bool = False,
    **options: Any,  # noqa: ANN401 as rich has them
) -> Console:
    """Return a console that reads no markup or emoji codes and shows control characters as text.

    Prompts, answers, names and reasons come from other processes and hosts; code that draws them
    needs no care. Without a terminal and a chosen width, tables are as wide as necessary:
    programs can search whole lines, and nothing is cut.

    Args:
        outlives_screen: Continue in silence, instead of ending the process, once output fails: its
            pipe or terminal was closed, or its disk is full.
        options: Options of rich.
    """
    kind = _OutlivingConsole if outlives_screen else _VisibleConsole
    return kind(markup=False, emoji=False, **options)


def plain_table(*titles: str, left: int = 1) -> Table:
    """Return a table without lines: ``left`` columns of text, then columns of numbers."""
    table = Table(box=None, pad_edge=False)
    for number, title in enumerate(titles):
        table.add_column(title, justify="left" if number < left else "right", no_wrap=True)
    return table


class _VisibleConsole(Console):
    """Shows only rich's own control codes; those in texts become visible."""

    def __init__(self, **options: Any) -> None:  # noqa: ANN401 as rich has them
        super().__init__(**options)
        chosen = "width" in options or "COLUMNS" in self._environ
        self._widens = not chosen and not self.is_terminal

    @override
    def print(self, *objects: Any, **options: Any) -> None:
        tables = [item for item in objects if isinstance(item, Table)] if self._widens else []
        if not tables:
            super().print(*objects, **options)
            return
        unbounded = self.options.update(max_width=_WIDEST)
        usual = self.width
        self.width = max(
            usual, *(Measurement.get(self, unbounded, table).maximum for table in tables)
        )
        try:
            super().print(*objects, **options)
        finally:
            self.width = usual

    @override
    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(visible(segment.text), segment.style)


class _OutlivingConsole(_VisibleConsole):
    """Continues in silence once it cannot be written to."""

    @override
    def _write_buffer(self) -> None:
        try:
            super()._write_buffer()
        except OSError as error:
            self.quiet = True
            with Path(os.devnull).open("w") as nothing:  # what is left would fail again at the end
                os.dup2(nothing.fileno(), self.file.fileno())
            _log.warning("the run goes on without its screen: %s (standard output)", error.strerror)

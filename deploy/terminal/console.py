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

from slipstream.wire.process.visible import visible

_log = logging.getLogger(__name__)
_WIDEST = 10_000  # columns of a table that is read by a program


def make_console(
    *,
    outlives_screen: bool = False,
    **options: Any,  # noqa: ANN401 as rich has them
) -> Console:
    """Return a console that reads no markup or emoji codes and shows control characters as text.

    Prompts, answers, names and reasons come from other processes and hosts. Whatever draws them
    needs no care of its own. Where it is no terminal and no width is chosen, tables are as wide as
    they need: what reads them can search a line, and nothing is cut.

    Args:
        outlives_screen: go on in silence where it cannot be written to any more, instead of ending
            the process: its pipe or terminal was closed, or its disk is full.
        options: of rich.
    """
    kind = _OutlivingConsole if outlives_screen else _VisibleConsole
    return kind(markup=False, emoji=False, **options)


class _VisibleConsole(Console):
    """Control codes are rich's own, and in no text."""

    def __init__(self, **options: Any) -> None:  # noqa: ANN401 as rich has them
        super().__init__(**options)
        chosen = "width" in options or "COLUMNS" in self._environ
        self._widens = not chosen and not self.is_terminal

    @override
    def print(self, *objects: Any, **options: Any) -> None:
        tables = [one for one in objects if isinstance(one, Table)] if self._widens else []
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
    """Goes on in silence once it cannot be written to."""

    @override
    def _write_buffer(self) -> None:
        try:
            super()._write_buffer()
        except OSError as error:
            self.quiet = True
            with Path(os.devnull).open("w") as nothing:  # what is left would fail again at the end
                os.dup2(nothing.fileno(), self.file.fileno())
            _log.warning("the run goes on without its screen: %s (standard output)", error.strerror)

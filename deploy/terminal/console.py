"""The one console of all commands: text from others is shown without escape sequences."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from typing_extensions import override

from slipstream.wire.process.visible import visible


def make_console(**options: Any) -> Console:  # noqa: ANN401 as rich has them
    """Return a console that reads no markup or emoji codes and shows control characters as text.

    Prompts, answers, names and reasons come from other processes and hosts. Whatever draws them
    needs no care of its own.
    """
    return _VisibleConsole(markup=False, emoji=False, **options)


class _VisibleConsole(Console):
    """Control codes are rich's own, and in no text."""

    @override
    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(visible(segment.text), segment.style)

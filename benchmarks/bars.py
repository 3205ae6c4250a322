"""What every benchmark prints: one line per bar, and an exit code."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NotRun:
    """In place of a figure that could not be measured here: its bar is short."""

    reason: str


def _printed(line: str) -> None:
    print(line, flush=True)


class Bars:
    """Collects the bars of one benchmark; ``show`` gets each line."""

    def __init__(self, show: Callable[[str], None] = _printed) -> None:
        self._short = False
        self._show = show

    def at_least(self, name: str, value: float | NotRun, unit: str, *, needs: float) -> None:
        """Print a bar that must reach a value."""
        ok = not isinstance(value, NotRun) and value >= needs
        self._print(name, value, unit, f">= {needs:g}", ok=ok)

    def at_most(self, name: str, value: float | NotRun, unit: str, *, needs: float) -> None:
        """Print a bar that must stay below a value."""
        ok = not isinstance(value, NotRun) and value <= needs
        self._print(name, value, unit, f"<= {needs:g}", ok=ok)

    def _print(self, name: str, value: float | NotRun, unit: str, needs: str, *, ok: bool) -> None:
        self._short = self._short or not ok
        figure, verdict = "-", "short (not run)"
        if isinstance(value, NotRun):
            self._show(f"{name} was not run: {value.reason}")
        else:
            figure, verdict = f"{value:.3f}", "ok" if ok else "short"
        self._show(f"bar {name}: {figure} {unit} (needs {needs}): {verdict}")

    @property
    def exit_code(self) -> int:
        return 1 if self._short else 0

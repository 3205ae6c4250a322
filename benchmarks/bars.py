"""What every benchmark prints: one line per bar, and an exit code."""


class Bars:
    """Collects the bars of one benchmark."""

    def __init__(self) -> None:
        self._short = False

    def at_least(self, name: str, value: float, unit: str, *, needs: float) -> None:
        """Print a bar that must reach a value."""
        self._print(name, value, unit, f">= {needs:g}", value >= needs)

    def at_most(self, name: str, value: float, unit: str, *, needs: float) -> None:
        """Print a bar that must stay below a value."""
        self._print(name, value, unit, f"<= {needs:g}", value <= needs)

    def _print(self, name: str, value: float, unit: str, needs: str, ok: bool) -> None:
        self._short = self._short or not ok
        print(
            f"bar {name}: {value:.3f} {unit} (needs {needs}): {'ok' if ok else 'short'}", flush=True
        )

    @property
    def exit_code(self) -> int:
        return 1 if self._short else 0

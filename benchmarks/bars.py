"""What every benchmark prints: one line per bar, and an exit code."""


class Bars:
    """Collects the bars of one benchmark."""

    def __init__(self) -> None:
        self._short = False

    def at_least(self, name: str, value: float, unit: str, *, needs: float) -> None:
        """Print a bar that must reach a value."""
        ok = value >= needs
        self._short = self._short or not ok
        print(f"bar {name}: {value:.3f} {unit} (needs >= {needs:g}): {'ok' if ok else 'short'}")

    @property
    def exit_code(self) -> int:
        return 1 if self._short else 0

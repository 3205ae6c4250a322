"""Durations of the phases of a publish."""

from collections.abc import Callable


class Laps:
    """Seconds between calls, by name."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._since = now()
        self.seconds: dict[str, float] = {}

    def lap(self, phase: str) -> None:
        """End the current phase under this name."""
        now = self._now()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._since
        self._since = now

"""Durations of the phases of a publish."""

from collections.abc import Callable, Mapping


class PhaseTimes:
    """Seconds between calls, by name."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._since = now()
        self.seconds: dict[str, float] = {}

    def lap(self, phase: str, within: Mapping[str, float] | None = None) -> None:
        """End the current phase under this name, less the known phases ``within`` it."""
        now = self._now()
        parts = within or {}
        rest = max(0.0, now - self._since - sum(parts.values()))
        for name, seconds in (*parts.items(), (phase, rest)):
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        self._since = now

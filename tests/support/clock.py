"""A clock that a test sets."""


class Clock:
    """Shows ``now_s`` until time is made to pass."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def passes(self, seconds: float) -> None:
        self.now_s += seconds

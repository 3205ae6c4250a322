"""Sums that show how the speed of an engine depends on the number of its sequences.

An answer gives the seconds that its tokens took, and the mean number of sequences in the engine
meanwhile. A line through seconds per token over sequences, weighted by tokens, needs no more than
five sums (deploy/predict/advise fits it), which cost a few additions for each answer.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class TimedCall:
    """A call of the engine."""

    num_tokens: int = 0  # tokens of the longest response; 0 until it is answered


class EnginePace:
    """Adds up the figures of answers."""

    def __init__(
        self,
        stood_s: Callable[[], float],
        *,
        counts_calls: bool,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin with an engine that computes nothing.

        Args:
            stood_s: Returns the total time in which the engine stood still.
            counts_calls: True if each call is one sequence; else ``observe`` gets their number.
            now: Returns seconds of a clock.
        """
        self._stood_s = stood_s
        self._counts_calls = counts_calls
        self._now = now
        self._num_running = 0
        self._is_known = counts_calls
        self._since_s = now()
        self._sequence_s = 0.0  # integral of the number of sequences until then
        self._sums = dict.fromkeys(
            ("pace_tokens", "pace_sequences", "pace_squares", "pace_s", "pace_sequence_s"), 0.0
        )

    def observe(self, num_running: int) -> None:
        """Take the number of sequences that the engine reports."""
        if not self._counts_calls:
            self._is_known = True
            self._set(num_running)

    def _set(self, num_running: int) -> None:
        now_s = self._now()
        self._sequence_s += self._num_running * (now_s - self._since_s)
        self._num_running, self._since_s = num_running, now_s

    @contextmanager
    def call(self) -> Iterator[TimedCall]:
        """Count a call of the engine; set its ``num_tokens`` once it is answered."""
        if self._counts_calls:
            self._set(self._num_running + 1)
        is_known, began_s, stood_s = self._is_known, self._now(), self._stood_s()
        before = self._until(began_s)
        call = TimedCall()
        try:
            yield call
        finally:
            now_s = self._now()
            elapsed = now_s - began_s
            seconds = elapsed - (self._stood_s() - stood_s)
            if is_known and seconds > 0.0 and call.num_tokens:
                sequences = max(1.0, (self._until(now_s) - before) / elapsed)
                self._add(call.num_tokens, seconds, sequences)
            if self._counts_calls:
                self._set(self._num_running - 1)

    def _until(self, now_s: float) -> float:
        return self._sequence_s + self._num_running * (now_s - self._since_s)

    def _add(self, num_tokens: int, seconds: float, sequences: float) -> None:
        sums = self._sums
        sums["pace_tokens"] += num_tokens
        sums["pace_sequences"] += num_tokens * sequences
        sums["pace_squares"] += num_tokens * sequences**2
        sums["pace_s"] += seconds
        sums["pace_sequence_s"] += seconds * sequences

    @property
    def counters(self) -> dict[str, float]:
        """The sums, to report."""
        return dict(self._sums)

"""Clock offset of another host."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from slipstream.deploy.preflight.check.facts import Fact, ok, warn

_READINGS = 5
_MOST_OFFSET_S = 1.0  # limit, because records of several hosts are ordered by time


@dataclass(frozen=True, slots=True)
class Offset:
    """Offset of a clock from this host's clock, within half a round trip."""

    offset_s: float
    round_trip_s: float


def measure(
    read: Callable[[], float],
    *,
    now: Callable[[], float] = time.time,
    seconds: Callable[[], float] = time.perf_counter,
) -> Offset:
    """Return the offset of a clock, from the quickest of a few readings.

    Args:
        read: Returns the unix time of the other host.
        now: Unix time of this host.
        seconds: Seconds of a monotonic clock.
    """
    found = []
    for _ in range(_READINGS):
        before_s, start_s = now(), seconds()
        there_s = read()
        round_trip_s = seconds() - start_s
        found.append(Offset(there_s - before_s - round_trip_s / 2, round_trip_s))
    return min(found, key=lambda one: one.round_trip_s)


def judge_clock(seen: Offset) -> Fact:
    """Return whether a clock agrees with this host's, as far as the round trip shows."""
    found = (
        f"{seen.offset_s:+.3f} s against the host of this command, "
        f"give or take {seen.round_trip_s / 2:.3f} s"
    )
    if abs(seen.offset_s) - seen.round_trip_s / 2 > _MOST_OFFSET_S:
        limit = (
            f", expected at most {_MOST_OFFSET_S:g} s: records do not line up; set the clock (NTP)"
        )
        return warn("clock", found + limit)
    return ok("clock", found)

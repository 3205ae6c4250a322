"""How far the clock of another host is off."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from slipstream.deploy.preflight.check.facts import Fact, ok, warn

_READINGS = 5
_MOST_OFFSET_S = 1.0  # records of several hosts are put in order by their times


@dataclass(frozen=True, slots=True)
class Offset:
    """A clock against this host's: off by ``offset_s``, give or take half a round trip."""

    offset_s: float
    round_trip_s: float


def measure(
    read: Callable[[], float],
    *,
    now: Callable[[], float] = time.time,
    seconds: Callable[[], float] = time.perf_counter,
) -> Offset:
    """Return the offset of a clock, by the quickest of a few readings.

    Args:
        read: returns the unix time of the other host.
        now: the unix time here.
        seconds: of a clock that only grows.
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

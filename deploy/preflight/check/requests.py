"""Requests to a host's program, and its answers: one line of JSON each."""

from typing import Literal, TypeAlias

import msgspec

from slipstream.deploy.preflight.check.facts import Fact


class LookAt(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Look at the host, as a run with some of its processes there would use it."""

    settings: str  # all settings, in TOML, as the processes there read them
    roles: tuple[str, ...]  # planned processes there
    keys_by_run: bool = False  # the run makes the keys of its hosts


class ReadClock(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Read the clock of the host."""


HostRequest: TypeAlias = LookAt | ReadClock


class HostCard(msgspec.Struct, frozen=True, kw_only=True):
    """Properties in which the hosts of a run are compared."""

    device: Literal["cpu", "cuda"]
    libraries: dict[str, str]  # versions by package, without missing ones
    model: dict[str, str]  # digests by part


class Observed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """All about one host."""

    hostname: str
    facts: tuple[Fact, ...]
    card: HostCard | None = None  # None if the settings cannot be used there


class ClockReading(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The time of the host's clock."""

    unix_s: float


class HostFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Why there is no other answer."""

    why: str


HostAnswer: TypeAlias = Observed | ClockReading | HostFailed

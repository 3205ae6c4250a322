"""Pure: one fact about a run before its start, and the exit code of several facts."""

from collections.abc import Iterable
from typing import Literal

import msgspec

Outcome = Literal["ok", "warn", "fail"]
_EXIT_CODES: dict[Outcome, int] = {"ok": 0, "warn": 1, "fail": 2}


class Fact(msgspec.Struct, frozen=True, kw_only=True):
    """A finding, its outcome for the run, and the setting that changes it."""

    outcome: Outcome
    name: str
    found: str
    setting: str = ""  # empty if no setting changes it

    @property
    def line(self) -> str:
        """The fact as one line of text."""
        is_named = not self.setting or f"({self.setting})" in self.found
        found = " ".join(self.found.split())
        return f"{self.outcome:4} {self.name}: {found}{'' if is_named else f' ({self.setting})'}"


class HostReport(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of one host."""

    host: str
    roles: tuple[str, ...]  # planned processes of the run on the host
    facts: tuple[Fact, ...]


def ok(name: str, found: str, setting: str = "") -> Fact:
    """Return a fact that meets the run's needs."""
    return Fact(outcome="ok", name=name, found=found, setting=setting)


def warn(name: str, found: str, setting: str = "") -> Fact:
    """Return a fact with which the run starts, but perhaps not as intended."""
    return Fact(outcome="warn", name=name, found=found, setting=setting)


def fail(name: str, found: str, setting: str = "") -> Fact:
    """Return a fact with which the run does not start, or fails early."""
    return Fact(outcome="fail", name=name, found=found, setting=setting)


def exit_code(reports: Iterable[HostReport]) -> int:
    """Return 0 if all is well, 1 with warnings, 2 with a failure."""
    outcomes = (fact.outcome for report in reports for fact in report.facts)
    return max((_EXIT_CODES[outcome] for outcome in outcomes), default=0)

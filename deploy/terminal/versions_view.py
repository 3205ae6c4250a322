"""Engines' weight versions and publish outcomes, for a terminal of 100 columns."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime

import msgspec
from rich.console import RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from slipstream.deploy.terminal.figures import MEMBER_COLORS
from slipstream.wire.messages.status import GONE_S, RunStatus
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.messages.weightbus import PUBLISH_PHASES, MemberState, PublishRecord
from slipstream.wire.process.visible import visible


class VersionsView(msgspec.Struct, frozen=True, kw_only=True):
    """Version of each engine, and the outcomes of the newest publishes."""

    run_name: str
    steps: int  # learner steps completed
    as_of: str  # empty is now; else why this is old
    relay_silent_s: float | None  # None: no relay has reported; members are as last reported
    members: list[MemberState]
    publishes: list[PublishRecord]  # the newest last

    @property
    def is_old(self) -> bool:
        """True if engines may hold something else by now."""
        silent_s = self.relay_silent_s
        return bool(self.as_of) or silent_s is None or silent_s > GONE_S


def view_of(status: RunStatus) -> VersionsView:
    """Return the view of a broker's present status."""
    return VersionsView(
        run_name=status.run_name,
        steps=status.steps,
        as_of="",
        relay_silent_s=relay_silent_s([(one.role, one.silent_s) for one in status.roles]),
        members=status.members,
        publishes=status.publish_history,
    )


def relay_silent_s(roles: Sequence[tuple[str, float]]) -> float | None:
    """Return since when the relay of a run is silent, from (role, seconds); None without one."""
    return min((silent_s for role, silent_s in roles if role == "relay"), default=None)


def render(
    view: VersionsView, *, count: int, now: Callable[[], float] = time.time
) -> Iterator[RenderableType]:
    """Yield the text, with ``count`` publishes, for a terminal of 100 columns."""
    now_s = now()
    if view.as_of:
        yield Text(visible(view.as_of), style="yellow")
    published = [record.version for record in view.publishes if record.adopted_by]
    newest = f"newest adopted version {max(published).label}" if published else "no version yet"
    yield Text(f"{visible(view.run_name)}: learner step {view.steps}, {newest}", style="bold")
    yield from _members(view, now_s)
    shown = view.publishes[-count:] if count > 0 else []
    if shown:
        total = len(view.publishes)
        yield _title(f"the newest {count} of {total} publishes" if count < total else "publishes")
        yield from _history(shown, now_s)
    left_out: list[tuple[str, str]] = []
    for record in shown:
        by_reason: dict[str, list[str]] = {}
        for name, why in sorted(record.failed.items()):
            by_reason.setdefault(why, []).append(name)
        for why, names in by_reason.items():
            left_out.append((f"{record.version.label} {_some(names, most=2)}", why))
    if left_out:
        yield _title("left out")
        yield _reasons(left_out)
    quarantined = [
        (f"{record.version.label} {name}", why)
        for record in shown
        for name, why in sorted(record.quarantined.items())
    ]
    if quarantined:
        yield _title(
            "quarantined: these engines did not compute what the learner does", style="red"
        )
        yield _reasons(quarantined)


def _members(view: VersionsView, now_s: float) -> Iterator[RenderableType]:
    """Yield the version of each engine, as of the relay's last report."""
    silent_s = view.relay_silent_s
    if view.as_of:
        yield _title("held by each engine, as last reported by the relay")
    elif silent_s is None:
        what = "engines' versions are not known: no relay has reported to this broker"
        yield _title(what, style="yellow")
    elif silent_s > GONE_S:
        what = f"held by each engine before the relay went silent {_age(silent_s)} ago"
        yield _title(what, style="yellow")
    else:
        yield _title(f"held by each engine, as the relay reported {silent_s:.1f} s ago")
    if view.members:
        table = _table()
        for heading in ("engine", "state", "version", "since", "transport"):
            table.add_column(heading, overflow="fold")
        for one in view.members:
            age = "" if view.is_old else f", {_age(now_s - one.since_s)}"
            table.add_row(
                Text(visible(one.name)),
                Text(f"was {one.state}")
                if view.is_old
                else Text(one.state, MEMBER_COLORS[one.state]),
                one.version.label if one.version else "none",
                _clock(one.since_s, now_s) + age,
                one.transport,
            )
        yield table
    elif silent_s is not None:
        yield Text("no engine was on the weight bus" if view.is_old else "no engine so far")
    gone: dict[str, PolicyVersion] = {}  # the version that each adopted last
    here = {one.name for one in view.members}
    for record in view.publishes:
        for name in record.adopted_by.keys() - here:
            gone[name] = max(gone.get(name, record.version), record.version)
    if gone:
        ran = _some([f"{name} ({gone[name].label})" for name in sorted(gone)], most=6)
        yield Text(f"no longer there: {visible(ran)}", style="dim")
    failures = [(one.name, one.reason) for one in view.members if one.reason]
    if failures:
        yield _title("last failures")
        yield _reasons(failures)


def _history(shown: Sequence[PublishRecord], now_s: float) -> Iterator[RenderableType]:
    """Yield the publishes, and the seconds of each phase that any of them had."""
    table = _table()
    for heading in ("version", "at", "digest"):
        table.add_column(heading, no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    has_fetched = any(any(record.fetched_bytes.values()) for record in shown)
    if has_fetched:  # by the agent that fetched most
        table.add_column("fetched", justify="right", no_wrap=True)
    table.add_column("transports", overflow="fold")
    table.add_column("adopted by", no_wrap=True)
    table.add_column("in flight", justify="right", no_wrap=True)
    table.add_column("slowest", justify="right", no_wrap=True)
    for record in shown:
        members = {*record.transports, *record.adopted_by, *record.failed}
        style = "red" if record.failed else ""
        kinds = Counter(record.transports.values())
        fetched = max(record.fetched_bytes.values(), default=0)
        table.add_row(
            record.version.label,
            _clock(record.at_s, now_s),
            record.digest[:8] or "-",
            decimal(record.num_bytes),
            *([decimal(fetched) if fetched else "-"] if has_fetched else []),
            ", ".join(f"{count} {name}" for name, count in sorted(kinds.items())) or "-",
            Text(f"{len(record.adopted_by)} of {len(members)}", style=style),
            str(sum(record.num_in_flight.values())),
            f"{max(record.adopted_by.values()):.2f} s" if record.adopted_by else "-",
        )
    yield table
    yield _title("seconds by phase, of the slowest engine")
    named = {phase for record in shown for phase in record.phase_seconds}
    phases = [p for p in PUBLISH_PHASES if p in named] + sorted(named.difference(PUBLISH_PHASES))
    table = _table()
    table.add_column("version", no_wrap=True)
    for phase in phases:
        table.add_column(Text(visible(phase)), justify="right")
    for record in shown:
        seconds = (record.phase_seconds.get(phase) for phase in phases)
        cells = ("-" if one is None else f"{one:.3f}" for one in seconds)
        table.add_row(record.version.label, *cells)
    yield table


def _reasons(rows: Sequence[tuple[str, str]]) -> Table:
    grid = Table.grid(padding=(0, 2), expand=True)
    grid.add_column(overflow="fold", max_width=46)
    grid.add_column(overflow="fold", ratio=1)
    for what, why in rows:
        grid.add_row(Text(visible(what)), Text(visible(why)))
    return grid


def _title(what: str, *, style: str = "italic") -> Text:
    return Text(f"\n{what}", style=style)


def _table() -> Table:
    return Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)


def _some(names: Sequence[str], *, most: int) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _clock(unix_s: float, now_s: float) -> str:
    """Return a time of today, or a day and a time."""
    then = datetime.fromtimestamp(unix_s).astimezone()
    same_day = then.date() == datetime.fromtimestamp(now_s).astimezone().date()
    return then.strftime("%H:%M:%S" if same_day else "%b %d %H:%M")


def _age(seconds: float) -> str:
    if seconds < 100:
        return f"{max(0.0, seconds):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6_000 else f"{seconds / 3600:.0f} h"

"""Figures of a run as words: one line while it runs, a table at its end."""

from collections.abc import Mapping

from rich.console import RenderableType
from rich.table import Table

from slipstream.wire.messages.status import RunStatus

_NEWEST_STEPS = 20  # steps that predict the time of a step
MEMBER_COLORS = {  # colors by state of an engine on the weight bus
    "current": "green",
    "behind": "yellow",
    "receiving": "cyan",
    "torn": "bold red",
}


def one_line(status: RunStatus) -> str:
    """Return the state of a run as one line, for output that is not a terminal."""
    reward = last_figure(status, "reward/sampled")
    parts = [
        f"step {status.steps}/{status.total_steps}",
        f"reward {reward:.3f}" if reward is not None else "reward -",
        f"eval {status.eval[-1].mean:.3f}" if status.eval else "eval -",
        f"staleness {counts(status.staleness_histogram) or '-'}",
        f"tokens/s {rates(status.tokens_per_second) or '-'}",
        f"ready {status.in_flight.get('ready', 0)}",
        f"publishes {status.publishes}",
        f"dropped {counts(status.dropped) or 0}",
    ]
    if beginning := startup_wait(status):
        parts.append(f"the run waits for {beginning}")
    elif status.waiting_for:
        parts.append(f"learner waits for {status.waiting_for}")
    if left := time_left(status):
        parts.append(left)
    return ", ".join(parts)


def time_left(status: RunStatus) -> str:
    """Describe how long the other steps take if each does as long as the newest; or empty."""
    newest, todo = status.steps_history[-_NEWEST_STEPS:], status.total_steps - status.steps
    if len(newest) < 2 or todo <= 0:
        return ""
    each_s = (newest[-1].at_s - newest[0].at_s) / (len(newest) - 1)
    return f"about {age(todo * each_s)} to go"


def startup_wait(status: RunStatus) -> str:
    """Describe the wait before a run's first group; empty afterwards."""
    if status.issued or status.stop_reason:
        return ""
    generators = [role for role in status.roles if role.role == "generator"]
    waits = []
    if not any(role.role == "learner" for role in status.roles):
        waits.append("the learner (it loads its model)")
    if not generators:
        waits.append("a generator (its engine starts)")
    elif not any(role.adopted for role in generators):
        known = f"0 of {len(generators)} have them" if len(generators) > 1 else "it starts"
        waits.append(f"an engine with the first weights ({known})")
    return " and ".join(waits)


def final_table(status: RunStatus, *, outcome: str) -> RenderableType:
    """Return the outcome of a run as a table."""
    s = status
    table = Table(title=f"run {s.run_name}: {outcome}", title_justify="left")
    table.add_column("figure")
    table.add_column("value")
    for point in s.eval:
        table.add_row(f"evaluation at step {point.step}", scores(point.overall.metrics))
    if s.eval and len(s.eval[-1].by_source) > 1:
        for source, figures in s.eval[-1].by_source.items():
            table.add_row(f"  of {source}", scores(figures.metrics))
    table.add_row("learner steps", f"{s.steps} of {s.total_steps}")
    table.add_row("groups", equation(s))
    table.add_row("dropped by reason", counts(s.dropped) or "none")
    table.add_row("trained tokens by staleness", counts(s.staleness_histogram))
    table.add_row(
        "publishes", f"{s.publishes}, {s.publishes_while_generating} of them while generating"
    )
    table.add_row("tokens per second", rates(s.tokens_per_second))
    table.add_row("busy", ", ".join(f"{r} {share:.0%}" for r, share in s.busy.items()))
    table.add_row("elapsed", f"{s.elapsed_s:.0f} s")
    return table


def equation(status: RunStatus) -> str:
    """Return the account of all groups, and the number missing from it."""
    in_flight = sum(status.in_flight.values())
    dropped = sum(status.dropped.values())
    text = (
        f"{status.issued} issued = {status.trained} trained + {dropped} dropped "
        f"+ {in_flight} in flight"
    )
    return text + (f"; {status.unaccounted} UNACCOUNTED FOR" if status.unaccounted else "")


def scores(metrics: Mapping[str, float]) -> str:
    """Return the results of an evaluation as one line."""
    shown = {name: value for name, value in metrics.items() if "@" in name}
    return ", ".join(f"{name} {value:.3f}" for name, value in shown.items()) or "no answers"


def last_figure(status: RunStatus, name: str) -> float | None:
    """Return a figure of the newest learner step."""
    return status.steps_history[-1].metrics.get(name) if status.steps_history else None


def age(seconds: float) -> str:
    """Return a time in the largest unit that it holds at least two of."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7_200 else f"{seconds / 3_600:.1f} h"


def number(value: float | None, digits: int = 3) -> str:
    """Return a figure as text; an unknown one is a dash."""
    return "-" if value is None else f"{value:.{digits}f}"


def counts(of: Mapping[str, int]) -> str:
    """Return counts by name as one line."""
    return ", ".join(f"{name}: {count}" for name, count in of.items())


def nonzero(of: Mapping[str, int]) -> str:
    """Return counts by name as one line, without those that are 0."""
    return counts({name: count for name, count in of.items() if count})


def rates(of: Mapping[str, float]) -> str:
    """Return rates by name as one line."""
    return ", ".join(f"{name} {rate:.0f}" for name, rate in of.items())

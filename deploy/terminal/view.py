"""What a person sees in the terminal: one live view, and a table at the end."""

from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from slipstream.wire.messages.status import RunStatus

_BAR_WIDTH = 24


def live_view(status: RunStatus, dashboard: str) -> RenderableType:
    """Return the state of a run as one screen."""
    return Group(
        _progress(status),
        Panel(_learning(status), title="learning", title_align="left"),
        Panel(_roles(status), title="roles", title_align="left"),
        Panel(_staleness(status), title="staleness of trained tokens", title_align="left"),
        Panel(_flow(status), title="flow", title_align="left"),
        Text(f"dashboard {dashboard}", style="dim"),
    )


def one_line(status: RunStatus) -> str:
    """Return the state of a run as one line, for terminals that are files."""
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
    return ", ".join(parts)


def startup_wait(status: RunStatus) -> str:
    """Return what a run waits for before its first group; empty afterwards."""
    if status.issued or status.stop_reason:
        return ""
    generators = [role for role in status.roles if role.role == "generator"]
    waits = []
    if not any(role.role == "learner" for role in status.roles):
        waits.append("the learner (it loads its model)")
    if not generators:
        waits.append("a generator (its engine starts)")
    elif not any(role.adopted for role in generators):
        waits.append("an engine with the first weights")
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


def _progress(status: RunStatus) -> RenderableType:
    grid = Table.grid(padding=(0, 1))
    bar = ProgressBar(total=status.total_steps, completed=status.steps, width=_BAR_WIDTH)
    text = (
        f"{status.run_name}: step {status.steps} of {status.total_steps}, {status.elapsed_s:.0f} s"
    )
    grid.add_row(Text(text, style="bold"), bar)
    return grid


def _learning(status: RunStatus) -> RenderableType:
    grid = Table.grid(padding=(0, 3))
    evaluations = ", ".join(f"{p.step}: {p.mean:.3f}" for p in status.eval[-6:])
    rows = {
        "evaluation by step": evaluations or "-",
        **_by_source(status),
        "reward of sampled answers": number(last_figure(status, "reward/sampled")),
        "reward of trained answers": number(last_figure(status, "reward/mean")),
        "entropy": number(last_figure(status, "policy/entropy")),
        "mismatch KL": number(last_figure(status, "staleness/mismatch_kl"), 5),
        "seconds per step": number(last_figure(status, "time/step"), 2),
    }
    for name, value in rows.items():
        grid.add_row(Text(name, style="dim"), value)
    return grid


def _roles(status: RunStatus) -> RenderableType:
    table = Table(box=None, pad_edge=False)
    for title in ("process", "busy", "tokens/s", "weights", "leases", "time by phase"):
        table.add_column(title)
    for role in status.roles:
        phases = ", ".join(f"{name} {s:.0f} s" for name, s in role.phase_seconds.items())
        table.add_row(
            role.name,
            f"{role.busy:.0%}",
            f"{role.tokens_per_second:.0f}",
            role.adopted.label if role.adopted else "-",
            str(role.leases),
            phases,
        )
    return table


def _staleness(status: RunStatus) -> RenderableType:
    grid = Table.grid(padding=(0, 1))
    total = sum(status.staleness_histogram.values()) or 1
    for lag in range(status.max_staleness_steps + 1):
        tokens = status.staleness_histogram.get(str(lag), 0)
        bar = ProgressBar(total=total, completed=tokens, width=_BAR_WIDTH)
        grid.add_row(f"{lag} step{'' if lag == 1 else 's'}", bar, f"{tokens / total:.0%}")
    return grid


def _flow(status: RunStatus) -> RenderableType:
    grid = Table.grid(padding=(0, 3))
    publishes = f"{status.publishes}, {status.publishes_while_generating} while generating"
    rows = {
        "groups": equation(status),
        "in flight": counts(status.in_flight),
        "dropped": counts(status.dropped) or "none",
        "length of answers": lengths(status),
        "waiting for a reward": str(status.queue.get("waiting_for_reward", 0)),
        "publishes": publishes,
    }
    if beginning := startup_wait(status):
        rows["the run waits for"] = beginning
    else:
        rows["learner waits for"] = status.waiting_for or "nothing"
    for name, value in rows.items():
        grid.add_row(Text(name, style="dim"), value)
    return grid


def equation(status: RunStatus) -> str:
    """Return the account of all groups, and what is missing from it."""
    in_flight = sum(status.in_flight.values())
    dropped = sum(status.dropped.values())
    text = (
        f"{status.issued} issued = {status.trained} trained + {dropped} dropped "
        f"+ {in_flight} in flight"
    )
    return text + (f"; {status.unaccounted} UNACCOUNTED FOR" if status.unaccounted else "")


def lengths(status: RunStatus) -> str:
    """Return whether long answers are trained as often as short ones."""
    meter = status.survivorship
    if not meter.quartiles:
        return "-"
    text = f"{meter.generated_mean:.0f} generated, {meter.trained_mean:.0f} trained"
    shares = ", ".join(f"{q.dropped_share:.0%}" for q in meter.quartiles)
    text += f"; dropped for their age, shortest to longest quarter: {shares}"
    return f"{text}; {meter.alarm}" if meter.alarm else text


def _by_source(status: RunStatus) -> dict[str, str]:
    if not status.eval or len(status.eval[-1].by_source) < 2:
        return {}
    newest = status.eval[-1].by_source
    return {f"  {source}": scores(figures.metrics) for source, figures in newest.items()}


def scores(metrics: Mapping[str, float]) -> str:
    """Return what an evaluation measured as one line."""
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
    """Return a figure as text; one that is not known is a dash."""
    return "-" if value is None else f"{value:.{digits}f}"


def counts(of: Mapping[str, int]) -> str:
    """Return counts by name as one line."""
    return ", ".join(f"{name}: {count}" for name, count in of.items())


def rates(of: Mapping[str, float]) -> str:
    """Return rates by name as one line."""
    return ", ".join(f"{name} {rate:.0f}" for name, rate in of.items())

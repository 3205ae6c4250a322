"""The state of a run as lines of text: drawn by `slipstream run` and `top`."""

import re
import textwrap
import time

from rich.console import Console, Group
from rich.text import Text

from slipstream.deploy.terminal.figures import (
    MEMBER_COLORS,
    age,
    equation,
    last_figure,
    nonzero,
    number,
    rates,
    scores,
    startup_wait,
    time_left,
)
from slipstream.deploy.terminal.layout import TITLE, Block, Screen, fit, flow
from slipstream.deploy.terminal.recent import Recent
from slipstream.wire.messages.status import GONE_S, SILENT_S, RoleStatus, RunStatus
from slipstream.wire.process.safe_text import visible

_COLORS = {"error": "bold red", "warning": "yellow", "info": "cyan"}
_BARS = 4  # bars of staleness on a low screen
_HIGH = 32  # lines
_NEWS = 5  # lines of one message
ALL = 10_000  # lines: nothing is cut
_WIDE = 110  # columns needed for phases
_BY_LAG = (  # figure of a learner step, its label, digits
    ("staleness/mismatch_kl", "mismatch KL", 5),
    ("staleness/ess", "ESS", 3),
    ("policy/clip_fraction", "clipped", 4),
)
_ALWAYS = ("ready_groups", "waiting_for_reward", "dead_letters")
_ORDER = {"learner": 0, "generator": 1, "reward_worker": 2, "relay": 3, "broker": 4}


def draw(
    status: RunStatus,
    recent: Recent,
    console: Console,
    *,
    height: int,
    trouble: str = "",
    footer: str = "",
) -> Group:
    """Return the state of a run for a console, in at most ``height`` lines."""
    is_plain = not console.encoding.lower().startswith("utf")
    lines = lines_of(
        status,
        recent,
        Screen(console.width, height, plain=is_plain),
        trouble=trouble,
        footer=footer,
        now_s=time.time(),
    )
    return Group(*lines)


def lines_of(
    status: RunStatus,
    recent: Recent,
    screen: Screen,
    *,
    trouble: str = "",
    footer: str = "",
    now_s: float,
) -> list[Text]:
    """Return the lines to show; they fit the screen.

    ``trouble`` is why the state is old. A footer that is too long takes several lines.
    """
    head = _head(status, trouble, screen)
    advice: list[Text] = []
    for advisory in recent.advisories():
        wrapped = textwrap.wrap(visible(advisory.text), screen.width - TITLE - 2)
        marks = ("! ", *("  " for _ in wrapped[1:]))
        style = _COLORS[advisory.level]
        advice += [Text(m + part, style=style) for m, part in zip(marks, wrapped, strict=True)]
    staleness, correction = _staleness(status, screen)
    processes, phases = _pools(status, recent, screen)
    blocks = [
        Block("advice", advice, 0, 2, 5),
        Block("learning", _learning(status, recent, screen), 1, 1, 2),
        Block("pools", processes, 2, 3, 5),
        Block("phases", phases, 8, 1, 1),
        Block("staleness", staleness, 4, 1, 3),
        Block("correction", correction, 7, 1, 1),
        Block("groups", _groups(status), 3, 1, 2),
        Block("queues", _queues(status, screen), 5, 1, 1),
        Block("weights", _weights(status, now_s, screen), 6, 1, 2),
    ]
    end = [
        Text(line, style="dim")
        for line in textwrap.wrap(footer, screen.width, break_on_hyphens=False)
    ]
    room = screen.height - len(head) - len(end)
    body = fit([block for block in blocks if block.lines], room)
    space = [Text()] if end and len(body) < room else []
    lines = [*head, *body, *space, *end][: screen.height]
    for line in lines:
        line.no_wrap = True
        line.truncate(screen.width, overflow="crop" if screen.plain else "ellipsis")
    return lines


def _head(status: RunStatus, trouble: str, screen: Screen) -> list[Text]:
    """Return the progress, and the most important messages."""
    share = status.steps / status.total_steps if status.total_steps else 0.0
    left = f", {left}" if (left := time_left(status)) else ""
    headline = Text.assemble(
        (f"{visible(status.run_name)[:30]}  step {status.steps} of {status.total_steps}  ", "bold"),
        screen.bar(share, max(5, min(40, screen.width - 60)), "green"),
        f" {share:.0%}  {age(status.elapsed_s)}{left}",
    )
    news = [(trouble, "bold red")]
    if status.unaccounted:
        news.append((f"groups UNACCOUNTED FOR: {status.unaccounted}", "bold red"))
    if status.outcome != "running":
        news.append((f"the run has ended: {visible(status.outcome)}", "bold"))
    else:
        if status.stop_reason:
            news.append((f"the run ends because {visible(status.stop_reason)}", "yellow"))
        if startup := startup_wait(status):
            news.append((f"the run waits for {startup}", "cyan"))
        elif status.waiting_for:
            news.append((f"the learner waits for {visible(status.waiting_for)}", "cyan"))
    wrapped = ((textwrap.wrap(text, screen.width)[:_NEWS], style) for text, style in news)
    return [headline, *(Text(part, style) for parts, style in wrapped for part in parts)]


# ---- blocks ------------------------------------------------------------------


def _learning(status: RunStatus, recent: Recent, screen: Screen) -> list[Text]:
    figures = {
        "reward": number(last_figure(status, "reward/sampled")),
        "trained reward": number(last_figure(status, "reward/mean")),
        "eval": f"{status.eval[-1].mean:.3f} at {status.eval[-1].step}" if status.eval else "-",
        "entropy": number(last_figure(status, "policy/entropy")),
        "KL": number(last_figure(status, "staleness/mismatch_kl"), 5),
        "ESS": number(last_figure(status, "staleness/ess")),
        "tokens": number(last_figure(status, "response/tokens"), 0),
        "s/step": number(last_figure(status, "time/step"), 2),
    }
    entries = (Text.assemble((f"{name} ", "dim"), f"{value}  ") for name, value in figures.items())
    lines = flow(entries, screen.width - TITLE)
    width = max(10, screen.width - TITLE - 30)
    for name, title in (("reward/sampled", "reward"), ("policy/entropy", "entropy")):
        if len(values := recent.curve(name)) > 1:
            low, high = min(values), max(values)
            curve = screen.spark(values, width)
            lines.append(Text(f"{title:8}{curve} {low:.3g} to {high:.3g}"))
    if len(status.eval) > 1:
        points = ", ".join(f"{point.step}: {point.mean:.3f}" for point in status.eval[-8:])
        lines.append(Text(f"eval by step {points}"))
    if status.eval and len(status.eval[-1].by_source) > 1:
        lines += [
            Text(f"eval of {visible(source)}: {scores(figures.metrics)}")
            for source, figures in status.eval[-1].by_source.items()
        ]
    return lines


def _pools(status: RunStatus, recent: Recent, screen: Screen) -> tuple[list[Text], list[Text]]:
    """Return a line per process, and below them its engine's answers and its time by phase.

    Processes in trouble come first in their kind. If all details fit on lines, nothing is below.
    """
    roles = [role for role in status.roles if role.phase_seconds or role.role in _ORDER]
    roles.sort(
        key=lambda role: (
            *(_ORDER.get(role.role, 9), role.silent_s < SILENT_S),
            _natural(role.name),
        )
    )
    room = screen.width - TITLE
    width = max(8, min(20, room - 57))
    lines, details = [], []
    for role in roles:
        name = f"{visible(role.name)[:16]:16} "
        busy = recent.busy(role.name)
        share = role.busy if busy is None else busy
        is_silent = role.silent_s >= SILENT_S  # its activity is not known
        if is_silent or not role.phase_seconds:
            line = Text.assemble(name, screen.bar(0.0, width), "    - ")
        else:
            bar = screen.bar(share, width, "green" if share >= 0.75 else "yellow")
            line = Text.assemble(name, bar, f" {share:4.0%} ")
        if is_silent:
            style = "bold red" if role.silent_s >= GONE_S else "yellow"
            line.append(f"silent for {age(role.silent_s)}", style)
        else:
            line.append(f"{role.tokens_per_second:7.0f} t/s mean ")
            line.append(f"{role.adopted.label if role.adopted else '':7}")
            line.append(f"{role.leases:3} leases" if role.leases else " " * 10)
        lines.append(line)
        details.append((name, _details(role)))
    below: list[Text] = []
    if all(
        len(line) + 2 + len(text) <= room for line, (_, text) in zip(lines, details, strict=True)
    ):
        for line, (_, text) in zip(lines, details, strict=True):
            line.append(f"  {text}", style="dim")
    else:
        for name, text in details:
            wrapped = textwrap.wrap(text, max(20, room - len(name)))
            names = (name, *(" " * len(name) for _ in wrapped[1:]))
            below += [
                Text.assemble(n, (part, "dim")) for n, part in zip(names, wrapped, strict=False)
            ]
    for line in lines:
        line.rstrip()
    if status.tokens_per_second:
        lines.append(Text(f"tokens/s  {rates(status.tokens_per_second)} over the run"))
    return lines, below


def _details(role: RoleStatus) -> str:
    """Return the number of answers in a process's engine, and the process's time by phase."""
    parts = []
    if role.sequence_limit:
        cache = "" if role.kv_use is None else f", {role.kv_use:.0%} of the cache"
        parts.append(f"{role.sequences} of {role.sequence_limit} answers{cache}")
    if total := sum(role.phase_seconds.values()):
        shown = {name: s / total for name, s in role.phase_seconds.items() if s >= total / 100}
        phases = ", ".join(f"{visible(name)} {share:.0%}" for name, share in shown.items())
        parts.append(f"{phases} of {age(total)}")
    return "; ".join(parts)


def _natural(name: str) -> list[tuple[int, str]]:
    """Order generator-2 before generator-10."""
    parts = re.split(r"(\d+)", name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def _staleness(status: RunStatus, screen: Screen) -> tuple[list[Text], list[Text]]:
    """Return the staleness of the trained tokens, and the effect of the newest correction."""
    lags = range(status.max_staleness_steps + 1)
    metrics = status.steps_history[-1].metrics if status.steps_history else {}
    correction = []
    for name, title, digits in _BY_LAG:
        found = ((lag, metrics.get(f"{name}@lag{lag}")) for lag in lags)
        entries = [f"lag {lag} {value:.{digits}f}" for lag, value in found if value is not None]
        if entries:
            correction.append(Text(f"{title:13}{'  '.join(entries)}"))
    total = sum(status.staleness_histogram.values())
    if not total:
        return [], correction
    shares = [status.staleness_histogram.get(str(lag), 0) / total for lag in lags]
    lines: list[Text] = []
    if len(lags) > _BARS and screen.height < _HIGH:
        parts = [Text(f"{lag}: {share:.0%}  ") for lag, share in enumerate(shares)]
        lines += flow([*parts, Text("of trained tokens")], screen.width - TITLE)
    else:
        width = max(8, min(40, screen.width - 50))
        for lag, share in enumerate(shares):
            is_last = lag == status.max_staleness_steps
            bar = screen.bar(share, width, "yellow" if is_last else "green")
            steps = f"{lag} step{'' if lag == 1 else 's'}"
            lines.append(Text.assemble(f"{steps:9}", bar, f" {share:4.0%} of trained tokens"))
    if (held := status.throttle) is not None:
        why = f"; {held.changes[-1].reason}" if held.changes else ""
        text = visible(
            f"target {held.target}: bound in force {held.bound} of {status.max_staleness_steps}, "
            f"at most {held.in_flight} of {held.most_in_flight} groups under way{why}"
        )
        lines += map(Text, textwrap.wrap(text, screen.width - TITLE))
    meter = status.survivorship
    if meter.quartiles:  # whether long answers are trained as often as short ones
        means = f"{meter.generated_mean:.0f} generated, {meter.trained_mean:.0f} trained"
        quarters = ", ".join(f"{quartile.dropped_share:.0%}" for quartile in meter.quartiles)
        dropped = f"dropped for their age, shortest to longest quarter: {quarters}"
        lines.append(Text(f"tokens of an answer: {means}"))
        text = visible(f"{dropped}; {meter.alarm}" if meter.alarm else dropped)
        lines += map(Text, textwrap.wrap(text, screen.width - TITLE))
    return lines, correction


def _groups(status: RunStatus) -> list[Text]:
    lines = [
        Text(equation(status), style="bold red" if status.unaccounted else ""),
        Text(f"dropped {nonzero(status.dropped) or 'none'}"),
        Text(f"in flight {nonzero(status.in_flight) or 'none'}; {status.sealed} sealed"),
    ]
    ready = nonzero({f"lag {lag}": count for lag, count in status.lags_in_queue.items()})
    if ready:  # present age of groups that wait for the learner
        oldest = age(status.queue_age_s) if status.queue_age_s is not None else "-"
        lines.append(Text(f"ready, the oldest for {oldest}: {ready}"))
    return lines


def _queues(status: RunStatus, screen: Screen) -> list[Text]:
    entries = []
    for name, count in sorted(status.queue.items(), key=lambda pair: pair[0] not in _ALWAYS):
        is_bad = count > 0 and name.startswith(("dead", "lapsed", "rejected"))
        if count or name in _ALWAYS:
            title = (f"{name.replace('_', ' ')} ", "dim")
            entries.append(Text.assemble(title, (f"{count}  ", "yellow" if is_bad else "")))
    for name, num_bytes in status.memory.items():
        title = (f"{name.removesuffix('_bytes').replace('rss', 'broker')} ", "dim")
        entries.append(Text.assemble(title, f"{num_bytes / 2**20:.0f} MiB  "))
    return flow(entries, screen.width - TITLE)


def _weights(status: RunStatus, now_s: float, screen: Screen) -> list[Text]:
    """Return the newest publish, and each engine's version, outdated ones first."""
    while_generating = f"{status.publishes_while_generating} while generating"
    publish = Text(f"{status.publishes} publishes, {while_generating}")
    if status.quarantines:
        publish.append(f", {status.quarantines} engines quarantined", "red")
    if status.publish_history:
        record = status.publish_history[-1]
        slowest = max(record.adopted_by.values(), default=0.0)
        publish.append(f"; {record.version.label} in {slowest:.2f} s to {len(record.adopted_by)}")
        if record.failed:
            publish.append(f", {len(record.failed)} left out", style="bold red")
        if screen.width >= _WIDE:
            phases = ", ".join(f"{visible(p)} {s:.3f}" for p, s in record.phase_seconds.items())
            publish.append(f": {phases}", style="dim")
    members = sorted(
        status.members, key=lambda member: (member.state == "current", _natural(member.name))
    )
    held = [
        Text.assemble(
            f"{visible(member.name)[:16]:16} ",
            (f"{member.state:10}", MEMBER_COLORS[member.state]),
            f"{member.version.label if member.version else 'none':8}",
            f"{member.transport:11}",
            f"for {age(max(0.0, now_s - member.since_s))}",
            (f"  {visible(member.reason)}" if member.reason else "", "yellow"),
        )
        for member in members
    ]
    return [publish, *held]

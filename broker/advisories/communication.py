"""Rules about publishes, engines, lost work. Pure."""

from slipstream.broker.advisories.view import NUM_WINDOWS, Finding, Level, Rules, RunView, reading
from slipstream.wire.messages.weightbus import PublishRecord

PAUSED = 0.2  # share of the engines' time: a fifth of the generation is lost
PUBLISHES = 5  # before their share means anything
LEFT_OUT = 2  # once may be a restart
LEFT_OUT_OF = 5  # publishes
QUARANTINED_OF = 20  # publishes
REASON_CHARS = 120
LETTERS = 3.0  # in a window: one or two are bad rows
LETTERS_ERROR = 0.1  # share of the issued groups: no longer single rows but the reward function
PAUSED_PHASES = ("pause", "transfer", "load", "verify", "commit")  # an engine does not generate

RULES = Rules()


@RULES.add
def _engine_left_out(view: RunView) -> Finding | None:
    records = view.status.publish_history[-LEFT_OUT_OF:]
    if not records or not records[-1].failed:
        return None
    times = {name: sum(name in record.failed for record in records) for name in records[-1].failed}
    name = max(times, key=lambda member: (times[member], member))
    if times[name] < LEFT_OUT:
        return None
    others = len(times) - 1
    who = f"{name} and {others} more were" if others else f"{name} was"
    whose = "their" if others else "its"
    return Finding(
        f"{who} left out of {times[name]} of the last {len(records)} publishes "
        f"({records[-1].failed[name][:REASON_CHARS].rstrip('.')}): {whose} weights are "
        "old or not whole; the page shows since when; for slow engines raise "
        "weightbus.timeout_s.",
        "weightbus.timeout_s",
        "error",
    )


@RULES.add
def _engine_quarantined(view: RunView) -> Finding | None:
    held = [
        (record.version.label, name, reason)
        for record in view.status.publish_history[-QUARANTINED_OF:]
        for name, reason in sorted(record.quarantined.items())
    ]
    if not held:
        return None
    label, name, why = held[-1]
    return Finding(
        f"{name} was quarantined at {label} ({why[:REASON_CHARS].rstrip('.')}), one of "
        f"{view.status.quarantines} times in this run: it was started again, its work went to "
        "others; if it happens again its SGLang settings or kernels compute something else than "
        "the learner (slipstream align), or noise is larger than weightbus.probe_limit.",
        "weightbus.probe_limit",
        "error",
    )


@RULES.add
def _publishes_dominating(view: RunView) -> Finding | None:
    records = view.status.publish_history

    def measure(end: int) -> float | None:
        newest_s = records[end - 1].at_s
        recent = [record for record in records[:end] if record.at_s > newest_s - view.window_s]
        spent_s = newest_s - recent[0].at_s
        if len(recent) <= PUBLISHES or spent_s < view.window_s / 2:
            return None
        return min(1.0, sum(map(_paused_s, recent[:-1])) / spent_s)

    window_ends = range(len(records), max(0, len(records) - NUM_WINDOWS), -1)
    if (share := reading(measure, window_ends, PAUSED)) is None:
        return None
    seconds = _paused_s(records[-1])
    text = (
        f"Publishes paused the slowest engine for {share:.0%} of {view.lately}, {seconds:.2g} s "
        "at the last one: compare engines less often (weightbus.engine_check_every), "
        "load versions received before (weightbus.transport = tcp), or train more per step "
        "(run.groups_per_step)."
    )
    crowded = view.crowded
    level: Level = "info" if crowded else "warning"
    return Finding(text + crowded, "weightbus.engine_check_every", level)


def _paused_s(record: PublishRecord) -> float:
    return sum(record.phase_seconds.get(phase, 0.0) for phase in PAUSED_PHASES)


@RULES.add
def _dead_letters_growing(view: RunView) -> Finding | None:
    def measure(end: int) -> float:
        return view.growth("queue:dead_letters", end)

    if (grown := view.reading(measure, LETTERS)) is None:
        return None
    issued = view.growth("issued", view.window_ends[0])
    share = grown / issued if issued else 1.0
    text = (
        f"{grown:.0f} groups became dead letters in {view.lately}, {min(share, 1.0):.0%} of those "
        "issued: see slipstream dead-letters list, fix the cause "
        "(reward.function, reward.timeout_s), then retry them."
    )
    level: Level = "error" if share >= LETTERS_ERROR else "warning"
    return Finding(text, "reward.timeout_s", level)


@RULES.add
def _fsync_too_weak(view: RunView) -> Finding | None:
    fsync = view.history.fsync
    if fsync in {"", "always"}:
        return None
    lost = "the last second" if fsync == "everysec" else "the last half minute"
    text = (
        f"The store is synced {fsync!r} (broker.redis.fsync): a power failure takes about {lost} "
        "of work that was acknowledged; set it to always."
    )
    return Finding(text, "broker.redis.fsync")

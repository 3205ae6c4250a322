"""Plain sentences about a run: what is wrong, by how much, and which setting changes it.

Pure: a state of the run and the newest history in, sentences out. A rule speaks once its measure,
taken over a window, passed the rule's limit lately, and until the measure is a fifth below that;
before its window is full it is silent. Each rule has a section of its name in
docs/operations.md.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import StatisticsError, correlation, fmean, pstdev
from typing import Literal, TypeAlias

import msgspec

from slipstream.wire.messages.status import RoleStatus, RunStatus
from slipstream.wire.messages.weightbus import PublishRecord

Column: TypeAlias = Sequence[float | None]
Level: TypeAlias = Literal["info", "warning", "error"]
Measure: TypeAlias = Callable[[int], float | None]

WINDOW_S = 120.0  # long enough for a checkpoint or an evaluation to pass in it
WINDOW_STEPS = 5  # it doubles until so many learner steps fit: a pool waits within each step
WINDOW_ROWS = 5  # and so many rows of a history that has become coarse
FIGURE_STEPS = 10  # over which a figure of learner steps is averaged: single batches are noisy
LEARNING_STEPS = 30  # before a trend of a figure is judged
LOOKS = 5  # windows, the newest and earlier ones, of which one must have passed the limit
KEEPS = 0.8  # of its limit, under which a measure that had passed it counts as mended

WAITED = 0.25  # share of a pool's time: above what fetching and uneven answers cost
AT_BOUND = 0.85  # of the bound, as a mean: nearly every token is as old as it may be
REWARD_LOST = 1 / 3  # of the best: more than a harder stretch of the data costs
REWARD_NOISE = 2.0  # standard deviations of single steps that a loss must exceed
FLAT = 0.5  # share of the finished groups without a gradient: half of all generation for nothing
FLAT_STEPS = 2  # batches' worth of finished groups, before the share means anything
ENTROPY_LOST = 0.9  # of what it was at the beginning
ENTROPY_NATS = 0.1  # exp(0.1) = 1.1 tokens to choose from
KL_NATS = 0.02  # per token; 1 / (1 + 2 KL) of the sample is effective, so under 4% is lost below it
KL_RATIO = 2.0  # of the oldest lag against the newest: half of the mismatch comes from age
KL_CORRELATION = 0.6  # age explains a third of the variance
KL_STEPS = 20  # of a KL by lag; the correlation needs twice as many
KL_ROWS = 5  # with tokens of that lag among them
STALENESS_SPREAD = 0.1  # learner steps; a staleness that never changes correlates with nothing
PAUSED = 0.2  # share of the engines' time: a fifth of the generation is lost
PUBLISHES = 5  # before their share means anything
LEFT_OUT = 2  # once may be a restart
LEFT_OUT_OF = 5  # publishes
REASON_CHARS = 120
ANSWERS = 50  # before a share of them means anything
THRASHED = 0.05  # of the answers: each is computed again from its first token
LETTERS = 3.0  # in a window: one or two are bad rows
LETTERS_ERROR = 0.1  # of the issued groups: no longer single rows but the reward function
NEAR_FULL = 0.8  # of the high water: past it generation is held back


class Advisory(msgspec.Struct, frozen=True, kw_only=True):
    """One sentence about the run."""

    rule: str
    level: Level
    text: str
    setting: str  # that changes it first
    why: str  # the heading of docs/operations.md that explains it


class Trends(msgspec.Struct, frozen=True, kw_only=True):
    """The newest history of a run, as columns of equal length; names as the page has them."""

    at_s: Sequence[float]  # of the time rows, since the run started
    series: Mapping[str, Column]  # by time
    steps_at_s: Sequence[float]  # of the learner steps, since the run started
    steps: Mapping[str, Column]  # figures by learner step
    every_steps: int = 1  # how many learner steps a row of them is the mean of
    high_water_bytes: int = 0  # broker.high_water_bytes; 0 is not known
    fsync: str = ""  # how the store is synced: always, everysec, no; empty is not known


def is_ready(status: RunStatus, history: Trends) -> bool:
    """True if there is enough history for rules about time."""
    return _View.of(status, history).full


def advise(status: RunStatus, history: Trends) -> list[Advisory]:
    """Return the advisories about a run, the worst first."""
    view = _View.of(status, history)
    said = [advisory for rule in _RULES if (advisory := rule(view)) is not None]
    return sorted(said, key=lambda advisory: _LEVELS.index(advisory.level))


# ---- measures ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _View:
    """A run, and the window of rules over time."""

    status: RunStatus
    history: Trends
    first: int  # rows before it are from before the first learner step
    end: int  # rows from it on are from after the last learner step of all
    window_s: float
    full: bool  # enough rows and steps to fill a window

    @classmethod
    def of(cls, status: RunStatus, history: Trends) -> "_View":
        at_s, steps_at_s = history.at_s, history.steps_at_s
        if len(at_s) < WINDOW_ROWS or len(steps_at_s) <= WINDOW_STEPS:
            return cls(status, history, 0, 0, WINDOW_S, full=False)
        over = status.finished or status.steps >= status.total_steps
        first = bisect_left(at_s, steps_at_s[0])
        end = bisect_right(at_s, steps_at_s[-1]) if over else len(at_s)
        needed_s = max(
            steps_at_s[-1] - steps_at_s[-1 - WINDOW_STEPS], WINDOW_ROWS * (at_s[-1] - at_s[-2])
        )
        window_s = WINDOW_S
        while window_s < needed_s:
            window_s *= 2
        full = end > first and at_s[end - 1] - at_s[first] >= window_s
        return cls(status, history, first, end, window_s, full=full)

    @property
    def looks(self) -> list[int]:
        """Return where windows end, as numbers of rows: the newest, and earlier ones.

        The earlier ones end at times that do not move with the newest, so that one that passed a
        limit counts until it is a window old, and a measure about the limit does not flap.
        """
        if not self.full:
            return []
        at_s, apart_s = self.history.at_s, self.window_s / LOOKS
        newest = int(at_s[self.end - 1] / apart_s)
        ends = (bisect_right(at_s, (newest - i) * apart_s, hi=self.end) for i in range(LOOKS))
        earlier = (end for end in ends if end > self.first and self._start(end) >= self.first)
        return [self.end, *earlier]

    def _start(self, end: int) -> int:
        """Return the first row of the window that ends before row ``end``; -1 if it is cut off."""
        at_s = self.history.at_s
        start_s = at_s[end - 1] - self.window_s
        if start_s < at_s[self.first]:
            return -1
        return bisect_right(at_s, start_s, lo=self.first, hi=end) - 1

    def values(self, name: str, end: int) -> list[float]:
        """Return what is known of a series in the window that ends before row ``end``."""
        column = self.history.series.get(name, ())
        return [value for value in column[self._start(end) : end] if value is not None]

    def growth(self, name: str, end: int) -> float:
        """Return by how much a count grew in the window that ends before row ``end``."""
        values = self.values(name, end)
        return max(0.0, values[-1] - values[0]) if values else 0.0

    def waited(self, role: str) -> Measure:
        """Return how to measure the share of time that the processes of a role waited."""
        names = [f"busy:{one.name}" for one in self.status.roles if one.role == role]

        def measure(end: int) -> float | None:
            busy = [value for name in names for value in self.values(name, end)]
            return 1.0 - fmean(busy) if busy else None

        return measure

    def reading(self, measure: Measure, limit: float) -> float | None:
        """Return the newest value of a measure over time if a rule about it is to speak."""
        return _reading(measure, self.looks, limit)

    def stalled(self, name: str) -> list[float]:
        """Return what is known of a series since ``WINDOW_S`` ago if no step was done since.

        Empty if one was, or if the run is younger. Needs no step at all, unlike ``values``.
        """
        at_s, steps_at_s = self.history.at_s, self.history.steps_at_s
        if not at_s or self.status.finished or self.status.steps >= self.status.total_steps:
            return []
        since_s = at_s[-1] - WINDOW_S
        if at_s[0] > since_s or (steps_at_s and steps_at_s[-1] > since_s):
            return []
        column = self.history.series.get(name, ())
        return _known(column[bisect_left(at_s, since_s) :])

    @property
    def generators(self) -> list[RoleStatus]:
        """Return the generators that have weights."""
        roles = (one for one in self.status.roles if one.role == "generator")
        return [one for one in roles if one.adopted is not None]

    @property
    def lately(self) -> str:
        """Return the window in words."""
        return f"the last {duration(self.window_s)}"


def _reading(measure: Measure, looks: Sequence[int], limit: float) -> float | None:
    """Return the newest value if an earlier one passed the limit and it is still near it."""
    if not looks or (newest := measure(looks[0])) is None or newest < KEEPS * limit:
        return None
    values = (measure(end) for end in looks[1:])
    return newest if any(value is not None and value >= limit for value in values) else None


def duration(seconds: float) -> str:
    """Return a time in words, in its largest unit that leaves no less than two of it."""
    if seconds < 120:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 7_200 else f"{seconds / 3_600:.0f} hours"


def _known(column: Column) -> list[float]:
    return [value for value in column if value is not None]


def _step_looks(rows: int, needed: int) -> list[int]:
    """Return where windows of learner steps end: the newest, and one step earlier each."""
    return [end for end in range(rows, rows - LOOKS, -1) if end >= needed]


def _means(values: Sequence[float]) -> list[float]:
    """Return the mean of every ``FIGURE_STEPS`` values that follow each other."""
    sums = list(accumulate(values, initial=0.0))
    return [
        (sums[i + FIGURE_STEPS] - sums[i]) / FIGURE_STEPS
        for i in range(len(values) - FIGURE_STEPS + 1)
    ]


def _figure(column: Column, end: int, steps: int = FIGURE_STEPS) -> list[float]:
    return _known(column[max(0, end - steps) : end])


# ---- resources ---------------------------------------------------------------


def _learner_starved(view: _View) -> Advisory | None:
    waited = view.reading(view.waited("learner"), WAITED)
    if waited is None:
        return None
    said = f"The learner waited {waited:.0%} of {view.lately} for data"
    if backlog := _reward_backlog(view):
        setting = "reward.workers"
        todo = f"while {backlog:.0f} answers wait for a reward: add reward workers (reward.workers)"
    elif (generators := view.waited("generator")(view.looks[0]) or 0.0) >= WAITED:
        setting = "run.max_staleness_steps"
        todo = (
            f"and the generators {generators:.0%} of it for permits: the bound of "
            f"{view.status.max_staleness_steps} steps has them take turns; raise "
            "run.max_staleness_steps, or make answers more even (sampling.max_response_tokens)"
        )
    else:
        setting = "generators.count"
        todo = (
            f"while the generators were {1 - generators:.0%} busy: add generators "
            "(generators.count) or let each answer more at a time (generators.max_sequences)"
        )
    return _advisory("learner-starved", "warning", f"{said}, {todo}.", setting)


def _generators_starved(view: _View) -> Advisory | None:
    waited = view.reading(view.waited("generator"), WAITED)
    if waited is None:
        return None
    said = f"The generators waited {waited:.0%} of {view.lately} for permits"
    learner = view.waited("learner")(view.looks[0]) or 0.0
    if backlog := _reward_backlog(view):
        setting = "reward.workers"
        todo = f"while {backlog:.0f} answers wait for a reward: add reward workers (reward.workers)"
    elif learner >= WAITED:
        setting = "run.max_staleness_steps"
        todo = (
            f"and the learner {learner:.0%} of it for data: the bound of "
            f"{view.status.max_staleness_steps} steps has them take turns; raise "
            "run.max_staleness_steps"
        )
    else:
        setting = "learner.ranks"
        todo = (
            f"while the learner was {1 - learner:.0%} busy: make it faster (learner.ranks, "
            "learner.max_tokens_per_microbatch) or run fewer generators (generators.count)"
        )
    return _advisory("generators-starved", "warning", f"{said}, {todo}.", setting)


def _reward_backlog(view: _View) -> float:
    """Return how many answers wait for a reward if they are at least half a batch, else 0."""
    end, status = view.looks[0], view.status
    waiting = view.values("queue:waiting_for_reward", end)
    mean = fmean(waiting) if waiting else 0.0
    return mean if mean >= status.group_size * status.groups_per_step / 2 else 0.0


def _memory_near_the_high_water(view: _View) -> Advisory | None:
    limit = view.history.high_water_bytes
    if not limit:
        return None

    def measure(end: int) -> float | None:
        held = view.values("store_bytes", end)
        return fmean(held) / limit if held else None

    if (share := view.reading(measure, NEAR_FULL)) is None:
        return None
    text = (
        f"Untrained answers take {_gib(share * limit)}, {share:.0%} of broker.high_water_bytes "
        f"({_gib(limit)}): past it no more groups are started than one step needs; have fewer "
        "groups ahead (broker.max_in_flight) or raise broker.high_water_bytes."
    )
    return _advisory("memory-near-the-high-water", "warning", text, "broker.high_water_bytes")


def _gib(num_bytes: float) -> str:
    mib = num_bytes / 2**20
    return f"{mib / 1024:.1f} GiB" if mib >= 1024 else f"{mib:.0f} MiB"


# ---- a run without progress ----------------------------------------------------


def _engine_ahead_of_the_learner(view: _View) -> Advisory | None:
    ahead = {
        one.name: one.adopted.label
        for one in view.generators
        if one.adopted is not None and one.adopted.step > view.status.steps
    }
    if not ahead or not view.stalled("in_flight"):
        return None
    name, label = next(iter(sorted(ahead.items())))
    text = (
        f"{name} holds {label} and the learner is at step {view.status.steps}, where it has "
        f"stood for {duration(WINDOW_S)}: no learner of this run has made such weights, so it is "
        "given no work; end the run and resume with slipstream run --resume auto "
        "(run.resume_from)."
    )
    return _advisory("engine-ahead-of-the-learner", "error", text, "run.resume_from")


def _work_not_granted(view: _View) -> Advisory | None:
    in_flight, unscored = view.stalled("in_flight"), view.stalled("queue:eval_unscored")
    asking = [one for one in view.generators if not one.leases]
    if not in_flight or max(in_flight) or any(unscored) or not asking:
        return None
    if len(asking) < len(view.generators):
        return None  # held-out problems are under way
    runs = ", ".join(sorted({one.adopted.label for one in asking if one.adopted is not None}))
    text = (
        f"Nothing has been under way for {duration(WINDOW_S)}, and {len(asking)} generators with "
        f"{runs} get no work: the learner, at step {view.status.steps}, has not taken over, or "
        "its weights do not reach them; see the learner's log and slipstream versions, then go on "
        "with slipstream run --resume auto (run.resume_from)."
    )
    return _advisory("work-not-granted", "error", text, "run.resume_from")


def _evaluation_waits_for_rewards(view: _View) -> Advisory | None:
    unscored = view.stalled("queue:eval_unscored")
    if not unscored or not unscored[0] or any(b < a for a, b in pairwise(unscored)):
        return None
    text = (
        f"{unscored[-1]:.0f} held-out answers wait for a reward and none has got one for "
        f"{duration(WINDOW_S)}; no more are asked for than the memory bounds allow: see "
        "the logs of reward workers, and start more of them (reward.workers) or mend what they "
        "wait for (reward.function, reward.timeout_s)."
    )
    return _advisory("evaluation-waits-for-rewards", "warning", text, "reward.workers")


# ---- communication -----------------------------------------------------------

PAUSED_PHASES = ("pause", "transfer", "load", "verify", "commit")  # an engine does not generate


def _publishes_dominating(view: _View) -> Advisory | None:
    records = view.status.publish_history

    def measure(end: int) -> float | None:
        return _paused_share(records[:end], view.window_s)

    looks = range(len(records), max(0, len(records) - LOOKS), -1)
    if (share := _reading(measure, looks, PAUSED)) is None:
        return None
    seconds = _paused_s(records[-1])
    text = (
        f"Publishes paused the slowest engine for {share:.0%} of {view.lately}, {seconds:.2g} s "
        "at the last one: compare engines less often (weightbus.engine_check_every), "
        "load what was received before (weightbus.transport = tcp), or train more per step "
        "(run.groups_per_step)."
    )
    return _advisory("publishes-dominating", "warning", text, "weightbus.engine_check_every")


def _paused_share(records: Sequence[PublishRecord], window_s: float) -> float | None:
    """Return the share of the time between the newest publishes that the slowest engine paused."""
    if not records:
        return None
    newest_s = records[-1].at_s
    recent = [record for record in records if record.at_s > newest_s - window_s]
    spent_s = newest_s - recent[0].at_s
    if len(recent) <= PUBLISHES or spent_s < window_s / 2:
        return None
    return min(1.0, sum(map(_paused_s, recent[:-1])) / spent_s)


def _paused_s(record: PublishRecord) -> float:
    return sum(record.phase_seconds.get(phase, 0.0) for phase in PAUSED_PHASES)


def _kv_thrashing(view: _View) -> Advisory | None:
    def measure(end: int) -> float | None:
        answers = view.growth("answers", end)
        return view.growth("retracted", end) / answers if answers >= ANSWERS else None

    if (thrown := view.reading(measure, THRASHED)) is None:
        return None
    limit = max((one.sequence_limit for one in view.generators), default=0)
    under_way = f", with up to {limit} under way in an engine now" if limit else ""
    return _advisory(
        "kv-thrashing",
        "warning",
        f"Engines threw {thrown:.0%} of the answers of {view.lately} out of their cache and "
        f"computed them again{under_way}: give the cache more room (generators.max_cached_tokens, "
        "generators.sglang.mem_fraction_static) or let fewer be under way "
        '(generators.max_sequences, generators.concurrency = "adaptive").',
        "generators.max_sequences",
    )


def _engine_left_out(view: _View) -> Advisory | None:
    records = view.status.publish_history[-LEFT_OUT_OF:]
    if not records or not records[-1].failed:
        return None
    times = {name: sum(name in record.failed for record in records) for name in records[-1].failed}
    name = max(times, key=lambda one: (times[one], one))
    if times[name] < LEFT_OUT:
        return None
    others = len(times) - 1
    who = f"{name} and {others} more were" if others else f"{name} was"
    whose = "their" if others else "its"
    return _advisory(
        "engine-left-out",
        "error",
        f"{who} left out of {times[name]} of the last {len(records)} publishes "
        f"({records[-1].failed[name][:REASON_CHARS].rstrip('.')}): {whose} weights are "
        "old or not whole; slipstream versions shows since when; for slow engines raise "
        "weightbus.timeout_s.",
        "weightbus.timeout_s",
    )


def _dead_letters_growing(view: _View) -> Advisory | None:
    def measure(end: int) -> float:
        return view.growth("queue:dead_letters", end)

    if (grown := view.reading(measure, LETTERS)) is None:
        return None
    issued = view.growth("issued", view.looks[0])
    share = grown / issued if issued else 1.0
    text = (
        f"{grown:.0f} groups became dead letters in {view.lately}, {min(share, 1.0):.0%} of those "
        "issued: see slipstream dead-letters list, fix what fails "
        "(reward.function, reward.timeout_s), then retry them."
    )
    level: Level = "error" if share >= LETTERS_ERROR else "warning"
    return _advisory("dead-letters-growing", level, text, "reward.timeout_s")


def _fsync_too_weak(view: _View) -> Advisory | None:
    fsync = view.history.fsync
    if fsync in {"", "always"}:
        return None
    lost = "the last second" if fsync == "everysec" else "the last half minute"
    text = (
        f"The store is synced {fsync!r} (broker.redis.fsync): a power failure takes about {lost} "
        "of work that was acknowledged; set it to always."
    )
    return _advisory("fsync-too-weak", "warning", text, "broker.redis.fsync")


# ---- stability ---------------------------------------------------------------


def _staleness_at_the_bound(view: _View) -> Advisory | None:
    bound = view.status.max_staleness_steps
    column = view.history.steps.get("staleness/mean", ())
    if bound < 1:
        return None

    def measure(end: int) -> float | None:
        values = _figure(column, end)
        return fmean(values) / bound if len(values) >= FIGURE_STEPS else None

    share = _reading(measure, _step_looks(len(column), LEARNING_STEPS), AT_BOUND)
    if share is None:
        return None
    text = (
        f"Trained tokens were {share * bound:.1f} learner steps old on average over the last "
        f"{FIGURE_STEPS * view.history.every_steps} steps, and {bound} is the bound: generators "
        "run as far ahead as they "
        "may, which gains nothing; lower run.max_staleness_steps or run fewer generators "
        "(generators.count)."
    )
    return _advisory("staleness-at-the-bound", "info", text, "run.max_staleness_steps")


def _survivorship_bias(view: _View) -> Advisory | None:
    alarm = view.status.survivorship.alarm
    if not alarm:
        return None
    drops = "run.staleness_mode" in alarm
    setting = "run.staleness_mode" if drops else "broker.lease_s"
    text = alarm[:1].upper() + alarm[1:].rstrip(".") + "."
    return _advisory("survivorship-bias", "warning", text, setting)


def _reward_collapse(view: _View) -> Advisory | None:
    steps = view.history.steps
    rewards = _known(steps.get("reward/sampled", ())) or _known(steps.get("reward/mean", ()))
    if len(rewards) < LEARNING_STEPS:
        return None
    means = _means(rewards)
    best = list(accumulate(means, max))

    def measure(end: int) -> float:
        now, high = means[end - 1], best[end - 1]
        at = means.index(high)
        noise = pstdev(rewards[at : at + FIGURE_STEPS])
        scale = max(abs(high), high - means[0])
        is_noise = high - now <= REWARD_NOISE * noise
        return 0.0 if is_noise or not scale else (high - now) / scale

    if _reading(measure, _step_looks(len(means), 1), REWARD_LOST) is None:
        return None
    text = (
        f"The reward fell from {best[-1]:.3g} to {means[-1]:.3g} (means of "
        f"{FIGURE_STEPS * view.history.every_steps} steps): "
        "resume from a checkpoint from before and lower learner.lr; read the present answers "
        "with slipstream show."
    )
    return _advisory("reward-collapse", "error", text, "learner.lr")


def _zero_variance_flood(view: _View) -> Advisory | None:
    dropped = [name for name in view.history.series if name.startswith("dropped:")]
    needed = FLAT_STEPS * view.status.groups_per_step

    def measure(end: int) -> float | None:
        lost = sum(view.growth(name, end) for name in dropped)
        over = lost + view.growth("trained", end)
        return view.growth("dropped:zero_variance", end) / over if over >= needed else None

    if (share := view.reading(measure, FLAT)) is None:
        return None
    text = (
        f"All answers of a prompt got the same reward in {share:.0%} of the groups of "
        f"{view.lately}, which were dropped: choose prompts that are neither too easy nor too hard "
        "(data.sources), or more answers per prompt (run.group_size)."
    )
    return _advisory("zero-variance-flood", "warning", text, "run.group_size")


def _entropy_collapse(view: _View) -> Advisory | None:
    entropies = _known(view.history.steps.get("policy/entropy", ()))
    if len(entropies) < LEARNING_STEPS:
        return None
    means = _means(entropies)
    start = means[0]

    def measure(end: int) -> float:
        now = means[end - 1]
        return 1.0 - now / start if 0 <= now < ENTROPY_NATS and start > 0 else 0.0

    if _reading(measure, _step_looks(len(means), 1), ENTROPY_LOST) is None:
        return None
    text = (
        f"The policy's entropy fell from {start:.3g} to {means[-1]:.2g} nats per token: answers "
        "are nearly the same every time, without exploration; raise sampling.temperature or "
        "algo.surrogate.clip_high, or lower learner.lr."
    )
    return _advisory("entropy-collapse", "warning", text, "sampling.temperature")


_BY_LAG = "staleness/mismatch_kl@lag"


def _mismatch_kl_rising_with_lag(view: _View) -> Advisory | None:
    if by_lag := _kl_columns(view.history.steps):
        said = _kl_by_lag(by_lag)
    else:
        said = _kl_by_correlation(view.history.steps, view.history.every_steps)
    if not said:
        return None
    text = (
        f"{said}: age, not numerics, takes the data from the policy; lower "
        "run.max_staleness_steps or learner.lr."
    )
    rule, setting = "mismatch-kl-rising-with-lag", "run.max_staleness_steps"
    return _advisory(rule, "warning", text, setting)


def _kl_columns(steps: Mapping[str, Column]) -> dict[int, Column]:
    """Return the KL by lag, the smallest lag first."""
    lags = {
        int(name.removeprefix(_BY_LAG)): column
        for name, column in steps.items()
        if name.startswith(_BY_LAG) and name.removeprefix(_BY_LAG).isdecimal()
    }
    return dict(sorted(lags.items()))


def _kl_by_lag(by_lag: Mapping[int, Column]) -> str:
    rows = max(map(len, by_lag.values()))

    def means(end: int) -> list[tuple[int, float]]:
        found = ((lag, _figure(column, end, KL_STEPS)) for lag, column in by_lag.items())
        return [(lag, fmean(values)) for lag, values in found if len(values) >= KL_ROWS]

    def measure(end: int) -> float | None:
        known = means(end)
        if len(known) < 2 or known[-1][1] < KL_NATS:
            return None
        return known[-1][1] / max(known[0][1], 1e-9)

    looks = _step_looks(rows, KL_STEPS)
    if _reading(measure, looks, KL_RATIO) is None:
        return ""
    known = means(looks[0])
    (low, fresh), (high, old) = known[0], known[-1]
    return f"The mismatch KL is {old:.2g} at a lag of {high} steps and {fresh:.2g} at {low}"


def _kl_by_correlation(steps: Mapping[str, Column], every_steps: int) -> str:
    kl, staleness = steps.get("staleness/mismatch_kl", ()), steps.get("staleness/mean", ())

    def pairs(end: int) -> list[tuple[float, float]]:
        rows = slice(max(0, end - 2 * KL_STEPS), end)
        both = zip(kl[rows], staleness[rows], strict=False)
        return [(k, s) for k, s in both if k is not None and s is not None]

    def measure(end: int) -> float | None:
        known = pairs(end)
        if len(known) < 2 * KL_STEPS or fmean(k for k, _ in known) < KL_NATS:
            return None
        if pstdev(s for _, s in known) < STALENESS_SPREAD:
            return None
        try:
            return correlation([k for k, _ in known], [s for _, s in known])
        except StatisticsError:  # a KL that never changes
            return None

    looks = _step_looks(min(len(kl), len(staleness)), 2 * KL_STEPS)
    if (found := _reading(measure, looks, KL_CORRELATION)) is None:
        return ""
    mean = fmean(k for k, _ in pairs(looks[0]))
    return (
        f"The mismatch KL is {mean:.2g} and rises and falls with the staleness "
        f"(correlation {found:.2f} over {2 * KL_STEPS * every_steps} steps)"
    )


# ---- all of them -------------------------------------------------------------


def _advisory(rule: str, level: Level, text: str, setting: str) -> Advisory:
    return Advisory(rule=rule, level=level, text=text, setting=setting, why=rule)


_LEVELS: Sequence[Level] = ("error", "warning", "info")
_RULES: Sequence[Callable[[_View], Advisory | None]] = (
    *(_engine_ahead_of_the_learner, _work_not_granted, _evaluation_waits_for_rewards),
    *(_learner_starved, _generators_starved, _memory_near_the_high_water),
    *(
        _kv_thrashing,
        _engine_left_out,
        _publishes_dominating,
        _dead_letters_growing,
        _fsync_too_weak,
    ),
    *(_staleness_at_the_bound, _survivorship_bias, _reward_collapse),
    *(_zero_variance_flood, _entropy_collapse, _mismatch_kl_rising_with_lag),
)
RULES: Sequence[str] = tuple(rule.__name__.removeprefix("_").replace("_", "-") for rule in _RULES)

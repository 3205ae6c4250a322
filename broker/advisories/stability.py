"""Rules about staleness, rewards, entropy. Pure."""

from collections.abc import Mapping
from itertools import accumulate
from statistics import StatisticsError, correlation, fmean, pstdev

from slipstream.broker.advisories.view import (
    FIGURE_STEPS,
    LEARNING_STEPS,
    Column,
    Finding,
    Rules,
    RunView,
    known,
    newest_values,
    reading,
    running_means,
    step_window_ends,
)

AT_BOUND = 0.85  # share of the bound, as a mean: nearly every token is as old as allowed
REWARD_LOST = 1 / 3  # share of the best: more than a harder stretch of the data costs
REWARD_NOISE = 2.0  # standard deviations of single steps that a loss must exceed
FLAT = 0.5  # share of the finished groups without a gradient: half of all generation for nothing
FLAT_STEPS = 2  # batches' worth of finished groups, before the share means anything
ENTROPY_LOST = 0.9  # share of its first value
ENTROPY_NATS = 0.1  # exp(0.1) = 1.1 tokens to choose from
REWRITTEN = 0.1  # share of trajectories: below it an agent may compact a long history on purpose
KL_NATS = 0.02  # per token; 1 / (1 + 2 KL) of the sample is effective, so under 4% is lost below it
KL_RATIO = 2.0  # oldest lag against the newest: half of the mismatch comes from age
KL_CORRELATION = 0.6  # age explains a third of the variance
KL_STEPS = 20  # steps of a KL by lag; the correlation needs twice as many
KL_ROWS = 5  # rows with tokens of that lag
STALENESS_SPREAD = 0.1  # learner steps; a staleness that never changes correlates with nothing
_BY_LAG = "staleness/mismatch_kl@lag"

RULES = Rules()


@RULES.add
def _staleness_at_the_bound(view: RunView) -> Finding | None:
    bound = view.status.max_staleness_steps
    column = view.history.steps.get("staleness/mean", ())
    if bound < 1:
        return None

    def measure(end: int) -> float | None:
        values = newest_values(column, end)
        return fmean(values) / bound if len(values) >= FIGURE_STEPS else None

    share = reading(measure, step_window_ends(len(column), LEARNING_STEPS), AT_BOUND)
    if share is None:
        return None
    text = (
        f"Trained tokens were {share * bound:.1f} learner steps old on average over the last "
        f"{FIGURE_STEPS * view.history.every_steps} steps, and {bound} is the bound: generators "
        "run as far ahead as they "
        "may, which gains nothing; lower run.max_staleness_steps or run fewer generators "
        "(generators.count)."
    )
    return Finding(text, "run.max_staleness_steps", "info")


@RULES.add
def _survivorship_bias(view: RunView) -> Finding | None:
    alarm = view.status.survivorship.alarm
    if not alarm:
        return None
    drops = "run.staleness_mode" in alarm
    setting = "run.staleness_mode" if drops else "broker.lease_s"
    text = alarm[:1].upper() + alarm[1:].rstrip(".") + "."
    return Finding(text, setting)


@RULES.add
def _reward_collapse(view: RunView) -> Finding | None:
    steps = view.history.steps
    rewards = known(steps.get("reward/sampled", ())) or known(steps.get("reward/mean", ()))
    if len(rewards) < LEARNING_STEPS:
        return None
    means = running_means(rewards)
    best = list(accumulate(means, max))

    def measure(end: int) -> float:
        now, high = means[end - 1], best[end - 1]
        at = means.index(high)
        noise = pstdev(rewards[at : at + FIGURE_STEPS])
        scale = max(abs(high), high - means[0])
        is_noise = high - now <= REWARD_NOISE * noise
        return 0.0 if is_noise or not scale else (high - now) / scale

    if reading(measure, step_window_ends(len(means), 1), REWARD_LOST) is None:
        return None
    text = (
        f"The reward fell from {best[-1]:.3g} to {means[-1]:.3g} (means of "
        f"{FIGURE_STEPS * view.history.every_steps} steps): "
        "resume from a checkpoint from before and lower learner.lr; read the present answers "
        "with slipstream show."
    )
    return Finding(text, "learner.lr", "error")


@RULES.add
def _zero_variance_flood(view: RunView) -> Finding | None:
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
    return Finding(text, "run.group_size")


@RULES.add
def _histories_rewritten(view: RunView) -> Finding | None:
    column = view.history.steps.get("turns/branched", ())
    found = [role.rewritten for role in view.status.roles if role.rewritten]

    def measure(end: int) -> float | None:
        values = newest_values(column, end)
        return fmean(values) if len(values) >= FIGURE_STEPS else None

    share = reading(measure, step_window_ends(len(column), FIGURE_STEPS), REWRITTEN)
    if share is None or not found:  # calls side by side alone
        return None
    text = (
        f"{share:.0%} of the trajectories of the last {FIGURE_STEPS * view.history.every_steps} "
        "steps have branches, each with its context again, because their agent sends another "
        f"history than it was given: {found[0]}. Send messages back as they came; what was "
        "rewritten on purpose takes its share of environment.max_tokens."
    )
    return Finding(text, "environment.max_tokens")


@RULES.add
def _entropy_collapse(view: RunView) -> Finding | None:
    entropies = known(view.history.steps.get("policy/entropy", ()))
    if len(entropies) < LEARNING_STEPS:
        return None
    means = running_means(entropies)
    start = means[0]

    def measure(end: int) -> float:
        now = means[end - 1]
        return 1.0 - now / start if 0 <= now < ENTROPY_NATS and start > 0 else 0.0

    if reading(measure, step_window_ends(len(means), 1), ENTROPY_LOST) is None:
        return None
    text = (
        f"The policy's entropy fell from {start:.3g} to {means[-1]:.2g} nats per token: answers "
        "are nearly the same every time, without exploration; raise sampling.temperature or "
        "algo.surrogate.clip_high, or lower learner.lr."
    )
    return Finding(text, "sampling.temperature")


@RULES.add
def _mismatch_kl_rising_with_lag(view: RunView) -> Finding | None:
    steps = view.history.steps
    by_lag = {
        int(lag): column
        for name, column in steps.items()
        if (lag := name.removeprefix(_BY_LAG)) != name and lag.isdecimal()
    }
    rise = _kl_by_lag(by_lag) if by_lag else _kl_by_correlation(steps, view.history.every_steps)
    if not rise:
        return None
    text = (
        f"{rise}: age, not numerics, takes the data from the policy; lower "
        "run.max_staleness_steps or learner.lr."
    )
    return Finding(text, "run.max_staleness_steps")


@RULES.add
def _mismatch_kl_without_lag(view: RunView) -> Finding | None:
    """Name what an engine in fp8 costs: tokens of the newest policy are another's as well."""
    column = view.history.steps.get(f"{_BY_LAG}0", ())

    def measure(end: int) -> float | None:
        values = newest_values(column, end, KL_STEPS)
        return fmean(values) if len(values) >= KL_ROWS else None

    found = reading(measure, step_window_ends(len(column), KL_STEPS), KL_NATS)
    if found is None:
        return None
    text = (
        f"The mismatch KL is {found:.2g} at a lag of 0 steps: the engine's numbers, not age, take "
        f"the data from the policy, and about {1 / (1 + 2 * found):.0%} of it is effective; set "
        'weightbus.precision = "trained" or generators.dtype to learner.dtype, or leave out '
        "generators.sglang.kv_cache_dtype."
    )
    return Finding(text, "weightbus.precision")


def _kl_by_lag(by_lag: Mapping[int, Column]) -> str:
    rows = max(map(len, by_lag.values()))

    def means(end: int) -> list[tuple[int, float]]:
        found = (
            (lag, newest_values(column, end, KL_STEPS)) for lag, column in sorted(by_lag.items())
        )
        return [(lag, fmean(values)) for lag, values in found if len(values) >= KL_ROWS]

    def measure(end: int) -> float | None:
        by_age = means(end)
        if len(by_age) < 2 or by_age[-1][1] < KL_NATS:
            return None
        return by_age[-1][1] / max(by_age[0][1], 1e-9)

    window_ends = step_window_ends(rows, KL_STEPS)
    if reading(measure, window_ends, KL_RATIO) is None:
        return ""
    by_age = means(window_ends[0])
    (low, fresh), (high, old) = by_age[0], by_age[-1]
    return f"The mismatch KL is {old:.2g} at a lag of {high} steps and {fresh:.2g} at {low}"


def _kl_by_correlation(steps: Mapping[str, Column], every_steps: int) -> str:
    kl, staleness = steps.get("staleness/mismatch_kl", ()), steps.get("staleness/mean", ())

    def pairs(end: int) -> list[tuple[float, float]]:
        rows = slice(max(0, end - 2 * KL_STEPS), end)
        rows_of_both = zip(kl[rows], staleness[rows], strict=False)
        return [(k, s) for k, s in rows_of_both if k is not None and s is not None]

    def measure(end: int) -> float | None:
        both = pairs(end)
        if len(both) < 2 * KL_STEPS or fmean(k for k, _ in both) < KL_NATS:
            return None
        if pstdev(s for _, s in both) < STALENESS_SPREAD:
            return None
        try:
            return correlation([k for k, _ in both], [s for _, s in both])
        except StatisticsError:  # a KL that never changes
            return None

    window_ends = step_window_ends(min(len(kl), len(staleness)), 2 * KL_STEPS)
    if (found := reading(measure, window_ends, KL_CORRELATION)) is None:
        return ""
    mean = fmean(k for k, _ in pairs(window_ends[0]))
    return (
        f"The mismatch KL is {mean:.2g} and rises and falls with the staleness "
        f"(correlation {found:.2f} over {2 * KL_STEPS * every_steps} steps)"
    )

"""Rules about waiting pools and full stores. Pure."""

from statistics import fmean

from slipstream.broker.advisories.view import FIGURE_STEPS, Finding, Rules, RunView, known

WAITED = 0.25  # share of a pool's time: above the cost of fetching and uneven answers
ANSWERS = 50  # before a share of them means anything
THRASHED = 0.05  # share of the answers: each is computed again from its first token
STARVED = 0.5  # share of a tenant's fair share of lanes, over minutes: others hold them
NEAR_FULL = 0.8  # share of the high water: past it generation is held back

RULES = Rules()


@RULES.add
def _learner_starved(view: RunView) -> Finding | None:
    waited = view.reading(view.waited("learner"), WAITED)
    if waited is None:
        return None
    problem = f"The learner waited {waited:.0%} of {view.lately} for data"
    if backlog := _reward_backlog(view):
        setting = "reward.workers"
        todo = f"while {backlog:.0f} answers wait for a reward: add reward workers (reward.workers)"
    elif (generators := view.waited("generator")(view.window_ends[0]) or 0.0) >= WAITED:
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
    return _of_waiting(view, f"{problem}, {todo}.", setting)


@RULES.add
def _generators_starved(view: RunView) -> Finding | None:
    waited = view.reading(view.waited("generator"), WAITED)
    if waited is None:
        return None
    problem = f"The generators waited {waited:.0%} of {view.lately} for permits"
    learner = view.waited("learner")(view.window_ends[0]) or 0.0
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
    return _of_waiting(view, f"{problem}, {todo}.", setting)


def _of_waiting(view: RunView, text: str, setting: str) -> Finding:
    """Return a finding about a pool; no warning where its waiting is expected."""
    crowded = view.crowded
    return Finding(text + crowded, setting, "info" if crowded else "warning")


def _reward_backlog(view: RunView) -> float:
    """Return the number of answers waiting for a reward if at least half a batch, else 0."""
    end, status = view.window_ends[0], view.status
    waiting = view.values("queue:waiting_for_reward", end)
    mean = fmean(waiting) if waiting else 0.0
    return mean if mean >= status.group_size * status.groups_per_step / 2 else 0.0


@RULES.add
def _memory_near_the_high_water(view: RunView) -> Finding | None:
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
    return Finding(text, "broker.high_water_bytes")


@RULES.add
def _kv_thrashing(view: RunView) -> Finding | None:
    def measure(end: int) -> float | None:
        answers = view.growth("answers", end)
        return view.growth("retracted", end) / answers if answers >= ANSWERS else None

    if (thrown := view.reading(measure, THRASHED)) is None:
        return None
    limit = max((engine.sequence_limit for engine in view.generators), default=0)
    under_way = f", with up to {limit} under way in an engine now" if limit else ""
    return Finding(
        f"Engines threw {thrown:.0%} of the answers of {view.lately} out of their cache and "
        f"computed them again{under_way}: give the cache more room (generators.max_cached_tokens, "
        "generators.sglang.mem_fraction_static) or let fewer be under way "
        '(generators.max_sequences, generators.concurrency = "adaptive").',
        "generators.max_sequences",
    )


@RULES.add
def _tenant_starved(view: RunView) -> Finding | None:
    shares = [role.lane_share for role in view.generators if role.lane_share is not None]
    if not shares or view.status.finished or (share := fmean(shares)) >= STARVED:
        return None
    return Finding(
        f"Generators give this tenant {share:.0%} of its fair share of their lanes, on average "
        "over the last minutes, and its broker has work for more: answers of other tenants hold "
        "them until they end; raise its weight (tenants.NAME.weight), add generators "
        "(generators.count), or bound answers of others (sampling.max_response_tokens).",
        "tenants.NAME.weight",
    )


@RULES.add
def _uploads_failing(view: RunView) -> Finding | None:
    steps = view.history.steps
    failed = known(steps.get("checkpoint/upload_failed", ()))[-FIGURE_STEPS:]
    there = known(steps.get("checkpoint/uploaded_step", ()))
    if not there or (count := failed[-1] - failed[0]) <= 0:
        return None
    newest = f"the newest one there is of step {there[-1]:.0f}" if there[-1] else "none is there"
    return Finding(
        f"{count:.0f} uploads of checkpoints failed in the last "
        f"{FIGURE_STEPS * view.history.every_steps} steps, {newest}: the log of the "
        "learner has the reason; check the bucket, its rights and the network (checkpoint.upload).",
        "checkpoint.upload",
    )


def _gib(num_bytes: float) -> str:
    mib = num_bytes / 2**20
    return f"{mib / 1024:.1f} GiB" if mib >= 1024 else f"{mib:.0f} MiB"

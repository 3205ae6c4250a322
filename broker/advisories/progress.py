"""Rules about a run in which nothing happens any more. Pure."""

from itertools import pairwise

from slipstream.broker.advisories.view import WINDOW_S, Finding, Rules, RunView, duration

RULES = Rules()
DROPPED_STEPS = 2  # learner steps' groups that are dropped while none gets ready


@RULES.add
def _engine_ahead_of_the_learner(view: RunView) -> Finding | None:
    ahead = {
        engine.name: engine.adopted.label
        for engine in view.generators
        if engine.adopted is not None and engine.adopted.step > view.status.steps
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
    return Finding(text, "run.resume_from", "error")


@RULES.add
def _work_not_granted(view: RunView) -> Finding | None:
    in_flight, unscored = view.stalled("in_flight"), view.stalled("queue:eval_unscored")
    asking = [engine for engine in view.generators if not engine.leases]
    if not in_flight or max(in_flight) or any(unscored) or not asking:
        return None
    if len(asking) < len(view.generators):
        return None  # held-out problems are under way
    labels = {engine.adopted.label for engine in asking if engine.adopted is not None}
    runs = ", ".join(sorted(labels))
    text = (
        f"Nothing has been under way for {duration(WINDOW_S)}, and {len(asking)} generators with "
        f"{runs} get no work: the learner, at step {view.status.steps}, has not taken over, or "
        "its weights do not reach them; see the learner's log and publishes on the page, then "
        "resume with slipstream run --resume auto (run.resume_from)."
    )
    return Finding(text, "run.resume_from", "error")


@RULES.add
def _every_group_dropped(view: RunView) -> Finding | None:
    ready = view.stalled("queue:ready_groups")
    names = [name for name in view.history.series if name.startswith("dropped:")]
    counts = {name: view.stalled(name) for name in names}
    lost = {name.partition(":")[2]: seen[-1] - seen[0] for name, seen in counts.items() if seen}
    total = sum(lost.values())
    if not ready or ready[-1] > ready[0] or total < DROPPED_STEPS * view.status.groups_per_step:
        return None
    reasons = ", ".join(f"{reason}: {count:.0f}" for reason, count in sorted(lost.items()) if count)
    text = (
        f"No learner step for {duration(WINDOW_S)}, and all {total:.0f} groups that ended "
        f"meanwhile were dropped ({reasons}): so the run goes on for ever. Read answers with "
        "slipstream show; mend the reward (reward.function) or take other prompts (data.sources)."
    )
    return Finding(text, "reward.function", "error")


@RULES.add
def _step_without_end(view: RunView) -> Finding | None:
    slow = view.status.slow_step
    if slow is None:
        return None
    text = (
        f"{slow.text[0].upper()}{slow.text[1:]}. See the learner's log; if the step never ends, "
        "kill the learner: after broker.max_batch_attempts such ends its groups become dead "
        "letters."
    )
    return Finding(text, "broker.max_batch_attempts", "error")


@RULES.add
def _evaluation_waits_for_rewards(view: RunView) -> Finding | None:
    unscored = view.stalled("queue:eval_unscored")
    if not unscored or not unscored[0] or any(b < a for a, b in pairwise(unscored)):
        return None
    text = (
        f"{unscored[-1]:.0f} held-out answers wait for a reward and none has got one for "
        f"{duration(WINDOW_S)}; the memory bounds allow no more requests: see "
        "the logs of reward workers, and start more of them (reward.workers) or fix the cause "
        "of the wait (reward.function, reward.timeout_s)."
    )
    return Finding(text, "reward.workers")

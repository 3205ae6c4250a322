"""The ledger of a run: its rules, and how it continues from a checkpoint."""

import logging
import math
from pathlib import Path

from slipstream.broker.config import BrokerSettings
from slipstream.broker.data.mixture import fingerprint_of
from slipstream.broker.data.prompts import Prompts
from slipstream.broker.identity import RunIdentity, begin_life
from slipstream.broker.ledger.admission import StalenessBound
from slipstream.broker.ledger.commands import Ledger
from slipstream.broker.ledger.evaluation import EvalPlan, EvalRound
from slipstream.broker.ledger.state import BookState, LedgerRules, decode_state, encode_state
from slipstream.broker.ledger.throttle import StalenessTarget
from slipstream.broker.report.run_files import forget_after
from slipstream.broker.store.base import Changes
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.checkpoints import read_ledger, readable_checkpoints
from slipstream.wire.messages.trajectory import ItemKind, TrajectoryKey
from slipstream.wire.settings.sections import RunSection, SamplingSection
from slipstream.wire.unreadable import UNREADABLE

_log = logging.getLogger(__name__)


def build_ledger(
    settings: BrokerSettings, prompts: Prompts, state: BookState | None = None
) -> Ledger:
    """Return a ledger over the run's prompts, empty or with a state that was stored."""
    return Ledger(
        ledger_rules(settings, prompts),
        prompt_at=prompts.training.at,
        eval_prompt_at=prompts.held_out.__getitem__,
        state=state,
    )


_ARRAY_BYTES = 4 + 1 + 4  # id, loss mask and logprob of a token
_PLACE_BYTES = 30  # a third of the place of an image, which has a token between two marks at least
_ID_BYTES = 4
_EXPERT_BYTES = 16_384  # experts of a token in all layers, several times today's most


def _token_bytes(run: RunSection, sampling: SamplingSection) -> int:
    """Return the most bytes of a payload for each token."""
    kept = _ID_BYTES * (1 + sampling.max_kept_tokens) if sampling.records_kept else 0
    return _ARRAY_BYTES + _PLACE_BYTES + kept + (_EXPERT_BYTES if run.routing_replay == "R3" else 0)


def ledger_rules(settings: BrokerSettings, prompts: Prompts) -> LedgerRules:
    """Return the settings that a ledger obeys."""
    run, sampling = settings.run, settings.sampling
    max_prompts = math.ceil(run.epochs * prompts.training.num_rows) if run.epochs else None
    if max_prompts is not None and max_prompts < run.groups_per_step:
        raise ConfigError(
            f"run.epochs = {run.epochs:g} of {prompts.training.num_rows} prompts are fewer than "
            f"the run.groups_per_step = {run.groups_per_step} of one learner step"
        )
    acts, most = settings.environment.is_named, settings.environment.longest(sampling)
    prompt = most if acts else sampling.max_prompt_tokens
    response: dict[ItemKind, int] = {
        "train": most if acts else sampling.max_response_tokens,
        "eval": most if acts else settings.eval.max_response_tokens or sampling.max_response_tokens,
    }
    return LedgerRules(
        bound=StalenessBound(
            run.staleness_bound, run.groups_per_step, reserves=run.staleness_mode == "wait"
        ),
        group_size=run.group_size,
        total_steps=run.steps,
        max_attempts=settings.broker.max_attempts,
        max_batch_attempts=settings.broker.max_batch_attempts,
        max_in_flight=settings.max_in_flight,
        drop_zero_variance=settings.broker.drop_zero_variance,
        lease_s=settings.broker.lease_s,
        max_lease_s=settings.broker.max_lease_s,
        eval_plan=EvalPlan(
            sources=tuple(problem.data_source for problem in prompts.held_out),
            section=settings.eval,
        ),
        max_prompts=max_prompts,
        min_groups=run.fewest_groups,
        zero_variance_of=settings.broker.zero_variance_of,
        high_water_bytes=settings.broker.high_water_bytes,
        replay_budget_bytes=settings.broker.replay_budget_bytes,
        drop_overlong=sampling.overlong_responses == "drop",
        max_prompt_tokens=prompt,
        max_response_tokens=response,
        max_tokens={kind: most if acts else prompt + tokens for kind, tokens in response.items()},
        max_turns=settings.environment.max_turns if acts else 0,
        max_token_bytes=_token_bytes(run, sampling),
        prompts_fingerprint=prompts.training.fingerprint(),
        problems_fingerprint=fingerprint_of(prompts.held_out),
        staleness_target=StalenessTarget(target.mismatch_kl, target.p95_lag)
        if (target := run.staleness_target).is_set
        else None,
    )


def ledger_of(checkpoint: Path) -> BookState:
    """Return the ledger in a checkpoint."""
    data = read_ledger(checkpoint)
    if not data:
        raise ConfigError(
            f"{checkpoint} was trained without a broker: export it and start a new run from it "
            "(run.model)"
        )
    try:
        return decode_state(data)
    except UNREADABLE as error:
        raise ConfigError(f"{checkpoint}: its ledger cannot be read: {error}") from error


def check_same_run(rules: LedgerRules, state: BookState, settings: BrokerSettings) -> None:
    """The cursor of a ledger means nothing in other data, nor its deadlines under another bound."""
    where = settings.run.resume_from or f"run {settings.run.name!r}"
    if state.prompts != rules.prompts_fingerprint and not settings.data.allow_change:
        raise ConfigError(
            f"the training prompts are not those of {where}: [data] or run.seed "
            "has changed; set data.allow_change = true to continue with these at the same position"
        )
    if not settings.run.resume_from and state.bound != rules.bound:
        raise ConfigError(
            f"{where} started with other run.max_staleness_steps, run.staleness_mode or "
            "run.groups_per_step; change them with `slipstream run --resume`"
        )


def warn_of_other_problems(ledger: Ledger) -> None:
    """Log that figures of before and after now cannot be compared."""
    state = ledger.book.state
    if state.problems != ledger.book.rules.problems_fingerprint and state.eval_points:
        _log.warning(
            "the held-out problems have changed ([eval]): figures of before and after step %d "
            "cannot be compared",
            state.version.step,
        )


# ---- from a checkpoint -------------------------------------------------------


def resumed(
    settings: BrokerSettings,
    prompts: Prompts,
    known: Ledger | None,
    first_event: int,
    identity: RunIdentity | None,
) -> tuple[Ledger, Changes]:
    """Resume from run.resume_from: in the store if it reaches back to there, else without it.

    Returns the ledger, and the changes that bring the store to it.
    """
    run = settings.run
    folder = Path(run.resume_from)
    saved = ledger_of(folder)
    version = saved.version
    in_store = (
        known is not None
        and known.book.state.num_events > 0
        and known.book.is_ancestor(version)
        and known.book.can_go_back_to(version.step)
        and known.book.state.group_size == run.group_size
    )
    ledger = known if known is not None and in_store else build_ledger(settings, prompts, saved)
    state = ledger.book.state
    points = [point for point in state.eval_points if point.step <= version.step]
    if reason := ledger.book.rules.eval_plan.verdict(points):
        raise ConfigError(f"this run has ended: {reason}; change that setting to train on")
    check_same_run(ledger.book.rules, state, settings)
    warn_of_other_problems(ledger)
    released: list[TrajectoryKey] = []
    if in_store:
        begin_life(state, identity, others=[saved], apart=state.num_events < first_event)
        _log.info("going back from step %d to step %d", ledger.book.step, version.step)
    else:
        released = _begin_apart(state, known, settings, first_event, identity)
        forget_after(run.folder, version.step)
        count = len(state.groups)
        _log.info("resuming from step %d, %d prompts were in flight", version.step, count)
    state.origin, state.awaits_learner = run.resume_from, True
    state.stop_reason, state.last_step = "", run.steps
    return ledger, _under_present_settings(ledger, released)


def _begin_apart(
    state: BookState,
    known: Ledger | None,
    settings: BrokerSettings,
    first_event: int,
    identity: RunIdentity | None,
) -> list[TrajectoryKey]:
    """Keep data of an abandoned life apart from this one's.

    Returns the payloads of that life that the store holds.
    """
    infos = readable_checkpoints(settings.run.checkpoints)
    epochs = [info.version.epoch for info in infos.values()]
    others = [known.book.state] if known is not None else []
    begin_life(state, identity, others=others, epochs=epochs, apart=True)
    state.num_events = max(first_event, *(life.num_events for life in (state, *others)))
    if known is None:
        return []
    before = known.book.state
    held = [*before.groups.values(), *(g for groups in before.replay.values() for g in groups)]
    return [key for group in held for key in group.trajectory_keys()]


def _under_present_settings(ledger: Ledger, released: list[TrajectoryKey]) -> Changes:
    """Return the whole state to store, adapted to the present settings.

    Groups under way that were admitted under another bound or group size restart; so do
    evaluations under other problems or samples.
    """
    state, rules = ledger.book.state, ledger.book.rules
    other_size = state.group_size != rules.group_size
    for group in list(ledger.book.groups.values()):
        if group.item == "train" and (other_size or (state.bound != rules.bound and group.is_live)):
            ledger.book.restart(group, rules.group_size)
    samples, count = rules.eval_plan.section.samples, rules.eval_plan.num_problems
    groups = [group for group in ledger.book.groups.values() if group.item == "eval"]
    if (
        state.problems != rules.problems_fingerprint
        or any(group.size != samples for group in groups)
        or any(eval_round.num_problems != count for eval_round in state.eval_rounds.values())
    ):
        for group in groups:
            ledger.book.forget(group)
        state.eval_rounds = {step: EvalRound(step, count) for step in state.eval_rounds if count}
    state.bound, state.group_size = rules.bound, rules.group_size
    state.prompts, state.problems = rules.prompts_fingerprint, rules.problems_fingerprint
    _, freed = ledger.drain()
    return Changes(remove=[*released, *freed], snapshot=encode_state(state))

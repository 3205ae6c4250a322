"""Applies each event to the book. Nothing is decided here.

The state is the sum of the events in order: a broker that starts again reads the newest snapshot
and applies the events after it.
"""

from bisect import insort
from collections import Counter

from slipstream.broker.ledger.book import Book
from slipstream.broker.ledger.evaluation import EvalAnswer, EvalRound
from slipstream.broker.ledger.events import (
    DEATHS,
    FAULTS,
    STRANDINGS_PER_ATTEMPT,
    BatchesHeld,
    Delivered,
    Dropped,
    DropReason,
    EvalRoundClosed,
    EvalRoundOpened,
    Evicted,
    Generated,
    HistoryCut,
    Issued,
    LearnerLeft,
    Leased,
    LeaseEnded,
    LedgerEvent,
    LetterDropped,
    Requeued,
    Retried,
    Scored,
    ScoringFailed,
    Sealed,
    StopPlanned,
    TakenOver,
    Trained,
    Unbound,
)
from slipstream.broker.ledger.groups import NOBODY, Group, Lease
from slipstream.broker.ledger.leases import name_of
from slipstream.broker.ledger.state import BookState, TrainedStep
from slipstream.broker.ledger.survivorship import TRAINED
from slipstream.wire.messages.dead_letters import Failure, is_dead
from slipstream.wire.messages.trajectory import MAX_REASON, Score
from slipstream.wire.messages.versions import PolicyVersion, staleness_steps


def apply(book: Book, event: LedgerEvent) -> None:
    """Change the state; used by every command and by replay."""
    state = book.state
    state.num_events += 1
    match event:
        case Generated() | Issued() | Leased() | LeaseEnded():
            _apply_generation(book, event)
        case Scored(score=score):
            _apply_score(book, score)
        case ScoringFailed(group_id=group_id, sibling=sibling):
            group = book.groups[group_id]
            group.failed_scorings[sibling] = group.failed_scorings.get(sibling, 0) + 1
            group.note(
                Failure(
                    sibling=sibling,
                    by=event.by,
                    reason=event.reason,
                    function=event.function,
                    version=event.version,
                    excerpt=event.excerpt,
                )
            )
        case Dropped(group_id=group_id, reason=reason):
            _drop(book, book.groups[group_id], reason)
        case EvalRoundOpened(step=step, num_problems=num_problems):
            state.eval_rounds[step] = EvalRound(step, num_problems)
        case EvalRoundClosed(step=step, point=point):
            del state.eval_rounds[step]
            insort(state.eval_points, point, key=lambda known: known.step)
        case StopPlanned(last_step=step, reason=reason):
            state.last_step, state.stop_reason = step, reason
        case LetterDropped(group_id=group_id):
            del state.dead_letters[group_id]
        case Retried(group_id=group_id, of=old, size=size):
            letter = state.dead_letters.pop(old)
            state.issued += 1
            state.retried += 1
            book.add(
                Group(
                    group_id=group_id,
                    item="train",
                    prompt=letter.prompt,
                    size=size,
                    position=letter.position,
                    retry_of=old,
                )
            )
        case _:
            _apply_learner(book, event)


def _apply_generation(book: Book, event: Generated | Issued | Leased | LeaseEnded) -> None:
    state = book.state
    match event:
        case Generated(header=header, num_bytes=num_bytes):
            group = book.groups[header.group_id]
            is_last = len(group.headers) + 1 == group.size
            if is_last:
                book.index.leave(group)
            group.headers[header.sibling] = header
            group.num_bytes += num_bytes
            state.untrained_bytes += num_bytes
            if is_last:
                book.end_lease(group)
                book.index.enter(group)
            else:
                book.index.sibling_came(group, generated=1)
        case Issued(group_id=group_id, item=item, cursor=cursor, eval_step=eval_step):
            if item == "train":
                state.cursor = cursor + 1
                state.issued += 1
            else:
                state.eval_rounds[eval_step].next_problem = cursor + 1
            book.add(
                Group(
                    group_id=group_id,
                    item=item,
                    prompt=event.prompt,
                    size=event.size,
                    position=cursor,
                    eval_step=eval_step,
                )
            )
        case Leased(lease_id=lease_id, group_id=group_id, holder=holder):
            group = book.groups[group_id]
            book.index.leave(group)
            if group.adopted_step < 0:
                group.adopted_step, group.bound = event.adopted_step, event.bound
            group.lease_to(lease_id, holder)
            book.index.enter(group)
            state.leases[lease_id] = Lease(lease_id, group_id, holder)
            book.by_holder.add(holder, lease_id)
            state.next_lease_id = lease_id + 1
        case LeaseEnded():
            _end_lease(book, event)


def _end_lease(book: Book, event: LeaseEnded) -> None:
    state, reason = book.state, event.reason
    lease = state.leases[event.lease_id]
    group = book.groups[lease.group_id]
    book.index.leave(group)
    book.end_lease(group)
    book.index.enter(group)
    group.strandings += reason == "stranded"
    is_tenth = reason == "stranded" and group.strandings % STRANDINGS_PER_ATTEMPT == 0
    is_attempt = reason in FAULTS or is_tenth
    group.attempts += is_attempt
    group.deaths += reason in DEATHS
    if is_attempt:
        detail = f": {event.detail}" if event.detail else ""
        text = f"its lease of generation {reason}{detail}"[:MAX_REASON]
        group.note(Failure(by=lease.holder, reason=text))
    state.ended_leases[reason] += 1
    if reason not in {"lost", "orphaned"}:
        state.restarted_trajectories += group.size - len(group.headers)


def _apply_score(book: Book, score: Score) -> None:
    state = book.state
    group = book.groups[score.group_id]
    is_last = len(group.scores) + 1 == group.size
    if is_last:
        book.index.leave(group)
    group.scores[score.sibling] = score
    book.part_names.admit(score.parts)
    if is_last:
        book.index.enter(group)
    else:
        book.index.sibling_came(group, scored=1)
    if group.item == "train":
        if score.reward is not None:
            state.sampled_reward += score.reward
            state.sampled_count += 1
            if is_last and len(set(group.values_of(book.rules.zero_variance_of))) > 1:
                state.drops_in_a_row = 0
    elif is_last:
        eval_round = state.eval_rounds[group.eval_step]
        headers = [group.headers[sibling] for sibling in range(group.size)]
        eval_round.answers[group.position] = [
            EvalAnswer(reward, header.num_response_tokens, header.finish_reason == "length")
            for reward, header in zip(group.rewards, headers, strict=True)
        ]
        for header in headers:
            eval_round.versions.update(run.version for run in header.version_runs)
        book.forget(group)


def _drop(book: Book, group: Group, reason: DropReason) -> None:
    if is_dead(reason):
        book.add_dead_letter(group, reason)
    if group.item == "train":
        book.state.dropped[reason] += 1
        book.state.drops_in_a_row += 1
        book.measure(group, reason)
    elif (eval_round := book.state.eval_rounds.get(group.eval_step)) is not None:
        eval_round.dropped.add(group.position)
    book.forget(group)


def _apply_learner(
    book: Book,
    event: TakenOver
    | BatchesHeld
    | Requeued
    | LearnerLeft
    | Delivered
    | Unbound
    | Trained
    | Evicted
    | HistoryCut
    | Sealed,
) -> None:
    state = book.state
    match event:
        case TakenOver():
            _take_over(book, event)
        case Requeued(group_id=group_id, of=old, position=position):
            state.lost.remove((old, position))
            state.requeued += 1
            book.add(
                Group(
                    group_id=group_id,
                    item="train",
                    prompt=event.prompt,
                    size=event.size,
                    position=position,
                )
            )
        case LearnerLeft():
            state.learner_left = True
        case Delivered(step=step, group_ids=group_ids):
            state.batches[step] = group_ids
            book.bind(group_ids, step)
        case BatchesHeld():
            state.in_hand = event.steps
        case Unbound(step=step):
            book.bind(state.batches.pop(step), NOBODY)
            _no_longer_trained(state, step)
        case Trained(version=version):
            _train(book, version)
        case Evicted(step=step):
            book.release_replay(step)
        case HistoryCut(step=step):
            book.cut_history(step)
        case Sealed(step=step, oldest_kept=oldest_kept):
            for trained_step in [s for s in state.replay if s < step]:
                book.release_replay(trained_step)
            steps = range(state.sealed_step, step)
            state.sealed += sum(len(state.history[s].groups) for s in steps if s in state.history)
            state.sealed_step = max(step, state.sealed_step)
            book.cut_history(min(step, oldest_kept))
    book.find_free_step()
    if not isinstance(event, Delivered | BatchesHeld | Unbound):
        book.trace_lineage()


def _train(book: Book, version: PolicyVersion) -> None:
    """Move the groups of a step from its batch to those kept until a checkpoint holds them."""
    state, step = book.state, version.step - 1
    groups = [book.groups[group_id] for group_id in state.batches.pop(step)]
    _no_longer_trained(state, step)
    staleness: Counter[int] = Counter()
    for group in groups:
        for header in group.headers.values():
            for behavior, num_tokens in header.tokens_by_version():
                staleness[staleness_steps(learner_step=step, behavior=behavior)] += num_tokens
        book.measure(group, TRAINED)
        book.take_out(group)
        state.replay_bytes += group.num_bytes
    state.replay[step] = groups
    state.history[step] = TrainedStep(
        tuple((group.group_id, group.position) for group in groups), dict(staleness)
    )
    state.staleness += staleness
    state.trained += len(groups)
    state.version = version
    state.sampled_reward, state.sampled_count = 0.0, 0


def _no_longer_trained(state: BookState, step: int) -> None:
    del state.cut_off[step]
    state.in_hand = tuple(held for held in state.in_hand if held != step)


def _take_over(book: Book, event: TakenOver) -> None:
    """Undo the learner steps past its own: bind their batches again, or have them requeued."""
    state, version, step = book.state, event.version, event.version.step
    if event.cut_off >= 0:
        state.cut_off[event.cut_off] += 1
        why = f"it ended while it trained step {event.cut_off}"
        for group_id in state.batches[event.cut_off]:
            book.groups[group_id].note(Failure(by=name_of(state.learner), reason=why))
    for lost in sorted(s for s in state.history if s >= step):
        record = state.history.pop(lost)
        state.trained -= len(record.groups)
        state.staleness -= Counter(record.staleness)
        if lost < state.sealed_step:
            state.sealed -= len(record.groups)
        kept = state.replay.pop(lost, None)
        if kept is None:
            state.lost += record.groups
            continue
        for group in kept:
            group.bound_to = lost
            state.groups[group.group_id] = group
            book.index.enter(group)
            state.replay_bytes -= group.num_bytes
            state.untrained_bytes += group.num_bytes
        state.batches[lost] = tuple(group.group_id for group in kept)
        state.redelivered_steps += 1
    state.sealed_step = min(state.sealed_step, step)
    state.eval_points = [point for point in state.eval_points if point.step <= step]
    for eval_step in [s for s in state.eval_rounds if s > step]:
        del state.eval_rounds[eval_step]
        for group in [g for g in book.groups.values() if g.eval_step == eval_step]:
            book.forget(group)
    state.version = version
    state.learner = event.learner
    state.awaits_learner = state.learner_left = False
    state.forks[version.epoch] = step
    state.granted_epoch = max(state.granted_epoch, version.epoch)
    book.trace_lineage()
    for group in [g for g in book.groups.values() if g.item == "eval"]:
        if not book.descends(group):
            book.restart(group)

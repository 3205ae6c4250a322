"""The account of all items for clients."""

from collections.abc import Mapping, Sequence
from itertools import islice

from slipstream.broker.ledger.book import Book
from slipstream.broker.ledger.groups import NOBODY, Group
from slipstream.broker.ledger.leases import name_of
from slipstream.broker.ledger.scoring_queue import ScoringQueue
from slipstream.wire.messages.ledger_view import HolderView, ItemView, LedgerView

_PROMPT_CHARS = 60
_SORTED_UP_TO = 10_000


def account_of(
    book: Book,
    scoring: ScoringQueue,
    *,
    run_name: str,
    store: str,
    generation: int,
    issued_at: Mapping[int, float],
    num_items: int,
    now: float,
) -> LedgerView:
    """Return counts, the equation, the oldest ``num_items`` items and the holders.

    ``store`` is the server behind the ledger and its durability; ``issued_at`` has
    unix times by group id, as far as known.
    """
    state = book.state
    in_flight = book.in_flight()
    # The lowest ids; they lie all over the memory, and to sort 100,000 takes 15 ms, at every step.
    ids = book.groups if len(book.groups) > _SORTED_UP_TO else sorted(book.groups)
    oldest = [book.groups[group_id] for group_id in islice(ids, num_items)]
    return LedgerView(
        run_name=run_name,
        version=book.version,
        last_step=state.last_step,
        finished=book.over,
        stop_reason=state.stop_reason,
        group_size=book.rules.group_size,
        issued=state.issued,
        trained=state.trained,
        sealed=state.sealed,
        dropped=dict(state.dropped),
        in_flight=in_flight,
        unaccounted=book.unaccounted(),
        trajectories={**book.trajectories(), **_trajectories_in_flight(book)},
        prompts_taken=state.cursor,
        prompts=book.rules.max_prompts,
        dead_letters=len(state.dead_letters),
        retried=state.retried,
        requeued=state.requeued,
        redelivered_steps=state.redelivered_steps,
        untrained_bytes=state.untrained_bytes,
        replay_bytes=state.replay_bytes,
        replay_steps=tuple(sorted(state.replay)),
        broker_generation=generation,
        store=store,
        oldest=tuple(_item(book, group, issued_at, now) for group in oldest),
        holders=_holders(book, scoring),
    )


def describe_wait(book: Book, group_ids: Sequence[int], *, trouble: str = "") -> str:
    """Describe which groups a batch waits for, and their holders; warn if all are dropped.

    ``trouble`` describes reward functions that fail.
    """
    state = book.state
    barren = ""
    if unscored := _trajectories_in_flight(book)["to_score"]:
        barren = f"; {unscored} answers wait for a reward{f', {trouble}' if trouble else ''}"
    if state.drops_in_a_row >= 2 * book.rules.bound.groups_per_step:  # it could be so for ever
        reasons = ", ".join(f"{reason}: {n}" for reason, n in state.dropped.items())
        barren += f"; the last {state.drops_in_a_row} groups were all dropped ({reasons})"
    if not group_ids:
        held = ", ".join(f"{state}: {n}" for state, n in book.in_flight().items() if n)
        return f"groups, none of which is under way{f' ({held})' if held else ''}{barren}"
    parts = []
    for group_id in group_ids[:3]:
        group = book.groups[group_id]
        lease = book.leases.get(group.lease_id)
        holder = f", held by {name_of(lease.holder)}" if lease else ""
        parts.append(f"{group_id} ({group.state}{holder})")
    more = f" and {len(group_ids) - 3} more" if len(group_ids) > 3 else ""
    return f"groups {', '.join(parts)}{more}{barren}"


def _trajectories_in_flight(book: Book) -> dict[str, int]:
    """Return the numbers of siblings to be generated, to be scored, and scored."""
    index = book.index
    return {
        "to_generate": index.num_siblings - index.num_generated,
        "to_score": index.num_generated - index.num_scored,
        "scored": index.num_scored,
    }


def _item(book: Book, group: Group, issued_at: Mapping[int, float], now: float) -> ItemView:
    lease = book.leases.get(group.lease_id)
    issued = issued_at.get(group.group_id)
    deadline = None
    if group.is_live:
        deadline = group.deadline(book.rules.bound)
    return ItemView(
        group_id=group.group_id,
        item=group.item,
        position=group.position,
        prompt=group.prompt.text[:_PROMPT_CHARS],
        state=group.state,
        age_s=None if issued is None else max(0.0, now - issued),
        holder=name_of(lease.holder) if lease is not None else "",
        missing=group.missing,
        unscored=group.unscored,
        attempts=group.attempts,
        deadline=deadline,
        bound_to=None if group.bound_to == NOBODY else group.bound_to,
    )


def _holders(book: Book, scoring: ScoringQueue) -> tuple[HolderView, ...]:
    views = [
        HolderView(
            name=name_of(holder),
            work="generation",
            leases=len(leases),
            trajectories=sum(len(book.groups[book.leases[i].group_id].missing) for i in leases),
        )
        for holder, leases in book.by_holder.items()
    ]
    views += [
        HolderView(
            name=name_of(holder),
            work="scoring",
            leases=scoring.leases_of(holder),
            trajectories=scoring.leases_of(holder),
        )
        for holder in scoring.holders()
    ]
    return tuple(sorted(views, key=lambda view: (view.work, view.name)))

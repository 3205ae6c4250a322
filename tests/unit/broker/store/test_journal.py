"""The ledger's way into a store: events, and now and then the whole state in their place."""

import asyncio

from slipstream.broker.ledger.commands import Ledger
from slipstream.broker.ledger.effects import apply
from slipstream.broker.ledger.events import decode_event
from slipstream.broker.ledger.state import decode_state
from slipstream.broker.store.event_log import Trail
from slipstream.broker.store.group_commit import GroupCommitter
from slipstream.broker.store.journal import LedgerWriter
from tests.support.ledger_driver import lease, make_ledger, make_ready, make_rules
from tests.support.memory_store import MemoryStore, SharedMemory


async def write_all(
    shared: SharedMemory, ledger: Ledger, groups: int, snapshot_after_events: int
) -> list[int]:
    """Issue, answer and score so many groups; return how many events each write left stored."""
    store = MemoryStore(shared)
    await store.claim()
    committer = GroupCommitter(store, max_transaction_bytes=1_000)
    writing = asyncio.create_task(committer.run())
    writer = LedgerWriter(
        ledger.book.state,
        committer,
        Trail(),
        lambda _: None,
        snapshot_after_events=snapshot_after_events,
    )
    stored = []
    try:
        for _ in range(groups):
            make_ready(ledger, lease(ledger, max_sequences=2))
            events, released = ledger.drain()
            durable = asyncio.Event()
            writer.write(events, {}, released, durable.set)
            await asyncio.wait_for(durable.wait(), 60)  # noqa: TID251 cancelled by nobody
            stored.append(len(shared.events))
    finally:
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
    return stored


def test_a_snapshot_takes_the_place_of_events_and_both_make_the_same_ledger():
    rules = make_rules(max_staleness_steps=20, groups_per_step=2, total_steps=100)
    per_group = 20
    shared, ledger = SharedMemory(), make_ledger(rules)
    stored = asyncio.run(write_all(shared, ledger, 30, per_group))

    assert shared.snapshot is not None
    assert 0 in stored, "no snapshot took the place of the events before it"
    held = len(ledger.book.state.groups)
    assert max(stored) < max(per_group, 2 * held) + per_group, "a restart replays too much"
    assert stored.count(0) < len(stored) / 2, "each snapshot costs as much as all groups in it"

    again = make_ledger(rules, decode_state(shared.snapshot))
    for event in shared.events:
        apply(again.book, decode_event(event))
    assert again.book.state == ledger.book.state

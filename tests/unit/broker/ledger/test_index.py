"""The views of the groups agree with a walk over all of them."""

from slipstream.broker.ledger.commands import Ledger
from tests.support.ledger_driver import (
    generate,
    header,
    lease,
    make_ledger,
    make_ready,
    make_rules,
    reward,
    stored,
    submit,
    train_step,
)


def _agrees(ledger: Ledger) -> bool:
    groups = [group for group in ledger.book.groups.values() if group.item == "train"]
    index = ledger.book.index
    return (index.num_siblings, index.num_generated, index.num_scored) == (
        sum(group.size for group in groups),
        sum(len(group.headers) for group in groups),
        sum(len(group.scores) for group in groups),
    )


def test_siblings_are_counted_through_every_turn_of_a_groups_life():
    ledger = make_ledger(make_rules(max_attempts=1, total_steps=9, max_staleness_steps=3))
    ledger.training.take_over(0)
    half, whole, equal, *rest = lease(ledger)
    submit(ledger, header(half.group_id, 0, ledger.book.version))
    assert _agrees(ledger)
    generate(ledger, whole)
    reward(ledger, whole.group_id, [1.0])
    assert (_agrees(ledger), ledger.book.index.num_scored) == (True, 1)
    generate(ledger, equal)
    reward(ledger, equal.group_id, [1.0, 1.0])  # dropped: no variance
    assert _agrees(ledger)
    ledger.expire(1e9)  # what was leased has ended with its only attempt
    assert _agrees(ledger)
    again = make_ledger(ledger.book.rules, stored(ledger.book.state))
    assert _agrees(again)
    make_ready(ledger, lease(ledger))
    train_step(ledger)
    assert _agrees(ledger)
    ledger.training.take_over(0)
    assert _agrees(ledger)
    assert rest

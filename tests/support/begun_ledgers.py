"""Ledgers of a run that has begun, and steps of their items."""

from typing import Any

from slipstream.broker.ledger.commands import Ledger
from slipstream.broker.ledger.groups import Group
from slipstream.wire.messages.broker import LeasedGroup
from slipstream.wire.messages.trajectory import Score
from slipstream.wire.messages.versions import PolicyVersion
from tests.support.ledger_driver import (
    eval_plan,
    generate,
    lease,
    make_ledger,
    make_ready,
    make_rules,
    train_step,
)

V0 = PolicyVersion(1, 0)


def started(ledger: Ledger) -> Ledger:
    ledger.training.take_over(ledger.book.step)
    return ledger


def begun(**rules: Any) -> Ledger:  # noqa: ANN401 values of rules
    return started(make_ledger(make_rules(**rules)))


def leased(**rules: Any) -> tuple[Ledger, LeasedGroup]:  # noqa: ANN401
    """Return a ledger of a generator that has one group."""
    ledger = begun(**rules)
    (group,) = lease(ledger, max_sequences=2)
    return ledger, group


def answered(**rules: Any) -> tuple[Ledger, LeasedGroup]:  # noqa: ANN401
    """Return a ledger with one group that waits for its rewards."""
    ledger, group = leased(**rules)
    generate(ledger, group)
    return ledger, group


def score(ledger: Ledger, group_id: int, sibling: int, **result: Any) -> None:  # noqa: ANN401
    ledger.score(Score(group_id=group_id, sibling=sibling, lease_id=0, **result))


def delivered(ledger: Ledger, version: PolicyVersion, step: int | None = None) -> list[Group]:
    batch = ledger.training.deliver(version, step)
    assert isinstance(batch, list)
    return batch


def trained_steps(ledger: Ledger, count: int) -> list[list[int]]:
    """Train so many steps; return the groups of each."""
    batches = []
    for _ in range(count):
        make_ready(ledger, lease(ledger))
        batches.append([group.group_id for group in train_step(ledger)])
    return batches


def in_flight(ledger: Ledger) -> dict[str, int]:
    return {state: count for state, count in ledger.book.in_flight().items() if count}


def evaluated_ledger(num_problems: int = 2, total_steps: int = 1, **section: float) -> Ledger:
    return begun(
        total_steps=total_steps,
        groups_per_step=1,
        max_staleness_steps=0,
        max_in_flight=8,
        plan=eval_plan(num_problems, **section),
    )

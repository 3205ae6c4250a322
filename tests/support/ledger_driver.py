"""A ledger with small numbers, and what its clients would send to it."""

from collections.abc import Sequence
from typing import Any

import msgspec

from slipstream.broker.ledger.admission import StalenessBound
from slipstream.broker.ledger.commands import Ledger
from slipstream.broker.ledger.evaluation import EvalPlan
from slipstream.broker.ledger.groups import Group
from slipstream.broker.ledger.state import BookState, LedgerRules, decode_state, encode_state
from slipstream.wire.messages.broker import LeasedGroup
from slipstream.wire.messages.trajectory import Prompt, Score, TrajectoryHeader, VersionRun
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.settings.sections import EvalSection

LEASE_S = 10.0
RESPONSE_TOKENS = 4


def make_rules(
    *,
    max_staleness_steps: int = 1,
    groups_per_step: int = 2,
    group_size: int = 2,
    total_steps: int = 3,
    max_attempts: int = 3,
    max_in_flight: int | None = None,
    drop_zero_variance: bool = True,
    plan: EvalPlan | None = None,
    max_prompts: int | None = None,
    drop_overlong: bool = False,
    reserves: bool = True,
    **others: Any,  # noqa: ANN401 values of rules
) -> LedgerRules:
    bound = StalenessBound(max_staleness_steps, groups_per_step, reserves)
    return LedgerRules(
        bound=bound,
        group_size=group_size,
        total_steps=total_steps,
        max_attempts=max_attempts,
        max_in_flight=(max_staleness_steps + 1) * groups_per_step
        if max_in_flight is None
        else max_in_flight,
        drop_zero_variance=drop_zero_variance,
        lease_s=LEASE_S,
        eval_plan=plan or EvalPlan(),
        max_prompts=max_prompts,
        drop_overlong=drop_overlong,
        **others,
    )


def eval_plan(num_problems: int, **section: Any) -> EvalPlan:  # noqa: ANN401 values of settings
    """So many problems of one source, and settings of [eval]."""
    return EvalPlan(
        sources=("held_out",) * num_problems, section=EvalSection(file="held_out.jsonl", **section)
    )


def prompt_at(cursor: int) -> Prompt:
    return Prompt(prompt=f"train {cursor}", ground_truth=str(cursor))


def eval_prompt_at(cursor: int) -> Prompt:
    return Prompt(prompt=f"held out {cursor}", ground_truth=str(cursor))


def make_ledger(rules: LedgerRules | None = None, state: BookState | None = None) -> Ledger:
    return Ledger(
        rules or make_rules(), prompt_at=prompt_at, eval_prompt_at=eval_prompt_at, state=state
    )


def stored(state: BookState) -> BookState:
    """What comes back of a state that was written."""
    return decode_state(encode_state(state))


def lease(
    ledger: Ledger,
    holder: str = "generator-0",
    *,
    adopted: PolicyVersion | None = None,
    max_sequences: int = 1_000,
    now_s: float = 0.0,
    num_sharing: int = 1,
) -> list[LeasedGroup]:
    version = adopted if adopted is not None else ledger.book.version
    return ledger.lease(
        holder, version, max_sequences=max_sequences, now_s=now_s, num_sharing=num_sharing
    )


def header(
    group_id: int, sibling: int, *versions: PolicyVersion, lease_id: int = 0
) -> TrajectoryHeader:
    """Two prompt tokens, then ``RESPONSE_TOKENS`` tokens per version."""
    return TrajectoryHeader(
        group_id=group_id,
        sibling=sibling,
        lease_id=lease_id,
        num_prompt_tokens=2,
        num_tokens=2 + RESPONSE_TOKENS * len(versions),
        version_runs=tuple(
            VersionRun(2 + RESPONSE_TOKENS * i, version) for i, version in enumerate(versions)
        ),
        temperature=1.0,
        finish_reason="stop",
    )


def submit(ledger: Ledger, sent: TrajectoryHeader, num_bytes: int = 0) -> bool:
    """Submit as the holder of the newest lease of the group, unless the header names another."""
    group = ledger.book.groups.get(sent.group_id)
    if group is None or not group.lessees:
        return ledger.submit("nobody", sent, num_bytes)
    lease_id = sent.lease_id if sent.lease_id in group.lessees else max(group.lessees)
    sent = msgspec.structs.replace(sent, lease_id=lease_id)
    return ledger.submit(group.lessees[lease_id], sent, num_bytes)


def generate(ledger: Ledger, group: LeasedGroup, version: PolicyVersion | None = None) -> None:
    chosen_by = version if version is not None else ledger.book.version
    for sibling in group.siblings:
        submit(ledger, header(group.group_id, sibling, chosen_by, lease_id=group.lease_id))


def reward(ledger: Ledger, group_id: int, rewards: Sequence[float]) -> None:
    for sibling, value in enumerate(rewards):
        ledger.score(Score(group_id=group_id, sibling=sibling, lease_id=0, reward=value))


def make_ready(
    ledger: Ledger, groups: Sequence[LeasedGroup], version: PolicyVersion | None = None
) -> None:
    """Generate and score whole groups, with rewards that differ."""
    for group in groups:
        generate(ledger, group, version)
        reward(ledger, group.group_id, [float(i) for i in range(len(group.siblings))])


def train_step(ledger: Ledger) -> list[Group]:
    """Deliver and commit the learner's next step."""
    version = ledger.book.version
    batch = ledger.training.deliver(version)
    if not isinstance(batch, list):
        raise TypeError(f"no batch at {version.label}: {batch}")
    ledger.training.commit(version.next(), {})
    return batch


def state_of(ledger: Ledger) -> BookState:
    """Everything that is stored, as it was at this moment."""
    return stored(ledger.book.state)


def with_a_dead_letter(**rules: Any) -> tuple[Ledger, int]:  # noqa: ANN401 values of rules
    """A ledger whose first group got no reward, and the group."""
    ledger = make_ledger(make_rules(groups_per_step=1, max_attempts=2, **rules))
    ledger.training.take_over(ledger.book.step)
    (group,) = lease(ledger, max_sequences=2)
    generate(ledger, group)
    for worker in ("a@1", "b@1"):
        failed = Score(
            group_id=group.group_id,
            sibling=1,
            lease_id=0,
            unavailable="raised ValueError",
            function="my:score",
            version="7",
            excerpt="x" * 9_000,
        )
        ledger.score(failed, worker)
    return ledger, group.group_id

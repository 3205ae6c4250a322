"""The broker's account of all items, for `slipstream ledger`."""

import msgspec

from slipstream.wire.messages.bounds import ByName, Count, Figure, Name, Number, Several, Text
from slipstream.wire.messages.versions import PolicyVersion


class ItemView(msgspec.Struct, frozen=True, kw_only=True):
    """One group that has neither been trained nor dropped."""

    group_id: Count
    item: Name  # train or eval
    position: Count  # position of the prompt in its source
    prompt: Name  # its beginning
    state: Name
    age_s: Figure | None  # since it was issued; None if that was before the broker's last start
    holder: Name = ""  # worker that has its lease
    missing: Several[Count] = ()  # siblings that are not generated yet
    unscored: Several[Count] = ()  # siblings that wait for a reward
    attempts: Count = 0  # leases that ended without all siblings
    deadline: Count | None = None  # last learner step that may train it
    bound_to: Count | None = None  # learner step whose batch it is in


class HolderView(msgspec.Struct, frozen=True, kw_only=True):
    """Leases of one holder."""

    name: Name
    work: Name  # generation or scoring
    leases: Count
    trajectories: Count


class LedgerView(msgspec.Struct, frozen=True, kw_only=True):
    """Counts are groups unless named otherwise.

    issued = trained + dropped + in flight, and unaccounted is the difference.
    """

    run_name: Name
    version: PolicyVersion  # version of the learner
    last_step: Count
    finished: bool
    stop_reason: Text
    group_size: Count
    issued: Count
    trained: Count  # in the present lineage, sealed or not
    sealed: Count  # part of trained: a durable checkpoint holds their step
    dropped: ByName[Count]  # groups by reason
    in_flight: ByName[Count]  # groups by state
    unaccounted: Number
    trajectories: ByName[Count]  # the same equation, flat
    prompts_taken: Count  # position of the next prompt in its source
    prompts: Count | None  # the source ends there; None goes round
    requeued: Count  # groups that went back to be generated again because their payload was gone
    redelivered_steps: Count  # recorded batches that were handed out again after a take-over
    dead_letters: Count  # groups given up, which may be inspected and tried again
    retried: Count  # dead letters that were issued again
    untrained_bytes: Count
    replay_bytes: Count  # payloads of trained steps that no checkpoint holds yet
    replay_steps: Several[Count]  # the steps they belong to
    broker_generation: Count
    store: Text  # server, version and durability
    oldest: Several[ItemView]
    holders: Several[HolderView]

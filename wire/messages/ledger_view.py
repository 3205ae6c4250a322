"""The broker's account of all items, for `slipstream ledger`."""

import msgspec

from slipstream.wire.messages.versions import PolicyVersion


class ItemView(msgspec.Struct, frozen=True, kw_only=True):
    """One group that has neither been trained nor dropped."""

    group_id: int
    item: str  # train or eval
    position: int  # of the prompt in its source
    prompt: str  # its beginning
    state: str
    age_s: float | None  # since it was issued; None if that was before the broker's last start
    holder: str = ""  # worker that has its lease
    missing: tuple[int, ...] = ()  # siblings that are not generated yet
    unscored: tuple[int, ...] = ()  # siblings that wait for a reward
    attempts: int = 0  # leases that ended without all siblings
    deadline: int | None = None  # last learner step that may train it
    bound_to: int | None = None  # learner step whose batch it is in


class HolderView(msgspec.Struct, frozen=True, kw_only=True):
    """Leases of one holder."""

    name: str
    work: str  # generation or scoring
    leases: int
    trajectories: int


class LedgerView(msgspec.Struct, frozen=True, kw_only=True):
    """Counts are groups unless named otherwise.

    issued = trained + dropped + in flight, and unaccounted is the difference.
    """

    run_name: str
    version: PolicyVersion  # of the learner
    last_step: int
    finished: bool
    stop_reason: str
    group_size: int
    issued: int
    trained: int  # in the present lineage, sealed or not
    sealed: int  # of trained: a durable checkpoint holds their step
    dropped: dict[str, int]  # by reason
    in_flight: dict[str, int]  # by state
    unaccounted: int
    trajectories: dict[str, int]  # the same equation, flat
    prompts_taken: int  # position of the next prompt in its source
    prompts: int | None  # the source ends there; None goes round
    requeued: int  # groups that went back to be generated again because their payload was gone
    redelivered_steps: int  # recorded batches that were handed out again after a take-over
    dead_letters: int  # groups given up, which may be inspected and tried again
    retried: int  # dead letters that were issued again
    untrained_bytes: int
    replay_bytes: int  # payloads of trained steps that no checkpoint holds yet
    replay_steps: tuple[int, ...]  # the steps they belong to
    broker_generation: int
    store: str  # server, version and durability
    oldest: tuple[ItemView, ...]
    holders: tuple[HolderView, ...]

"""All that is stored of the items: the state that events change, and its snapshots."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import get_args

import msgspec

from slipstream.broker.ledger.admission import StalenessBound
from slipstream.broker.ledger.evaluation import EvalPlan, EvalRound
from slipstream.broker.ledger.groups import Group, Lease
from slipstream.broker.ledger.throttle import StalenessTarget
from slipstream.wire.messages.dead_letters import DeadLetter
from slipstream.wire.messages.status import EvalPoint
from slipstream.wire.messages.trajectory import MAX_TOKENS, ItemKind
from slipstream.wire.messages.versions import PolicyVersion

REVISION = 2
MAX_DEAD_LETTERS = 1_000  # the oldest make room, and are counted


@dataclass(frozen=True, slots=True)
class LedgerRules:
    """The settings that the ledger obeys."""

    bound: StalenessBound
    group_size: int
    total_steps: int
    max_attempts: int
    max_in_flight: int
    drop_zero_variance: bool
    lease_s: float
    eval_plan: EvalPlan
    max_prompts: int | None = None  # the end of the data; None goes through it again and again
    min_groups: int = 1  # fewest groups that the last step of the data may train
    zero_variance_of: str = ""  # a named part of the reward; empty is the reward itself
    drop_overlong: bool = False  # a group with an answer that was cut off
    max_prompt_tokens: int = MAX_TOKENS
    max_response_tokens: Mapping[ItemKind, int] = field(
        default_factory=lambda: dict.fromkeys(get_args(ItemKind), MAX_TOKENS)
    )
    max_tokens: Mapping[ItemKind, int] = field(  # prompt, context and responses together
        default_factory=lambda: dict.fromkeys(get_args(ItemKind), MAX_TOKENS)
    )
    max_turns: int = MAX_TOKENS  # turns of a trajectory; 0 without an environment
    max_batch_attempts: int = 3  # learners that may end with a batch in hand
    max_token_bytes: int = MAX_TOKENS  # payload bytes per token
    high_water_bytes: int = 1 << 62  # limit of untrained payloads
    max_lease_s: float = 0.0  # in spite of heartbeats; 0 is for ever
    max_history: int = 10_000  # steps remembered of a run without checkpoints
    replay_budget_bytes: int = 1 << 62  # limit of trained payloads without a checkpoint
    prompts_fingerprint: str = ""  # hash of the training prompts, in order
    problems_fingerprint: str = ""  # hash of the held-out problems
    staleness_target: StalenessTarget | None = None  # held below the bound
    max_dead_letters: int = MAX_DEAD_LETTERS


class TrainedStep(msgspec.Struct, frozen=True):
    """Record of a learner step, kept while a learner could go back to before it."""

    groups: tuple[tuple[int, int], ...]  # (group id, position of its prompt)
    staleness: dict[int, int]  # staleness in steps -> tokens


class BookState(msgspec.Struct, kw_only=True):
    """All that is stored. Deadlines of leases are not: after a restart each gets a full term."""

    revision: int = REVISION
    run_id: str = ""  # id in the run folder's identity.json
    life: int = 0
    granted_epoch: int = 0  # the highest of any life, in the present lineage or not
    num_events: int = 0  # events that made this state
    prompts: str  # fingerprint of the training prompts and their order
    problems: str  # fingerprint of the held-out problems
    group_size: int
    bound: StalenessBound  # bound under which the groups in flight were admitted
    last_step: int
    stop_reason: str = ""
    version: PolicyVersion = PolicyVersion(0, 0)  # version of the learner; epoch 0 is no learner
    learner: str = ""  # the incarnation that has the epoch
    awaits_learner: bool = False  # this life of the run has none yet: nothing starts or ends
    learner_left: bool = False  # in order, at the end
    origin: str = ""  # the checkpoint that this life of the run resumed from
    forks: dict[int, int] = msgspec.field(default_factory=dict)  # epoch -> step it started at
    cursor: int = 0
    next_group_id: int = 0
    next_lease_id: int = 0
    issued: int = 0
    trained: int = 0
    sealed: int = 0
    sealed_step: int = 0
    dropped: Counter[str] = msgspec.field(default_factory=Counter)
    ended_leases: Counter[str] = msgspec.field(default_factory=Counter)
    restarted_trajectories: int = 0  # under way when their lease ended: they begin anew
    staleness: Counter[int] = msgspec.field(default_factory=Counter)  # in steps -> trained tokens
    lengths: dict[str, dict[int, int]] = msgspec.field(default_factory=dict)  # see survivorship
    cancelled: Counter[str] = msgspec.field(default_factory=Counter)
    dead_letters: dict[int, DeadLetter] = msgspec.field(default_factory=dict)  # letters by group
    letters_forgotten: int = 0  # there was no room for them
    retried: int = 0
    requeued: int = 0
    redelivered_steps: int = 0
    drops_in_a_row: int = 0  # groups dropped since the last one became ready
    part_names: list[str] = msgspec.field(default_factory=list)  # names of reward parts
    sampled_reward: float = 0.0  # sum over all groups scored since the last step
    sampled_count: int = 0
    untrained_bytes: int = 0
    replay_bytes: int = 0
    groups: dict[int, Group] = msgspec.field(default_factory=dict)
    leases: dict[int, Lease] = msgspec.field(default_factory=dict)
    batches: dict[int, tuple[int, ...]] = msgspec.field(default_factory=dict)  # step -> group ids
    in_hand: tuple[int, ...] = ()  # steps whose batches this learner was given and has not trained
    # Step -> how many learners ended with its batch in hand.
    cut_off: Counter[int] = msgspec.field(default_factory=Counter)
    replay: dict[int, list[Group]] = msgspec.field(default_factory=dict)  # trained, payloads kept
    history: dict[int, TrainedStep] = msgspec.field(default_factory=dict)
    lost: list[tuple[int, int]] = msgspec.field(default_factory=list)  # groups to requeue at once
    eval_rounds: dict[int, EvalRound] = msgspec.field(default_factory=dict)
    eval_points: list[EvalPoint] = msgspec.field(default_factory=list)  # points by step


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[BookState] = msgspec.msgpack.Decoder(
    BookState, dec_hook=lambda _type, counts: Counter(counts)
)


def encode_state(state: BookState) -> bytes:
    """Return a snapshot."""
    return _encoder.encode(state)


def decode_state(data: bytes) -> BookState:
    """Return a snapshot's state; raises msgspec.DecodeError if it has another revision."""
    state = _decoder.decode(data)
    if state.revision != REVISION:
        raise msgspec.DecodeError(f"ledger revision {state.revision}, this broker reads {REVISION}")
    return state


def for_checkpoint(state: BookState) -> BookState:
    """Return the state for a checkpoint of the learner's current step.

    Answers in flight are not part of it: their prompts are to be answered again.
    """
    waiting = [group for group in state.groups.values() if group.item == "train"]
    return msgspec.structs.replace(
        state,
        sealed=state.trained,
        sealed_step=state.version.step,
        untrained_bytes=0,
        replay_bytes=0,
        groups={group.group_id: group.prompt_only() for group in waiting},
        leases={},
        batches={},
        in_hand=(),
        cut_off=Counter(),
        replay={},
        eval_rounds={
            step: EvalRound(step, eval_round.num_problems)
            for step, eval_round in state.eval_rounds.items()
        },
    )

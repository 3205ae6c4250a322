"""Recorded trajectories and dead letters as the page gets them."""

import msgspec

from slipstream.broker.store.item_history import Moment


class Run(msgspec.Struct, frozen=True):
    """Tokens from one on were chosen by this version."""

    first_token: int
    version: str
    step: int


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One line of rollouts/trained.jsonl, as far as it is shown."""

    step: int
    group_id: int
    sibling: int
    prompt: str
    answer: str
    reward: float
    num_prompt_tokens: int
    token_ids: list[int]
    version_runs: list[Run]
    logprob_diffs: list[float]
    parts: dict[str, float] = {}
    finish_reason: str = ""
    temperature: float = 1.0
    token_texts: list[str] = []


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """One recorded trajectory in a list."""

    step: int  # that trained it
    group_id: int
    sibling: int
    lag: int  # learner steps, of its oldest token
    reward: float
    prompt: str  # its beginning
    num_tokens: int  # of the answer


class Found(msgspec.Struct, frozen=True):
    """The newest items that fit."""

    items: list[Item]
    more: bool
    groups: list[int] = []  # requested by name or position, recorded or not


class Letter(msgspec.Struct, frozen=True, kw_only=True):
    """One dead letter in a list."""

    group_id: int
    reason: str
    step: int  # learner steps completed when it was dropped
    prompt: str  # its beginning
    failures: list[str]  # holder and reason of each


class Token(msgspec.Struct, frozen=True):
    """One token of an answer."""

    text: str
    version: str
    lag: int
    diff: float  # logprob of the learner minus that of the engine, nats


class Sibling(msgspec.Struct, frozen=True):
    """Another answer to the same prompt that was recorded."""

    sibling: int
    reward: float


class Trajectory(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about one recorded trajectory; ``found`` is False if there is none."""

    found: bool
    step: int = -1
    group_id: int = -1
    sibling: int = -1
    prompt: str = ""
    reward: float = 0.0
    parts: dict[str, float] = {}
    finish_reason: str = ""
    temperature: float = 1.0
    tokens: list[Token] = []
    life: list[Moment] = []
    siblings: list[Sibling] = []
    outcome: str = ""  # of its group, by the ledger
    failures: list[str] = []  # of a dead letter: holder and reason of each

"""Recorded trajectories and dead letters as the page gets them."""

import msgspec

from slipstream.broker.store.item_history import Moment
from slipstream.wire.files.trained_parts import Excerpt
from slipstream.wire.messages.images import Digest


class VersionTokens(msgspec.Struct, frozen=True):
    """Tokens from one on were chosen by this version."""

    first_token: int
    version: str
    step: int


class TurnTokens(msgspec.Struct, frozen=True):
    """Tokens that the policy chose at one time."""

    first_token: int
    num_tokens: int


class ShownImage(msgspec.Struct, frozen=True):
    """An image of a recorded trajectory, as far as it is shown."""

    digest: Digest


class TrainedRow(msgspec.Struct, frozen=True, kw_only=True):
    """One line of rollouts/trained.jsonl, as far as it is shown."""

    step: int
    group_id: int
    sibling: int
    prompt: str
    answer: str
    reward: float
    num_prompt_tokens: int
    token_ids: list[int]
    version_runs: list[VersionTokens]
    logprob_diffs: list[float]
    parts: dict[str, float] = {}
    finish_reason: str = ""
    temperature: float = 1.0
    token_texts: list[str] = []
    turns: list[TurnTokens] = []  # none: a row of before there were any
    turn_rewards: list[float] = []
    branches: list[int] = []  # first tokens of the second and further ones
    images: list[ShownImage] = []

    @property
    def chosen(self) -> list[tuple[int, int]]:
        """First token and number of tokens of each turn."""
        first = self.num_prompt_tokens
        found = [(turn.first_token, turn.num_tokens) for turn in self.turns]
        return found or [(first, len(self.token_ids) - first)]


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """One recorded trajectory in a list."""

    step: int  # learner step that trained it
    group_id: int
    sibling: int
    lag: int  # learner steps, of its oldest token
    reward: float
    prompt: str  # its beginning
    num_tokens: int  # tokens chosen by the policy
    num_turns: int = 1
    num_branches: int = 1


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
    """One token that the policy chose."""

    text: str
    version: str
    lag: int
    diff: float  # logprob of the learner minus that of the engine, nats


class Stretch(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A turn, whose tokens are among the trajectory's, or the context before one."""

    num_tokens: int
    turn: int = 0  # its number, from 1; 0 is context
    num_drawn: int = 0  # tokens of the turn that are included
    reward: float | None = None  # reward of a turn
    calls: dict[str, int] = {}  # how often a turn calls which tools
    text: Excerpt | None = None  # text of context
    branch: int = 0  # number of the branch that begins here, from 2
    num_shared: int = 0  # tokens that it begins with and an earlier branch too
    shared_with: int = 0  # number of that branch
    shared: Excerpt | None = None  # the text of those


class Sibling(msgspec.Struct, frozen=True):
    """Another answer to the same prompt that was recorded."""

    sibling: int
    reward: float


class Trajectory(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about one recorded trajectory; ``found`` is False without a record."""

    found: bool
    step: int = -1
    group_id: int = -1
    sibling: int = -1
    prompt: str = ""
    reward: float = 0.0
    parts: dict[str, float] = {}
    finish_reason: str = ""
    temperature: float = 1.0
    num_prompt_cut: int = 0  # characters at its end that were left out
    tokens: list[Token] = []  # tokens of all turns, in order
    stretches: list[Stretch] = []  # turns and the context between, in order
    num_turns: int = 1
    num_branches: int = 1
    num_chosen: int = 0  # tokens, those that are not given too
    num_cut: int = 0  # stretches at the end that were left out
    life: list[Moment] = []
    siblings: list[Sibling] = []
    images: list[str] = []  # digests of its images, each once, in order
    outcome: str = ""  # fate of its group in the ledger
    failures: list[str] = []  # failures of a dead letter: holder and reason

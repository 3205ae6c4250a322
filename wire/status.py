"""The state of a run as the broker sees it: what the page, the terminal and the summary show."""

import msgspec

from wire.bus import PublishRecord
from wire.versions import PolicyVersion


class EvalPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One evaluation round."""

    step: int  # learner steps completed when the round was issued
    exact_match: float  # mean reward over all answers of the round
    num_answers: int
    num_dropped: int  # items without an answer; not counted as wrong
    versions: tuple[PolicyVersion, ...]  # that chose at least one token


class RoleStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One process of the run."""

    name: str
    role: str
    age_s: float  # since it said hello
    silent_s: float  # since it was last heard
    busy: float  # share of its time that was not waiting, since it said hello
    phase_seconds: dict[str, float]
    tokens_per_second: float
    adopted: PolicyVersion | None = None
    leases: int = 0


class StepPoint(msgspec.Struct, frozen=True, kw_only=True):
    """What is worth a point on a chart about one learner step."""

    step: int
    at_s: float  # since the run started
    metrics: dict[str, float]


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a person or a test asks a run about."""

    run_name: str
    outcome: str  # running, finished, or why it ended
    elapsed_s: float
    steps: int  # learner steps completed
    total_steps: int
    max_staleness_steps: int
    group_size: int
    groups_per_step: int
    issued: int  # groups of kind train, ever
    trained: int
    dropped: dict[str, int]  # groups by reason
    in_flight: dict[str, int]  # groups by state, neither trained nor dropped
    unaccounted: int  # issued - trained - dropped - in_flight: must read 0
    trajectories: dict[str, int]  # the same equation per trajectory, flat
    staleness_histogram: dict[str, int]  # staleness in steps -> trained tokens
    queue: dict[str, int]  # groups ready, trajectories waiting for a reward, ...
    waiting_for: str  # why the learner has no batch, or empty
    eval: list[EvalPoint]
    steps_history: list[StepPoint]
    publishes: int  # versions that at least one engine adopted
    publishes_while_generating: int
    publish_history: list[PublishRecord]
    tokens_per_second: dict[str, float]  # by role, over the whole run
    busy: dict[str, float]  # by role, mean over its processes
    roles: list[RoleStatus]
    versions: dict[str, str]  # of packages and servers

"""The broker's view of a run, for the page, the terminal and the summary."""

import msgspec

from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.messages.weightbus import MemberState, PublishRecord

REPORT_EVERY_S = 0.5  # every process reports to the broker this often
SILENT_S = 1.5  # three reports are missing: something is wrong with it
GONE_S = 10.0  # it is more than a hiccup


class EvalFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Results of the answers to some held-out problems.

    ``metrics`` holds mean@n (mean reward of all n answers per problem), pass@k for powers of two
    up to n (a right answer among k), response_tokens and truncated (share of answers).
    """

    num_problems: int
    num_answers: int
    num_dropped: int  # problems without an answer; not counted as wrong
    metrics: dict[str, float]


class EvalPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One evaluation round."""

    step: int  # learner steps completed when the round was issued
    overall: EvalFigures
    by_source: dict[str, EvalFigures]
    versions: tuple[PolicyVersion, ...]  # that chose at least one token

    @property
    def mean(self) -> float:
        """Mean reward of all answers of the round."""
        means = (value for name, value in self.overall.metrics.items() if name.startswith("mean@"))
        return next(means, 0.0)


class LengthQuartile(msgspec.Struct, frozen=True, kw_only=True):
    """A quarter of the answers by length, the shortest first."""

    up_to_tokens: int
    trajectories: int
    dropped_for_age: int

    @property
    def dropped_share(self) -> float:
        """Share that was dropped because it took too long."""
        return self.dropped_for_age / self.trajectories if self.trajectories else 0.0


class Survivorship(msgspec.Struct, frozen=True, kw_only=True):
    """Measures whether long answers are trained as often as short ones."""

    generated_mean: float  # response tokens, of all answers that were trained or dropped
    trained_mean: float
    cancelled: int  # answers that were not finished when their group was dropped
    quartiles: list[LengthQuartile]
    alarm: str  # what is wrong and which setting changes it, or empty
    lengths: dict[str, int] = {}  # up to so many response tokens -> answers, of any fate


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over an engine's answers: their tokens L, seconds D, and the sequences n meanwhile."""

    tokens: float  # L
    sequences: float  # L n
    squares: float  # L n^2
    seconds: float  # D
    sequence_seconds: float  # D n

    def __add__(self, other: "Pace") -> "Pace":
        """Return the sums over the answers of both."""
        return Pace(
            tokens=self.tokens + other.tokens,
            sequences=self.sequences + other.sequences,
            squares=self.squares + other.squares,
            seconds=self.seconds + other.seconds,
            sequence_seconds=self.sequence_seconds + other.sequence_seconds,
        )


class RoleStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One process of the run."""

    name: str
    role: str
    age_s: float  # since its Hello
    silent_s: float  # since its last message
    busy: float  # share of its time that was not waiting, since its Hello
    phase_seconds: dict[str, float]
    tokens_per_second: float
    adopted: PolicyVersion | None = None
    leases: int = 0
    trajectories: float = 0.0  # that it finished
    retracted: float = 0.0  # times that an answer was thrown out of the engine's cache
    kv_use: float | None = None  # share of the engine's cache that unfinished answers hold
    sequences: int = 0  # answers that the engine has been given and has not finished
    sequence_limit: int = 0  # how many it may be given at present; 0: not reported
    has_left: bool = False  # it said so: its silence is none
    decision_bytes_per_token: float = 0.0  # of kept tokens and experts that it sent
    probes: float = 0.0  # versions that its engine was proven to compute, or not
    probe_difference: float | None = None  # nats, mean of the last probe
    probe_bound: float | None = None  # nats, the largest that is taken for noise
    acting: int | None = None  # trajectories that environments answer; None: there are none
    environment_failed: float = 0.0  # trajectories whose environment could not go on
    engine_s: float = 0.0  # of all trajectories of several turns, in calls of the engine
    environment_s: float = 0.0  # and outside of it
    pace: Pace | None = None  # of its engine; None: nothing is known
    cpu_cores: float | None = None  # CPU seconds per second, lately, with its children
    memory_bytes: float | None = None  # resident, with its children
    gpu_bytes: float | None = None  # of GPU memory, with its children
    gpu_busy: float | None = None  # share of the time that these GPUs were busy, for whomever


class StepPoint(msgspec.Struct, frozen=True, kw_only=True):
    """A chart's point for one learner step."""

    step: int
    at_s: float  # since the run started
    metrics: dict[str, float]


class ThrottleChange(msgspec.Struct, frozen=True, kw_only=True):
    """What a staleness target changed."""

    step: int  # learner steps completed then
    bound: int  # in force since, in learner steps
    in_flight: int  # groups under way, at most
    reason: str


class ThrottleStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What run.staleness_target holds, and by what."""

    target: str  # as in "p95_lag = 1"
    bound: int  # in force, in learner steps
    in_flight: int  # groups under way, at most
    most_in_flight: int  # that the settings allow
    excess: float | None  # the figure lately over its target; None: not known since the last change
    changes: tuple[ThrottleChange, ...] = ()  # the newest last


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Whole status of a run."""

    run_name: str
    outcome: str  # running, finished, or why it ended
    finished: bool  # all steps trained and all evaluations answered
    stop_reason: str  # why the run ends before total_steps, or empty
    elapsed_s: float
    steps: int  # learner steps completed
    total_steps: int
    max_staleness_steps: int
    group_size: int
    groups_per_step: int
    issued: int  # groups of kind train, ever
    trained: int
    sealed: int  # of trained: a durable checkpoint holds their step
    requeued: int  # groups to be generated again because a lost step's payloads were gone
    dropped: dict[str, int]  # groups by reason
    in_flight: dict[str, int]  # groups by state, neither trained nor dropped
    unaccounted: int  # issued - trained - dropped - in_flight: must read 0
    trajectories: dict[str, int]  # the same equation per trajectory, flat
    staleness_histogram: dict[str, int]  # staleness in steps -> trained tokens
    survivorship: Survivorship
    queue: dict[str, int]  # groups ready, trajectories waiting for a reward, ...
    waiting_for: str  # why the learner has no batch, or empty
    eval: list[EvalPoint]
    steps_history: list[StepPoint]
    publishes: int  # versions that at least one engine adopted
    publishes_while_generating: int
    publish_history: list[PublishRecord]
    members: list[MemberState]  # version of each engine
    tokens_per_second: dict[str, float]  # by role, over the whole run
    busy: dict[str, float]  # by role, mean over its processes
    roles: list[RoleStatus]
    data: dict[str, int]  # rows and rows_skipped of the training prompts, eval_problems
    versions: dict[str, str]  # of packages and servers
    queue_age_s: float | None = None  # how long the oldest ready group has waited; None: none is
    lags_in_flight: dict[str, int] = {}  # present staleness in steps -> groups that are not ready
    lags_in_queue: dict[str, int] = {}  # the same of groups that are ready
    quarantines: int = 0  # engines that did not compute what the learner does, ever
    memory: dict[str, int] = {}  # store_bytes (untrained payloads), rss_bytes of the broker
    throttle: ThrottleStatus | None = None  # of run.staleness_target; None: there is none

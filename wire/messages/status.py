"""The broker's view of a run, for the page, the terminal and the summary."""

import msgspec

from slipstream.wire.messages.bounds import (
    ByName,
    Count,
    Figure,
    Listed,
    Name,
    Number,
    Several,
    Text,
)
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.messages.weightbus import MemberState, PublishRecord

REPORT_EVERY_S = 0.5  # every process reports to the broker this often
SILENT_S = 1.5  # three reports are missing: something is wrong with it
GONE_S = 10.0  # it is more than a hiccup
_SHOWN = 8  # groups that are named


class EvalFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Results of the answers to some held-out problems.

    ``metrics`` holds mean@n (mean reward of all n answers per problem), pass@k for powers of two
    up to n (a right answer among k), response_tokens and truncated (share of answers).
    """

    num_problems: Count
    num_answers: Count
    num_dropped: Count  # problems without an answer; not counted as wrong
    metrics: ByName[Figure]


class EvalPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One evaluation round."""

    step: Count  # learner steps completed when the round was issued
    overall: EvalFigures
    by_source: ByName[EvalFigures]
    versions: Several[PolicyVersion]  # versions that chose at least one token

    @property
    def mean(self) -> float:
        """Mean reward of all answers of the round."""
        means = (value for name, value in self.overall.metrics.items() if name.startswith("mean@"))
        return next(means, 0.0)


class LengthQuartile(msgspec.Struct, frozen=True, kw_only=True):
    """A quarter of the answers by length, the shortest first."""

    up_to_tokens: Count
    trajectories: Count
    dropped_for_age: Count

    @property
    def dropped_share(self) -> float:
        """Share that was dropped because it took too long."""
        return self.dropped_for_age / self.trajectories if self.trajectories else 0.0


class Survivorship(msgspec.Struct, frozen=True, kw_only=True):
    """Measures whether long answers are trained as often as short ones."""

    generated_mean: Figure  # response tokens, of all answers that were trained or dropped
    trained_mean: Figure
    cancelled: Count  # answers that were not finished when their group was dropped
    quartiles: Listed[LengthQuartile]
    alarm: Text  # what is wrong and which setting changes it, or empty
    lengths: ByName[Count] = {}  # up to so many response tokens -> answers, of any fate


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over an engine's answers: their tokens L, seconds D, and the sequences n meanwhile."""

    tokens: Figure  # L
    sequences: Figure  # L n
    squares: Figure  # L n^2
    seconds: Figure  # D
    sequence_seconds: Figure  # D n

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

    name: Name
    role: Name
    age_s: Figure  # since its Hello
    silent_s: Figure  # since its last message
    busy: Figure  # share of its time that was not waiting, since its Hello
    phase_seconds: ByName[Figure]
    tokens_per_second: Figure
    adopted: PolicyVersion | None = None
    leases: Count = 0
    trajectories: Figure = 0.0  # finished trajectories
    retracted: Figure = 0.0  # times that an answer was thrown out of the engine's cache
    kv_use: Figure | None = None  # share of the engine's cache that unfinished answers hold
    sequences: Count = 0  # answers that the engine has been given and has not finished
    sequence_limit: Count = 0  # how many it may be given at present; 0: not reported
    lane_share: Figure | None = None  # a tenant's lanes by its fair share; None: no tenants share
    has_left: bool = False  # left with a Goodbye; its silence is normal
    decision_bytes_per_token: Figure = 0.0  # size of kept tokens and experts that it sent
    probes: Figure = 0.0  # versions that its engine was proven to compute, or not
    probe_difference: Figure | None = None  # nats, mean of the last probe
    probe_bound: Figure | None = None  # nats, the largest that is taken for noise
    acting: Count | None = None  # trajectories that environments answer; None: there are none
    environment_failed: Figure = 0.0  # trajectories whose environment could not go on
    unknown_calls: Figure = 0.0  # calls of unknown tools, by the policy
    unreadable_calls: Figure = 0.0  # calls that stayed in the text: their parser failed
    rewritten: Text = ""  # first difference of the newest history that began a branch
    engine_s: Figure = 0.0  # time of all trajectories of several turns in calls of the engine
    environment_s: Figure = 0.0  # their time outside of the engine
    pace: Pace | None = None  # pace of its engine; None if unknown
    cpu_cores: Figure | None = None  # CPU seconds per second, lately, with its children
    memory_bytes: Figure | None = None  # resident, with its children
    gpu_bytes: Figure | None = None  # GPU memory, with its children
    gpu_busy: Figure | None = None  # share of the time that these GPUs were busy, for whomever


class StepPoint(msgspec.Struct, frozen=True, kw_only=True):
    """A chart's point for one learner step."""

    step: Count
    at_s: Figure  # since the run started
    metrics: ByName[Figure]


class ThrottleChange(msgspec.Struct, frozen=True, kw_only=True):
    """What a staleness target changed."""

    step: Count  # learner steps completed then
    bound: Count  # in force since, in learner steps
    in_flight: Count  # groups under way, at most
    reason: Text


class ThrottleStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What run.staleness_target holds, and by what."""

    target: Name  # target, such as "p95_lag = 1"
    bound: Count  # in force, in learner steps
    in_flight: Count  # groups under way, at most
    most_in_flight: Count  # limit by the settings
    excess: Figure | None  # recent figure over its target; None: unknown since the last change
    changes: Several[ThrottleChange] = ()  # the newest last


class SlowStep(msgspec.Struct, frozen=True, kw_only=True):
    """A learner step that takes many times as long as those before it."""

    step: Count
    seconds: Figure  # since it could begin
    usual_s: Figure  # median of the steps before it
    groups: Several[Count]  # groups of its batch

    @property
    def text(self) -> str:
        """The sentence without its end."""
        more = len(self.groups) - _SHOWN
        groups = ", ".join(map(str, self.groups[:_SHOWN])) + (f" and {more} more" * (more > 0))
        return (
            f"the learner has been training step {self.step} for {self.seconds:.0f} s, those "
            f"before it took {self.usual_s:.3g} s; groups of its batch: {groups}"
        )


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Whole status of a run."""

    run_name: Name
    outcome: Text  # running, finished, or why it ended
    finished: bool  # all steps trained and all evaluations answered
    stop_reason: Text  # why the run ends before total_steps, or empty
    elapsed_s: Figure
    steps: Count  # learner steps completed
    total_steps: Count
    max_staleness_steps: Count
    group_size: Count
    groups_per_step: Count
    issued: Count  # groups of kind train, ever
    trained: Count
    sealed: Count  # part of trained: a durable checkpoint holds their step
    requeued: Count  # groups to be generated again because a lost step's payloads were gone
    dropped: ByName[Count]  # groups by reason
    in_flight: ByName[Count]  # groups by state, neither trained nor dropped
    unaccounted: Number  # issued - trained - dropped - in_flight: must read 0
    trajectories: ByName[Count]  # the same equation per trajectory, flat
    staleness_histogram: ByName[Count]  # staleness in steps -> trained tokens
    survivorship: Survivorship
    queue: ByName[Count]  # groups ready, trajectories waiting for a reward, ...
    waiting_for: Text  # why the learner has no batch, or empty
    eval: Listed[EvalPoint]
    steps_history: Listed[StepPoint]
    publishes: Count  # versions that at least one engine adopted
    publishes_while_generating: Count
    publish_history: Listed[PublishRecord]
    members: Listed[MemberState]  # version of each engine
    tokens_per_second: ByName[Figure]  # rate by role, over the whole run
    busy: ByName[Figure]  # share by role, mean over its processes
    roles: Listed[RoleStatus]
    data: ByName[Count]  # rows and rows_skipped of the training prompts, eval_problems
    versions: ByName[Text]  # versions of packages and servers
    queue_age_s: Figure | None = None  # how long the oldest ready group has waited; None: none is
    lags_in_flight: ByName[Count] = {}  # present staleness in steps -> groups that are not ready
    lags_in_queue: ByName[Count] = {}  # the same of groups that are ready
    quarantines: Count = 0  # engines that did not compute what the learner does, ever
    memory: ByName[Count] = {}  # store_bytes (untrained payloads), rss_bytes of the broker
    throttle: ThrottleStatus | None = None  # state of run.staleness_target; None without a target
    slow_step: SlowStep | None = None  # None: the step under way takes as long as others

"""Names, kinds, units, labels and meanings of all exported metrics."""

from enum import StrEnum
from typing import Literal, TypeAlias

MetricKind: TypeAlias = Literal["counter", "gauge"]


class MetricName(StrEnum):
    """A metric by its name in the code; Prometheus appends ``_total`` to counters.

    A counter goes back where the run does: a learner that takes over at an earlier step trains the
    later ones again.
    """

    kind: MetricKind
    unit: str
    labels: tuple[str, ...]
    meaning: str

    def __new__(
        cls, value: str, kind: MetricKind, unit: str, labels: tuple[str, ...], meaning: str
    ) -> "MetricName":
        """Attach the description of the metric to its name."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.kind, member.unit, member.labels, member.meaning = kind, unit, labels, meaning
        return member

    @property
    def exported(self) -> str:
        """Name under which Prometheus keeps the samples."""
        return f"{self.value}_total" if self.kind == "counter" else self.value

    BUILD = (
        *("slipstream_build_info", "gauge", "1", ("version",)),
        "1, with the version of Slipstream that serves this",
    )
    RUN = (
        *("slipstream_run_info", "gauge", "1", ("run", "outcome")),
        "1, with the name of the run and whether it is running, finished or why it ended",
    )
    LEARNER_STEPS = (
        *("slipstream_learner_steps", "counter", "steps", ()),
        "Learner steps completed",
    )
    TOTAL_STEPS = (
        *("slipstream_total_steps", "gauge", "steps", ()),
        "Learner steps after which the run ends",
    )
    GROUPS_ISSUED = (
        *("slipstream_groups_issued", "counter", "groups", ()),
        "Prompt groups issued for training",
    )
    GROUPS_TRAINED = (
        *("slipstream_groups_trained", "counter", "groups", ()),
        "Prompt groups trained",
    )
    GROUPS_DROPPED = (
        *("slipstream_groups_dropped", "counter", "groups", ("reason",)),
        "Prompt groups dropped",
    )
    GROUPS_IN_FLIGHT = (
        *("slipstream_groups_in_flight", "gauge", "groups", ("state",)),
        "Prompt groups neither trained nor dropped",
    )
    GROUPS_UNACCOUNTED = (
        *("slipstream_groups_unaccounted", "gauge", "groups", ()),
        "issued - trained - dropped - in flight; must read 0",
    )
    GROUPS_WAITING = (
        *("slipstream_groups_waiting", "gauge", "groups", ("place", "staleness_steps")),
        "Prompt groups in_flight or ready in the queue, by their staleness as of now",
    )
    TRAINED_TOKENS = (
        *("slipstream_trained_tokens", "counter", "tokens", ("staleness_steps",)),
        "Tokens trained, by staleness in learner steps",
    )
    QUEUE_DEPTH = (
        *("slipstream_queue_depth", "gauge", "items", ("queue",)),
        "Groups ready or leased, trajectories to be scored, dead letters, refused messages",
    )
    QUEUE_AGE = (
        *("slipstream_queue_age_seconds", "gauge", "seconds", ()),
        "How long the oldest ready group has waited; absent while none is ready",
    )
    TOKENS_PER_SECOND = (
        *("slipstream_tokens_per_second", "gauge", "tokens per second", ("role",)),
        "Tokens generated and trained per second, over the whole run",
    )
    ROLE_BUSY_RATIO = (
        *("slipstream_role_busy_ratio", "gauge", "share from 0 to 1", ("name", "role")),
        "Share of time that a process did not wait, since its start",
    )
    ROLE_PHASE_SECONDS = (
        *("slipstream_role_phase_seconds", "counter", "seconds", ("name", "role", "phase")),
        "Where the time of a process went; its rate over phase = wait is idleness",
    )
    ROLE_SILENT_SECONDS = (
        *("slipstream_role_silent_seconds", "gauge", "seconds", ("name", "role")),
        "Time since the last message of a process that has not left; all report twice a second",
    )
    ADOPTED_STEP = (
        *("slipstream_adopted_step", "gauge", "steps", ("name",)),
        "Learner step of the weights that a generator runs",
    )
    SEQUENCES = (
        *("slipstream_sequences", "gauge", "sequences", ("name",)),
        "Answers that an engine has been given and has not finished",
    )
    SEQUENCE_LIMIT = (
        *("slipstream_sequence_limit", "gauge", "sequences", ("name",)),
        "How many answers an engine may be given at a time, at present (generators.concurrency)",
    )
    KV_USE = (
        *("slipstream_kv_use_ratio", "gauge", "share from 0 to 1", ("name",)),
        "Share of an engine's KV cache that unfinished answers hold",
    )
    RETRACTIONS = (
        *("slipstream_retractions", "counter", "retractions", ("name",)),
        "Times that an engine threw an answer out of its KV cache for want of room",
    )
    ACTING = (
        *("slipstream_acting_trajectories", "gauge", "trajectories", ("name",)),
        "Trajectories of several turns that are not in the engine: their environment answers",
    )
    ENVIRONMENT_FAILURES = (
        *("slipstream_environment_failures", "counter", "trajectories", ("name",)),
        "Trajectories whose environment could not go on; they are tried again",
    )
    REJECTED_CALLS = (
        *("slipstream_rejected_calls", "counter", "calls", ("name", "why")),
        "Calls of the policy that reached no tool: unknown by name, or unreadable to their parser",
    )
    TRAJECTORY_SECONDS = (
        *("slipstream_trajectory_seconds", "counter", "seconds", ("name", "where")),
        "Time of ended trajectories of several turns in the engine, and in their environment",
    )
    DECISION_BYTES = (
        *("slipstream_decision_bytes_per_token", "gauge", "bytes per token", ("name",)),
        "What a generator sends beside a response token for the learner to repeat: kept tokens, "
        "experts",
    )
    ENGINE_STATE = (
        *("slipstream_engine_state", "gauge", "1", ("name", "state")),
        "1 for the state that an engine is in: current, behind, receiving or torn",
    )
    QUARANTINES = (
        *("slipstream_quarantines", "counter", "engines", ()),
        "Engines that did not compute what the learner does, and were started again",
    )
    PROBES = (
        *("slipstream_probes", "counter", "versions", ("name",)),
        "Versions that an engine computed a probe of, since its start",
    )
    PROBE_DIFFERENCE = (
        *("slipstream_probe_difference", "gauge", "nats", ("name",)),
        "Mean difference from the learner's logprobs of the newest probe",
    )
    PROBE_BOUND = (
        *("slipstream_probe_bound", "gauge", "nats", ("name",)),
        "Mean difference up to which a probe is taken for noise",
    )
    PUBLISHES = (
        *("slipstream_publishes", "counter", "versions", ()),
        "Policy versions that at least one engine adopted",
    )
    PUBLISH_SECONDS = (
        *("slipstream_last_publish_seconds", "gauge", "seconds", ("phase",)),
        "Time of each phase of the newest publish, for the slowest engine",
    )
    PUBLISH_FETCHED = (
        *("slipstream_last_publish_fetched_bytes", "gauge", "bytes", ("name",)),
        "What each agent fetched over the relay's socket in the newest publish; deltas are fewer",
    )
    MEMORY = (
        *("slipstream_memory_bytes", "gauge", "bytes", ("of",)),
        "Untrained payloads in the store (store_bytes) and memory of the broker (rss_bytes)",
    )
    EVALUATION = (
        *("slipstream_evaluation", "gauge", "as the metric", ("metric",)),
        "Figures of the newest evaluation",
    )
    EVALUATION_STEP = (
        *("slipstream_evaluation_step", "gauge", "steps", ()),
        "Learner step of the newest evaluation",
    )
    ADVISORY = (
        *("slipstream_advisory", "gauge", "1", ("rule", "level")),
        "1 for each sentence of advice on the page, by its section in docs/operations.md",
    )
    LAST_STEP = (
        *("slipstream_last_step", "gauge", "as the figure", ("name",)),
        "Figures of the newest learner step, such as staleness/mismatch_kl or throughput/mfu",
    )

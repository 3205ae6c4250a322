"""Names, units and meanings of all exported metrics."""

from enum import StrEnum


class MetricName(StrEnum):
    """A metric as Prometheus sees it; counters get ``_total`` appended there."""

    meaning: str

    def __new__(cls, value: str, meaning: str) -> "MetricName":
        """Attach the help text to the name."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.meaning = meaning
        return member

    LEARNER_STEPS = "slipstream_learner_steps", "Learner steps completed"
    GROUPS_ISSUED = "slipstream_groups_issued", "Prompt groups issued for training"
    GROUPS_TRAINED = "slipstream_groups_trained", "Prompt groups trained"
    GROUPS_DROPPED = "slipstream_groups_dropped", "Prompt groups dropped, by reason"
    GROUPS_IN_FLIGHT = "slipstream_groups_in_flight", "Prompt groups in flight, by state"
    GROUPS_UNACCOUNTED = (
        "slipstream_groups_unaccounted",
        "issued - trained - dropped - in flight; must read 0",
    )
    TRAINED_TOKENS = "slipstream_trained_tokens", "Tokens trained, by staleness in learner steps"
    QUEUE_DEPTH = "slipstream_queue_depth", "Items waiting, by queue"
    TOKENS_PER_SECOND = "slipstream_tokens_per_second", "Tokens per second over the run, by role"
    ROLE_BUSY_RATIO = "slipstream_role_busy_ratio", "Share of time not spent waiting, by process"
    ADOPTED_STEP = "slipstream_adopted_step", "Step of the weights each generator runs"
    PUBLISHES = "slipstream_publishes", "Policy versions adopted by at least one engine"
    EVALUATION = "slipstream_evaluation", "Figures of the newest evaluation, by metric"
    LAST_STEP = "slipstream_last_step", "Figures of the newest learner step, by name"

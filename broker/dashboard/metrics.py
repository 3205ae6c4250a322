"""The state of the run as Prometheus metrics."""

from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import TypeAlias

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from typing_extensions import override

from slipstream.broker.advisories.view import Advisory
from slipstream.wire.messages.metrics import MetricName
from slipstream.wire.messages.status import RunStatus

Samples: TypeAlias = Mapping[tuple[str, ...], float]  # by the values of the labels


class _StatusCollector(Collector):
    """Turns one state into metric families."""

    def __init__(self, status: RunStatus, advisories: Sequence[Advisory]) -> None:
        self._samples = _samples(status) | {
            MetricName.ADVISORY: {(one.rule, one.level): 1.0 for one in advisories}
        }

    @override
    def collect(self) -> Iterable[Metric]:
        """Yield every metric; names and units are in wire/messages/metrics.py."""
        for name, samples in self._samples.items():
            if samples:
                kind = CounterMetricFamily if name.kind == "counter" else GaugeMetricFamily
                family = kind(name, name.meaning, labels=name.labels)
                for labels, value in samples.items():
                    family.add_metric(labels, value)
                yield family


def render_metrics(status: RunStatus, advisories: Sequence[Advisory] = ()) -> tuple[bytes, str]:
    """Return the exposition text and its content type."""
    registry = CollectorRegistry()
    registry.register(_StatusCollector(status, advisories))
    return generate_latest(registry), CONTENT_TYPE_LATEST


def _samples(status: RunStatus) -> dict[MetricName, Samples]:
    s = status
    engines = [role for role in s.roles if role.sequence_limit]
    acting = [role for role in s.roles if role.acting is not None]
    places = (("in_flight", s.lags_in_flight), ("queue", s.lags_in_queue))
    last_publish = s.publish_history[-1].phase_seconds if s.publish_history else {}
    last_fetched = s.publish_history[-1].fetched_bytes if s.publish_history else {}
    return {
        MetricName.BUILD: {(version("slipstream"),): 1.0},
        MetricName.RUN: {(s.run_name, s.outcome): 1.0},
        MetricName.LEARNER_STEPS: {(): s.steps},
        MetricName.TOTAL_STEPS: {(): s.total_steps},
        MetricName.GROUPS_ISSUED: {(): s.issued},
        MetricName.GROUPS_TRAINED: {(): s.trained},
        MetricName.GROUPS_DROPPED: _by_one(s.dropped),
        MetricName.GROUPS_IN_FLIGHT: _by_one(s.in_flight),
        MetricName.GROUPS_UNACCOUNTED: {(): s.unaccounted},
        MetricName.GROUPS_WAITING: {
            (place, lag): count for place, lags in places for lag, count in lags.items()
        },
        MetricName.TRAINED_TOKENS: _by_one(s.staleness_histogram),
        MetricName.QUEUE_DEPTH: _by_one(s.queue),
        MetricName.QUEUE_AGE: {} if s.queue_age_s is None else {(): s.queue_age_s},
        MetricName.TOKENS_PER_SECOND: _by_one(s.tokens_per_second),
        MetricName.ROLE_BUSY_RATIO: {
            (role.name, role.role): role.busy for role in s.roles if role.phase_seconds
        },
        MetricName.ROLE_PHASE_SECONDS: {
            (role.name, role.role, phase): seconds
            for role in s.roles
            for phase, seconds in role.phase_seconds.items()
        },
        MetricName.ROLE_SILENT_SECONDS: {
            (role.name, role.role): role.silent_s
            for role in s.roles
            if not (role.has_left or s.finished)
        },
        MetricName.ADOPTED_STEP: {
            (role.name,): role.adopted.step for role in s.roles if role.adopted is not None
        },
        MetricName.SEQUENCES: {(one.name,): one.sequences for one in engines},
        MetricName.SEQUENCE_LIMIT: {(one.name,): one.sequence_limit for one in engines},
        MetricName.KV_USE: {(one.name,): one.kv_use for one in engines if one.kv_use is not None},
        MetricName.RETRACTIONS: {(one.name,): one.retracted for one in engines},
        MetricName.ACTING: {(one.name,): one.acting or 0 for one in acting},
        MetricName.ENVIRONMENT_FAILURES: {(one.name,): one.environment_failed for one in acting},
        MetricName.REJECTED_CALLS: {
            (one.name, why): count
            for one in acting
            for why, count in (("unknown", one.unknown_calls), ("unreadable", one.unreadable_calls))
        },
        MetricName.TRAJECTORY_SECONDS: {
            (one.name, where): seconds
            for one in acting
            for where, seconds in (("engine", one.engine_s), ("environment", one.environment_s))
        },
        MetricName.DECISION_BYTES: {(one.name,): one.decision_bytes_per_token for one in engines},
        MetricName.ENGINE_STATE: {(one.name, one.state): 1.0 for one in s.members},
        MetricName.QUARANTINES: {(): s.quarantines},
        MetricName.PROBES: {(one.name,): one.probes for one in engines},
        MetricName.PROBE_DIFFERENCE: {
            (one.name,): one.probe_difference for one in engines if one.probe_difference is not None
        },
        MetricName.PROBE_BOUND: {
            (one.name,): one.probe_bound for one in engines if one.probe_bound is not None
        },
        MetricName.PUBLISHES: {(): s.publishes},
        MetricName.PUBLISH_SECONDS: _by_one(last_publish),
        MetricName.PUBLISH_FETCHED: _by_one(last_fetched),
        MetricName.MEMORY: _by_one(s.memory),
        MetricName.EVALUATION: _by_one(s.eval[-1].overall.metrics if s.eval else {}),
        MetricName.EVALUATION_STEP: {(): s.eval[-1].step} if s.eval else {},
        MetricName.LAST_STEP: _by_one(s.steps_history[-1].metrics if s.steps_history else {}),
    }


def _by_one(values: Mapping[str, float]) -> Samples:
    return {(key,): value for key, value in values.items()}

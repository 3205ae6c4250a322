"""The state of the run as Prometheus metrics."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import TypeAlias

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from typing_extensions import override

from slipstream.broker.advisories.view import Advisory
from slipstream.wire.messages.metrics import MetricName
from slipstream.wire.messages.status import RoleStatus, RunStatus

Samples: TypeAlias = Mapping[tuple[str, ...], float]  # values by labels


class _StatusCollector(Collector):
    """Turns one state into metric families."""

    def __init__(self, status: RunStatus, advisories: Sequence[Advisory]) -> None:
        self._samples = _samples(status) | {
            MetricName.ADVISORY: {(advice.rule, advice.level): 1.0 for advice in advisories}
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
    newest = status.publish_history[-1] if status.publish_history else None
    places = (("in_flight", status.lags_in_flight), ("queue", status.lags_in_queue))
    return {
        MetricName.BUILD: {(version("slipstream"),): 1.0},
        MetricName.RUN: {(status.run_name, status.outcome): 1.0},
        MetricName.LEARNER_STEPS: {(): status.steps},
        MetricName.TOTAL_STEPS: {(): status.total_steps},
        MetricName.GROUPS_ISSUED: {(): status.issued},
        MetricName.GROUPS_TRAINED: {(): status.trained},
        MetricName.GROUPS_DROPPED: _by_one(status.dropped),
        MetricName.GROUPS_IN_FLIGHT: _by_one(status.in_flight),
        MetricName.GROUPS_UNACCOUNTED: {(): status.unaccounted},
        MetricName.GROUPS_WAITING: {
            (place, lag): count for place, lags in places for lag, count in lags.items()
        },
        MetricName.TRAINED_TOKENS: _by_one(status.staleness_histogram),
        MetricName.QUEUE_DEPTH: _by_one(status.queue),
        MetricName.QUEUE_AGE: {} if status.queue_age_s is None else {(): status.queue_age_s},
        MetricName.TOKENS_PER_SECOND: _by_one(status.tokens_per_second),
        **_role_samples(status),
        **_engine_samples(status),
        MetricName.QUARANTINES: {(): status.quarantines},
        MetricName.PUBLISHES: {(): status.publishes},
        MetricName.PUBLISH_SECONDS: _by_one(newest.phase_seconds if newest else {}),
        MetricName.PUBLISH_FETCHED: _by_one(newest.fetched_bytes if newest else {}),
        MetricName.MEMORY: _by_one(status.memory),
        MetricName.EVALUATION: _by_one(status.eval[-1].overall.metrics if status.eval else {}),
        MetricName.EVALUATION_STEP: {(): status.eval[-1].step} if status.eval else {},
        MetricName.LAST_STEP: _by_one(
            status.steps_history[-1].metrics if status.steps_history else {}
        ),
    }


def _role_samples(status: RunStatus) -> dict[MetricName, Samples]:
    roles = status.roles
    return {
        MetricName.ROLE_BUSY_RATIO: {
            (role.name, role.role): role.busy for role in roles if role.phase_seconds
        },
        MetricName.ROLE_PHASE_SECONDS: {
            (role.name, role.role, phase): seconds
            for role in roles
            for phase, seconds in role.phase_seconds.items()
        },
        MetricName.ROLE_SILENT_SECONDS: {
            (role.name, role.role): role.silent_s
            for role in roles
            if not (role.has_left or status.finished)
        },
    }


def _engine_samples(status: RunStatus) -> dict[MetricName, Samples]:
    engines = [role for role in status.roles if role.sequence_limit]
    acting = [role for role in status.roles if role.acting is not None]

    def of_each(figure: Callable[[RoleStatus], float | None]) -> Samples:
        known = ((engine.name, figure(engine)) for engine in engines)
        return {(name,): value for name, value in known if value is not None}

    samples: dict[MetricName, Samples] = {
        MetricName.ADOPTED_STEP: {
            (role.name,): role.adopted.step for role in status.roles if role.adopted is not None
        },
        MetricName.ACTING: {(role.name,): role.acting or 0 for role in acting},
        MetricName.ENVIRONMENT_FAILURES: {(role.name,): role.environment_failed for role in acting},
        MetricName.ENGINE_STATE: {(engine.name, engine.state): 1.0 for engine in status.members},
    }
    rejected: dict[tuple[str, ...], float] = {}
    seconds: dict[tuple[str, ...], float] = {}
    for role in acting:
        rejected[role.name, "unknown"] = role.unknown_calls
        rejected[role.name, "unreadable"] = role.unreadable_calls
        seconds[role.name, "engine"] = role.engine_s
        seconds[role.name, "environment"] = role.environment_s
    return samples | {
        MetricName.REJECTED_CALLS: rejected,
        MetricName.TRAJECTORY_SECONDS: seconds,
        MetricName.SEQUENCES: of_each(lambda engine: engine.sequences),
        MetricName.SEQUENCE_LIMIT: of_each(lambda engine: engine.sequence_limit),
        MetricName.KV_USE: of_each(lambda engine: engine.kv_use),
        MetricName.RETRACTIONS: of_each(lambda engine: engine.retracted),
        MetricName.DECISION_BYTES: of_each(lambda engine: engine.decision_bytes_per_token),
        MetricName.PROBES: of_each(lambda engine: engine.probes),
        MetricName.PROBE_DIFFERENCE: of_each(lambda engine: engine.probe_difference),
        MetricName.PROBE_BOUND: of_each(lambda engine: engine.probe_bound),
    }


def _by_one(values: Mapping[str, float]) -> Samples:
    return {(key,): value for key, value in values.items()}

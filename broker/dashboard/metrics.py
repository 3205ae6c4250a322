"""The state of the run as Prometheus metrics."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from typing_extensions import override

from wire.metrics import MetricName
from wire.status import RunStatus


class _StatusCollector(Collector):
    """Turns one state into metric families."""

    def __init__(self, status: RunStatus) -> None:
        self._status = status

    @override
    def collect(self) -> Iterable[Metric]:
        """Yield every metric; names and units stand in wire/metrics.py."""
        s = self._status
        yield _counter(MetricName.LEARNER_STEPS, s.steps)
        yield _counter(MetricName.GROUPS_ISSUED, s.issued)
        yield _counter(MetricName.GROUPS_TRAINED, s.trained)
        yield _gauge(MetricName.GROUPS_UNACCOUNTED, s.unaccounted)
        yield _counter(MetricName.PUBLISHES, s.publishes)
        yield _labelled(MetricName.GROUPS_DROPPED, "reason", s.dropped)
        yield _labelled(MetricName.GROUPS_IN_FLIGHT, "state", s.in_flight)
        yield _labelled(MetricName.TRAINED_TOKENS, "staleness_steps", s.staleness_histogram)
        yield _labelled(MetricName.QUEUE_DEPTH, "queue", s.queue)
        yield _labelled(MetricName.TOKENS_PER_SECOND, "role", s.tokens_per_second)
        yield _labelled(
            MetricName.ROLE_BUSY_RATIO, "name", {role.name: role.busy for role in s.roles}
        )
        yield _labelled(
            MetricName.ADOPTED_STEP,
            "name",
            {role.name: role.adopted.step for role in s.roles if role.adopted is not None},
        )
        if s.eval:
            yield _labelled(MetricName.EVALUATION, "metric", s.eval[-1].overall.metrics)
        if s.steps_history:
            yield _labelled(MetricName.LAST_STEP, "name", s.steps_history[-1].metrics)


def render_metrics(status: RunStatus) -> tuple[bytes, str]:
    """Return the exposition text and its content type."""
    registry = CollectorRegistry()
    registry.register(_StatusCollector(status))
    return generate_latest(registry), CONTENT_TYPE_LATEST


def _counter(name: MetricName, value: float) -> Metric:
    return CounterMetricFamily(name, name.meaning, value=value)


def _gauge(name: MetricName, value: float) -> Metric:
    return GaugeMetricFamily(name, name.meaning, value=value)


def _labelled(name: MetricName, label: str, values: dict[str, int] | dict[str, float]) -> Metric:
    family = GaugeMetricFamily(name, name.meaning, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family

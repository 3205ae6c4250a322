"""Pure: the one figure of an evaluation that ranks checkpoints (eval.metric)."""

from slipstream.wire.errors import ConfigError
from slipstream.wire.messages.status import EvalPoint


def metric_of(point: EvalPoint, metric: str) -> float | None:
    """Return a round's figure; None if the round has no answers for it.

    Args:
        point: the round.
        metric: "mean" (the one mean@n there is), "pass@K", or either after "SOURCE:".
    """
    source, colon, name = metric.rpartition(":")
    figures = point.by_source.get(source) if colon else point.overall
    if figures is None or not figures.num_answers:
        return None
    if name != "mean":
        return figures.metrics.get(name)
    means = (value for key, value in figures.metrics.items() if key.startswith("mean@"))
    return next(means, None)


def check_metric(metric: str, *, samples: int, sources: set[str]) -> None:
    """Refuse a metric that no round of these sources and answers per problem would have.

    Raises:
        ConfigError: naming eval.metric and the known ones.
    """
    source, colon, name = metric.rpartition(":")
    names = ["mean", *(f"pass@{k}" for k in pass_counts(samples))]
    if name not in names:
        raise ConfigError(
            f"eval.metric = {metric!r}: with eval.samples = {samples} there are {', '.join(names)}"
        )
    if colon and source not in sources:
        raise ConfigError(
            f"eval.metric = {metric!r}: the data sources are {', '.join(sorted(sources))}"
        )


def pass_counts(samples: int) -> list[int]:
    """Return the k of pass@k: powers of two up to the answers per problem, and that number."""
    powers = [2**i for i in range(samples.bit_length()) if 2**i <= samples]
    return sorted({*powers, samples})

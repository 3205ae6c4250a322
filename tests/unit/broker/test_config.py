"""Settings of the broker that contradict each other."""

import re

import pytest

from slipstream.broker.config import broker_settings
from slipstream.wire.errors import ConfigError


@pytest.mark.parametrize(
    ("run", "why"),
    [
        ({"staleness_target": {"p95_lag": 1, "mismatch_kl": 0.1}}, "one of them"),
        ({"staleness_target": {"p95_lag": 2}}, "expected less than run.max_staleness_steps = 2"),
        ({"staleness_target": {"p95_lag": 0}, "mode": "sync"}, "which is 0"),
        ({"staleness_target": {"mismatch_kl": 0.0}}, "mismatch_kl"),
        ({"staleness_target": {"p95_lag": 1}, "staleness_mode": "drop"}, "long answers first"),
    ],
)
def test_a_staleness_target_that_means_nothing_is_refused(run: dict[str, object], why: str):
    with pytest.raises(ConfigError, match=re.escape(why)):
        broker_settings(
            {"run": {"model": "m", "max_staleness_steps": 2, **run}, "data": {"file": "d.jsonl"}}
        )

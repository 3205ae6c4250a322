import logging

import pytest

from slipstream.wire.process.rate_limited_log import RateLimitedLog


def test_a_line_that_is_said_a_thousand_times_is_logged_once_a_minute(
    caplog: pytest.LogCaptureFixture,
):
    now = 0.0
    rarely = RateLimitedLog(logging.getLogger("rarely"), now=lambda: now)
    for number in range(1_000):
        rarely.say("nonsense %d", number)
    now = 60.0
    rarely.say("nonsense %d", 7)
    assert [record.getMessage() for record in caplog.records] == [
        "nonsense 0",
        "nonsense 7 (1000 such lines in the last minute or more)",
    ]

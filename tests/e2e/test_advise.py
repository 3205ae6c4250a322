"""Advice fitted on a real run, held to a second one with another split."""

import json
from pathlib import Path

import pytest

from slipstream.deploy.predict.advise.expect import TRUSTED, advise
from slipstream.deploy.predict.advise.record import record_of
from tests.support.paced_run import paced_run
from tests.support.tiny_run import slipstream

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_a_run_predicts_a_second_one_with_another_generator(tmp_path: Path):
    first = paced_run(tmp_path / "a", generators=1)
    assert first.wait() == 0, first.output
    told = advise(record_of(first.folder))
    assert told.simulated_s == pytest.approx((told.measured_s, told.measured_s), rel=TRUSTED)
    (more,) = [one for one in told.changes if one.setting == "generators.count = 2"]
    printed = json.loads(slipstream("plan", "--advise", first.folder, "--json"))
    assert printed["measured_s"] == told.measured_s
    second = paced_run(tmp_path / "b", generators=2)
    assert second.wait() == 0, second.output
    measured_s = record_of(second.folder).step_s
    assert measured_s < 0.9 * told.measured_s, "another split made no difference to be predicted"
    assert more.step_s == pytest.approx((measured_s, measured_s), rel=TRUSTED)

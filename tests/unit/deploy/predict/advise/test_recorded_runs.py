"""Two real runs that were recorded: the first predicts the second, and the second the first."""

from pathlib import Path

import msgspec
import pytest

from slipstream.deploy.predict.advise.expect import TRUSTED, advise
from slipstream.deploy.predict.advise.record import Record

FILE = Path(__file__).parents[4] / "golden" / "advise" / "two_runs.json"


class TwoRuns(msgspec.Struct, forbid_unknown_fields=True):
    about: str
    first: Record  # one generator
    second: Record  # two, and nothing else is different


@pytest.mark.parametrize("number", [2, 1])
def test_a_recorded_run_predicts_another_one_with_another_split(number: int):
    runs = msgspec.json.decode(FILE.read_bytes(), type=TwoRuns)
    known, other = (runs.first, runs.second) if number == 2 else (runs.second, runs.first)
    told = advise(known)
    assert told.simulated_s == pytest.approx((known.step_s, known.step_s), rel=TRUSTED)
    (change,) = [one for one in told.changes if one.setting == f"generators.count = {number}"]
    assert abs(other.step_s / known.step_s - 1) > 0.2, "nothing to be predicted"
    assert change.step_s == pytest.approx((other.step_s, other.step_s), rel=TRUSTED)

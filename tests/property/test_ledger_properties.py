"""No schedule of leases, answers, faults and resumes breaks what the ledger promises."""

import pytest

from tests.property.ledger_run import Run
from tests.property.schedules import draw_schedules, profile

TestRun = Run.TestCase
TestRun.settings = profile(100, 60, is_fixed=True)


@pytest.mark.slow  # `make test` has the same rules, always in the same order
def test_new_schedules_break_nothing_either():
    draw_schedules(Run, steps=80)
    print(dict(Run.begun))  # noqa: T201 what happened in them

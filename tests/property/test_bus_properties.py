"""No schedule of publishes and faults has an engine run a mixture, or hold up the others."""

import pytest

from tests.property.bus_run import Bus
from tests.property.schedules import draw_schedules, profile

TestBus = Bus.TestCase
TestBus.settings = profile(150, 60, is_fixed=True)


@pytest.mark.slow  # `make test` has the same rules, always in the same order
def test_new_schedules_mix_nothing_and_all_arrive():
    draw_schedules(Bus, steps=80)
    print(Bus.begun)  # noqa: T201 what happened in them

"""Kills and stops at random moments: the run completes, and every prompt is accounted for."""

from pathlib import Path

import pytest

from tests.chaos.harness import chaos_run, disturb

pytestmark = [pytest.mark.integration, pytest.mark.redis, pytest.mark.timeout(280)]


def test_a_run_that_nobody_disturbs_completes(folder: Path):
    with chaos_run(folder, prompts=40) as it:
        it.start()
        it.finish(timeout_s=60)
        view = it.assert_nothing_was_lost(40)
        assert view.redelivered_steps == view.requeued == 0


def test_a_run_of_twelve_kills_and_three_stops_loses_nothing(folder: Path):
    with chaos_run(folder, prompts=500, seed=1) as it:
        it.start()
        disturb(it, kills=12, stops=3)
        it.finish(timeout_s=150)
        view = it.assert_nothing_was_lost(500)
        assert sum(n for what, n in it.done.items() if what.startswith("kill")) == 12
        assert view.broker_generation > 1

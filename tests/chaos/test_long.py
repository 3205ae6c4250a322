"""The long ones: `make chaos`."""

from pathlib import Path

import pytest

from tests.chaos.harness import chaos_run, disturb

pytestmark = [pytest.mark.integration, pytest.mark.redis, pytest.mark.chaos]


def test_a_run_of_two_hundred_kills_loses_nothing(folder: Path):
    prompts = 8_000
    with chaos_run(folder, prompts=prompts, seed=11) as it:
        it.start()
        disturb(it, kills=200, stops=20)
        it.finish()
        view = it.assert_nothing_was_lost(prompts)
        kills = {what: n for what, n in it.done.items() if what.startswith("kill")}
        assert sum(kills.values()) == 200
        print(f"\n{dict(it.done)}\n{view}")  # noqa: T201 what a person wants to see of it


@pytest.mark.parametrize("seed", [21, 22, 23])
def test_in_drop_mode_nothing_is_lost_either(folder: Path, seed: int):
    mode = {"run__staleness_mode": "drop", "run__max_staleness_steps": 1}
    with chaos_run(folder, prompts=900, seed=seed, **mode) as it:
        it.start()
        disturb(it, kills=20, stops=5)
        it.finish()
        view = it.assert_nothing_was_lost(900)
        assert view.dropped.get("stale", 0) > 0

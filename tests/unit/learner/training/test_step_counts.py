"""Counts of updates in the loaded state of several optimizers."""

from typing import Any

from slipstream.learner.training.step_counts import share_steps


def test_every_part_with_parameters_has_the_count_of_the_first_rank():
    moments = {"exp_avg": 1.0}
    state: dict[int, Any] = {
        0: {"optimizer": {"state": {"common_step": 3, 0: moments}}},
        1: {"optimizer": {"state": {0: moments}}},
        2: {"optimizer": {"state": {}}},
    }
    share_steps(state)
    counts = [part["optimizer"]["state"].get("common_step") for part in state.values()]
    assert counts == [3, 3, None]


def test_the_count_of_a_single_optimizer_stays():
    state = {"state": {"common_step": 3, 0: {}}, "param_groups": []}
    share_steps(state)
    assert state == {"state": {"common_step": 3, 0: {}}, "param_groups": []}

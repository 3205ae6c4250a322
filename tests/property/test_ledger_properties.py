"""No schedule of leases, answers, faults and resumes breaks what the ledger promises."""

from typing import Any

import pytest

from slipstream.wire.messages.versions import PolicyVersion
from tests.property.ledger_run import Run
from tests.property.schedules import draw_schedules, play, profile

TestRun = Run.TestCase
TestRun.settings = profile(100, 60, is_fixed=True)
TWO_STEPS: dict[str, Any] = {
    "staleness": 0,
    "groups_per_step": 1,
    "group_size": 2,
    "total_steps": 2,
    "held_out": 0,
    "every_steps": 0,
    "samples": 1,
    "max_in_flight": 100,
    "epochs": 0,
    "min_groups": 1,
    "reserves": True,
    "replay_budget": 1_000_000,
    "high_water": 1_000_000,
}


def goes_back(store: str = "kept") -> tuple[str, dict[str, Any]]:
    """To the checkpoint before the newest."""
    return "everything_dies_and_goes_on", {"older": 1, "past": 1, "store": store}


@pytest.mark.parametrize(
    "then",
    [
        [goes_back()],
        [("learner_dies_and_is_replaced", {"again": None}), goes_back("cut")],
        [goes_back("emptied")],
        [
            ("newest_checkpoint_is_damaged", {"how": "tensors"}),
            ("learner_dies_and_is_replaced", {"again": True}),
        ],
    ],
)
def test_a_ledger_that_began_apart_takes_no_label_granted_beside_it_for_one_of_its_own(
    then: list[tuple[str, dict[str, Any]]],
):
    """Shrunk of new schedules: the weights are ancestors, by a label that this ledger never saw."""
    issues_prompts = [
        ("adopt_newest", {"holder": "generator-0"}),
        ("lease", {"holder": "generator-0", "room": 12}),
    ]
    play(
        Run(),
        [
            ("begin", TWO_STEPS),
            ("learner_saves", {}),
            ("the_pipeline_turns_once", {"stragglers": 0, "adopts": True}),
            ("learner_saves", {}),
            goes_back(),  # to v1.0, which is saved again as v2.0
            goes_back(),  # to v1.1, which was given up: apart, with a ledger without epoch 2
            *issues_prompts,
            *then,  # to v2.0
            *issues_prompts,
        ],
    )


def test_a_learner_that_dies_after_its_run_went_back_keeps_what_it_trained_since():
    went_back = Run()
    schedule = [
        ("begin", TWO_STEPS),
        ("learner_saves", {}),
        ("the_pipeline_turns_once", {"stragglers": 0, "adopts": True}),
        ("learner_saves", {}),
        goes_back(),  # to v1.0, which is saved again as v2.0
        ("the_pipeline_turns_once", {"stragglers": 0, "adopts": True}),
        ("learner_saves", {}),
        ("learner_dies_and_is_replaced", {"again": None}),  # at v2.1
    ]
    play(went_back, schedule)
    assert went_back.held_version == PolicyVersion(2, 1)


@pytest.mark.slow  # `make test` has the same rules, always in the same order
def test_new_schedules_break_nothing_either():
    draw_schedules(Run, steps=80)
    print(dict(Run.begun))  # noqa: T201 what happened in them

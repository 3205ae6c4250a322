"""Which engines continue a publish after a failure, and when checksums are compared."""

import pytest

from slipstream.weightbus.relay.publish_state import (
    LIVE,
    OTHER_FAILED,
    STAGED,
    Phase,
    PublishState,
    is_check_due,
)


def after(course: "PublishState[str]", *failures: dict[str, str]) -> "PublishState[str]":
    for failed in failures:
        course.done(failed)
    return course


@pytest.mark.parametrize("phases", [LIVE, STAGED])
def test_all_phases_run_once_if_no_member_fails(phases: tuple[Phase, ...]):
    course, seen = PublishState(["a", "b"], phases), []
    while course.phase is not None:
        seen.append(course.phase)
        course.done({})
    assert seen == list(phases)
    assert (course.members, course.failed) == (["a", "b"], {})


def test_failed_member_is_left_out_and_the_others_continue():
    course = after(PublishState(["a", "b"], LIVE), {"a": "refused"})
    assert (course.phase, course.members) == (Phase.PREPARE, ["b"])
    assert course.failed == {"a": "refused"}


def test_a_group_is_made_anew_for_those_that_are_left():
    course = after(PublishState(["a", "b", "c"], LIVE), {}, {"a": "late"})
    assert (course.phase, course.members) == (Phase.PREPARE, ["b", "c"])
    assert after(course, {}).phase is Phase.PAUSE
    assert after(course, {}, {"b": "late"}).phase is Phase.PREPARE_AGAIN
    assert after(course, {"c": "late"}).phase is Phase.LOAD, "no member is left to prepare for"


def test_failure_during_the_transfer_fails_all_members():
    course = after(PublishState(["a", "b"], LIVE), {}, {}, {}, {}, {"b": "died"})
    assert (course.phase, course.members) == (Phase.VERIFY, [])
    assert course.failed == {"a": OTHER_FAILED, "b": "died"}


def test_member_that_does_not_adopt_fails_alone():
    course = after(PublishState(["a", "b"], STAGED), {}, {"a": "torn"})
    assert (course.phase, course.members, course.failed) == (None, ["b"], {"a": "torn"})


def test_every_nth_publish_and_every_repair_is_checked():
    for every, publishes, is_repair, due in [
        (0, 1, False, False),
        (0, 1, True, True),
        (1, 7, False, True),
        (5, 1, False, True),
        (5, 5, False, False),
        (5, 6, False, True),
    ]:
        assert is_check_due(every, publishes, is_repair=is_repair) is due

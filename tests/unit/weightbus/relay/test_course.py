"""Who goes on with a publish after a failure, and when checksums are looked at."""

import pytest

from slipstream.weightbus.relay.course import OTHER_FAILED, Course, Phase, is_check_due


def after(course: "Course[str]", *failures: dict[str, str]) -> "Course[str]":
    for failed in failures:
        course.done(failed)
    return course


def test_all_phases_come_once_where_nobody_fails():
    course, seen = Course(["a", "b"]), []
    while course.phase is not None:
        seen.append(course.phase)
        course.done({})
    assert seen == list(Phase)
    assert (course.members, course.failed) == (["a", "b"], {})


def test_who_fails_is_in_no_phase_that_follows_and_the_others_go_on():
    course = after(Course(["a", "b"]), {"a": "refused"})
    assert (course.phase, course.members) == (Phase.PREPARE, ["b"])
    assert course.failed == {"a": "refused"}


def test_a_group_is_made_anew_for_those_that_are_left():
    course = after(Course(["a", "b", "c"]), {}, {"a": "late"})
    assert (course.phase, course.members) == (Phase.PREPARE, ["b", "c"])
    assert after(course, {}).phase is Phase.PAUSE
    assert after(course, {}, {"b": "late"}).phase is Phase.PREPARE_AGAIN
    assert after(course, {"c": "late"}).phase is Phase.LOAD, "nobody is left to prepare for"


def test_nobody_is_whole_where_one_fails_while_bytes_move():
    course = after(Course(["a", "b"]), {}, {}, {}, {}, {"b": "died"})
    assert (course.phase, course.members) == (Phase.VERIFY, [])
    assert course.failed == {"a": OTHER_FAILED, "b": "died"}


@pytest.mark.parametrize(
    ("every", "publishes", "is_repair", "due"),
    [
        (0, 1, False, False),
        (0, 1, True, True),
        (1, 7, False, True),
        (5, 1, False, True),
        (5, 5, False, False),
        (5, 6, False, True),
    ],
)
def test_every_nth_publish_and_every_repair_is_looked_at(
    every: int, publishes: int, is_repair: bool, due: bool
):
    assert is_check_due(every, publishes, is_repair=is_repair) is due

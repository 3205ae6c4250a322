"""How many generators a run has: by request, and by who waits for whom."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from slipstream.deploy.launch.scaling import (
    WAITED,
    GeneratorBounds,
    Waited,
    changes,
    count_by_load,
    waited_between,
)
from slipstream.wire.messages.status import RoleStatus, RunStatus
from tests.support.wire_samples import STATUS

BOUNDS = GeneratorBounds(1, 4)


def waited(learner: float, generators: float, *, backlog: bool = False) -> Waited:
    return Waited(learner, generators, has_reward_backlog=backlog)


def test_one_more_for_a_starved_learner_and_one_fewer_for_starved_generators():
    for load, expected in [
        (waited(WAITED, 0.0), 3),
        (waited(0.0, WAITED), 1),
        (waited(0.9, 0.9), 2),  # the bound has them take turns
        (waited(0.1, 0.1), 2),
        (waited(0.9, 0.0, backlog=True), 2),  # more answers would only wait for rewards
        (waited(0.0, 0.9, backlog=True), 2),
    ]:
        assert count_by_load(2, load, BOUNDS) == expected
        assert count_by_load(2, load, GeneratorBounds(0, 0)) == 2  # not asked to


def test_the_limits_of_the_settings_are_kept():
    assert count_by_load(4, waited(1.0, 0.0), BOUNDS) == 4
    assert count_by_load(1, waited(0.0, 1.0), BOUNDS) == 1
    assert count_by_load(2, waited(0.0, 1.0), GeneratorBounds(2, 4)) == 2
    assert [count in GeneratorBounds(2, 4) for count in (0, 1, 2, 4, 5)] == [
        False,
        False,
        True,
        True,
        False,
    ]
    assert [count in GeneratorBounds(0, 0) for count in (0, 1, 100)] == [False, True, True]


def test_the_highest_numbers_leave_and_the_lowest_free_ones_come():
    three = {"generator-0": True, "generator-1": True, "generator-10": True}
    assert changes(three, 1) == ([], ["generator-10", "generator-1"])
    assert changes(three, 3) == ([], [])
    assert changes(three, 5) == (["generator-2", "generator-3"], [])
    leaving = {"generator-0": True, "generator-1": False}
    assert changes(leaving, 2) == (["generator-2"], [])  # that name is still in use


@given(
    present=st.dictionaries(st.integers(0, 12).map("generator-{}".format), st.booleans()),
    count=st.integers(1, 12),
)
def test_after_the_changes_there_are_as_many_as_asked_for(present: dict[str, bool], count: int):
    started, leaving = changes(present, count)
    staying = {name for name, stays in present.items() if stays}
    assert len(staying - set(leaving)) + len(started) == count
    assert not set(started) & set(present)
    assert set(leaving) <= staying
    assert not started or not leaving


def role(name: str, kind: str, age_s: float, busy: float) -> RoleStatus:
    return msgspec.structs.replace(STATUS.roles[0], name=name, role=kind, age_s=age_s, busy=busy)


def status(*roles: RoleStatus, late: int = 0) -> RunStatus:
    return msgspec.structs.replace(STATUS, roles=list(roles), queue={"waiting_for_reward": late})


def test_what_was_waited_is_that_of_the_window_alone():
    before = status(role("learner", "learner", 100.0, 1.0), role("g", "generator", 100.0, 0.5))
    after = status(
        role("learner", "learner", 200.0, 0.5),  # the second hundred seconds it only waited
        role("g", "generator", 200.0, 0.75),  # and these it worked
        role("new", "generator", 10.0, 0.0),  # was not there
    )
    assert waited_between(before, after) == waited(1.0, 0.0)
    anew = status(role("learner", "learner", 5.0, 0.0), role("g", "generator", 200.0, 0.75))
    assert waited_between(before, anew) is None  # another learner: it tells nothing of the window
    half_a_batch = after.group_size * after.groups_per_step // 2
    late = msgspec.structs.replace(after, queue={"waiting_for_reward": half_a_batch})
    assert waited_between(before, late) == waited(1.0, 0.0, backlog=True)

"""What a starting run is reported to wait for, where the output is no terminal."""

from typing import Any

from msgspec.structs import replace

from slipstream.deploy.terminal.figures import one_line, startup_wait
from slipstream.wire.messages.status import RoleStatus, RunStatus
from slipstream.wire.messages.versions import PolicyVersion
from tests.support.wire_samples import STATUS


def role(kind: str, **fields: Any) -> RoleStatus:  # noqa: ANN401 values of the role
    return replace(STATUS.roles[0], name=kind, role=kind, **{"adopted": None} | fields)


def starting(*roles: RoleStatus, **fields: Any) -> RunStatus:  # noqa: ANN401 values of the status
    return replace(STATUS, roles=list(roles), **{"issued": 0, "waiting_for": "no group"} | fields)


def test_starting_run_names_the_roles_that_are_missing():
    wait = "the learner (it loads its model) and a generator (its engine starts)"
    assert startup_wait(starting(role("broker"))) == wait
    assert one_line(starting(role("broker"))).endswith(f", the run waits for {wait}")
    assert startup_wait(starting(role("learner"))) == "a generator (its engine starts)"


def test_with_everybody_there_the_first_weights_are_waited_for():
    both = starting(role("learner"), role("generator"))
    assert startup_wait(both) == "an engine with the first weights (it starts)"
    three = starting(role("learner"), *[role("generator")] * 3)
    assert startup_wait(three) == "an engine with the first weights (0 of 3 have them)"
    adopted = role("generator", adopted=PolicyVersion(1, 0))
    assert startup_wait(starting(role("learner"), adopted)) == ""


def test_from_the_first_group_the_wait_is_shown_as_the_learners():
    line = one_line(starting(role("broker"), issued=1))
    assert line.endswith(", learner waits for no group")


def test_stopping_run_waits_for_no_role_to_start():
    assert startup_wait(starting(role("broker"), stop_reason="asked to")) == ""

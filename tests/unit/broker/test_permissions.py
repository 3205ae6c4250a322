"""Who may say what."""

from typing import get_args

import pytest

from broker.permissions import ALLOWED, may_say
from wire.control import (
    GetLedger,
    LeaseScoring,
    Request,
    RequestBatch,
    RetryDeadLetters,
    Role,
    StepCommit,
    TakeOver,
)
from wire.versions import PolicyVersion

V0 = PolicyVersion(1, 0)


def test_every_kind_of_request_lists_its_roles():
    assert set(ALLOWED) == set(get_args(Request))
    assert all(roles for roles in ALLOWED.values())


@pytest.mark.parametrize(
    ("request_", "roles"),
    [
        (StepCommit(version=V0, metrics={}), {"learner"}),
        (TakeOver(step=0), {"learner"}),
        (RequestBatch(version=V0, step=0, wait_s=0.0), {"learner"}),
        (LeaseScoring(credits=1, wait_s=0.0), {"reward_worker", "generator"}),
        (RetryDeadLetters(groups=(1,)), {"operator"}),
        (GetLedger(), set(get_args(Role))),
    ],
)
def test_a_request_is_taken_from_its_roles_alone(request_: Request, roles: set[Role]):
    assert {role for role in get_args(Role) if may_say(role, request_)} == roles

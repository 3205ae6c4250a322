"""Which role may send which request."""

from typing import get_args

from slipstream.broker.server.permissions import ALLOWED, may_send
from slipstream.wire.messages import broker
from slipstream.wire.messages.trajectory import Score
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.messages.weightbus import PublishRecord
from tests.support.ledger_driver import header

V0 = PolicyVersion(1, 0)


def test_every_kind_of_request_lists_its_roles():
    assert set(ALLOWED) == set(get_args(broker.Request))
    assert all(roles for roles in ALLOWED.values())


def test_a_request_is_taken_from_its_roles_alone():
    for request_, roles in [
        (broker.FetchPayloads(keys=((0, 0),)), {"learner", "learner_part"}),
        (broker.StepCommit(version=V0, metrics={}), {"learner"}),
        (broker.TakeOver(step=0), {"learner"}),
        (broker.RequestBatch(version=V0, step=0, wait_s=0.0), {"learner"}),
        (broker.LeaseScoring(credits=1, wait_s=0.0), {"reward_worker", "generator"}),
        (broker.RetryDeadLetters(groups=(1,)), {"operator"}),
        (
            broker.PublishReport(record=PublishRecord(version=V0, at_s=0.0, adopted_by={})),
            {"relay"},
        ),
        (broker.RelayReport(members=[]), {"relay"}),
        (broker.EngineQuarantined(version=V0, reason="noise"), {"generator"}),
        (broker.FindRelay(), {"generator"}),
        (broker.GetLedger(), {*get_args(broker.Role)} - {"learner_part", "relay"}),
    ]:
        assert {role for role in get_args(broker.Role) if may_send(role, request_)} == roles


def test_relay_may_send_only_hello_and_weight_bus_reports():
    allowed = {kind for kind, roles in ALLOWED.items() if "relay" in roles}
    assert allowed == {broker.Hello, broker.RoleReport, broker.PublishReport, broker.RelayReport}


def test_a_generator_scores_only_where_that_is_wanted():
    score = Score(group_id=0, sibling=0, lease_id=-1, reward=1.0)
    scored = broker.SubmitTrajectory(header=header(0, 0, V0), score=score)
    scoring: list[broker.Request] = [
        broker.LeaseScoring(credits=1, wait_s=0.0),
        broker.SubmitScores(scores=(score,)),
    ]

    def may(request: broker.Request, *, inline: bool, environment: bool) -> bool:
        return may_send("generator", request, scores_inline=inline, environment_scores=environment)

    assert all(may(one, inline=True, environment=False) for one in (scored, *scoring))
    assert may(scored, inline=False, environment=True)
    assert not any(may(one, inline=False, environment=True) for one in scoring)
    assert not may(scored, inline=False, environment=False)
    assert may(broker.SubmitTrajectory(header=header(0, 0, V0)), inline=False, environment=False)
    assert may_send("reward_worker", scoring[1], scores_inline=False)

"""What one rank's coordinator asks; tests/integration has several ranks."""

import pytest

from slipstream.learner.batches.orders import Rejection, StopTraining
from slipstream.learner.coordinator import Coordinator
from slipstream.learner.stop import StopRequest
from slipstream.wire.errors import PeerLostError
from slipstream.wire.messages.broker import BatchNotReady, StepCommitted
from slipstream.wire.messages.versions import PolicyVersion

GRANTED = PolicyVersion(7, 4)


class Leader:
    """A broker that grants an epoch, has no batch yet, and ends the run after step 9."""

    publishes = True
    run_id = "a-run"

    def __init__(self) -> None:
        self.asked: list[object] = []

    def take_over(self, step: int, checkpoint: str, resumed: object) -> PolicyVersion:
        self.asked.append((step, checkpoint, resumed))
        return GRANTED

    def next_order(self, version: PolicyVersion, *, max_wait_s: float) -> BatchNotReady:
        self.asked.append((version, max_wait_s))
        return BatchNotReady(waiting_for=(), reason="nothing", last_step=9)

    def commit(
        self, version: PolicyVersion, figures: dict[str, float], num_tokens: int
    ) -> StepCommitted:
        self.asked.append((version, figures, num_tokens))
        return StepCommitted(evaluations=(), last_step=9)

    def reject_batch(self, version: PolicyVersion, rejection: Rejection) -> None:
        self.asked.append((version, rejection))

    def reserve(self) -> int:
        return 2


@pytest.fixture
def leader() -> Leader:
    return Leader()


def of(leader: Leader, stop: StopRequest | None = None) -> Coordinator:
    return Coordinator(leader, stop or StopRequest())  # type: ignore[arg-type]  # a fake


def test_a_take_over_returns_the_granted_version_and_whether_weights_are_wanted(leader: Leader):
    coordinator = of(leader)
    assert not coordinator.publishes
    assert coordinator.take_over(4, "step-4", None) == GRANTED
    assert leader.asked == [(4, "step-4", None)]
    assert coordinator.publishes
    assert coordinator.run_id == "a-run"


def test_answers_are_those_of_the_leader(leader: Leader):
    coordinator = of(leader)
    answer = coordinator.next_order(GRANTED, max_wait_s=3.0)
    assert isinstance(answer, BatchNotReady)
    assert answer.last_step == 9
    committed = coordinator.commit(GRANTED, {"policy/loss": 0.5}, 11)
    assert committed == StepCommitted(evaluations=(), last_step=9)
    assert coordinator.reserve() == 2
    rejection = Rejection("invalid", (3,), "why")
    coordinator.reject_batch(GRANTED, rejection)
    assert leader.asked == [
        (GRANTED, 3.0),
        (GRANTED, {"policy/loss": 0.5}, 11),
        (GRANTED, rejection),
    ]


def test_after_a_request_to_stop_no_batch_is_asked_for(leader: Leader):
    stop = StopRequest()
    stop.requested = True
    assert of(leader, stop).next_order(GRANTED, max_wait_s=3.0) == StopTraining()
    assert leader.asked == []


class Lost(Leader):
    """A broker that is gone."""

    def commit(self, *_: object) -> StepCommitted:
        raise PeerLostError("no broker")

    def reject_batch(self, *_: object) -> None:
        raise PeerLostError("no broker")


@pytest.mark.parametrize("shares_failures", [False, True])
def test_what_fails_at_the_leader_is_raised(shares_failures: bool):
    coordinator = Coordinator(
        Lost(),  # type: ignore[arg-type]  # a fake
        StopRequest(),
        shares_failures=shares_failures,
    )
    with pytest.raises(PeerLostError, match="no broker"):
        coordinator.commit(GRANTED, {}, 1)
    with pytest.raises(PeerLostError, match="no broker"):
        coordinator.reject_batch(GRANTED, Rejection("invalid", (3,), "why"))
    assert coordinator.reserve() == 2

"""How much one connection may ask."""

from slipstream.broker.server import limits
from slipstream.broker.server.limits import RateLimit, max_bytes


def test_a_burst_of_twice_the_rate_is_taken_and_then_the_rate():
    rate: RateLimit[str] = RateLimit(10.0)
    assert sum(rate.takes("a", 0.0) for _ in range(100)) == 20
    assert rate.takes("b", 0.0), "each connection has its own"
    assert sum(rate.takes("a", 1.0) for _ in range(100)) == 10
    assert sum(rate.takes("a", 100.0) for _ in range(100)) == 20


def test_strangers_take_no_more_room_than_there_is():
    rate: RateLimit[int] = RateLimit(10.0)
    for peer in range(2 * limits._MAX_STRANGERS):
        rate.takes(peer, 0.0)
    assert len(rate) == limits._MAX_STRANGERS


def test_a_message_is_as_large_as_its_role_needs():
    assert max_bytes("generator", 1 << 30) == 1 << 30
    assert max_bytes("relay", 1 << 30) == max_bytes("reward_worker", 1 << 30) == 16 << 20
    assert max_bytes("observer", 1 << 30) == max_bytes(None, 1 << 30) == 64 << 10
    assert max_bytes("learner", 1000) == 1000

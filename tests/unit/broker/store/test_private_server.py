"""When the private server is started again, and when no more attempts are made."""

from slipstream.broker.store.private_server import Restarts


def test_the_pause_between_starts_doubles_up_to_two_seconds():
    restarts = Restarts()
    assert [restarts.ended(now_s) for now_s in range(7)] == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    assert restarts.down_s(10.0) == 10.0


def test_a_server_that_dies_right_after_it_answered_has_not_been_well():
    restarts = Restarts()
    for now_s in range(0, 40, 4):
        restarts.ended(float(now_s))
        assert not restarts.answered(now_s + 1.0)
        assert not restarts.answered(now_s + 3.0)
    assert restarts.down_s(40.0) == 40.0


def test_a_server_that_answers_for_a_while_begins_anew():
    restarts = Restarts()
    restarts.ended(0.0)
    restarts.ended(1.0)
    assert not restarts.answered(2.0)
    assert restarts.answered(7.0)
    assert restarts.down_s(8.0) == 0.0
    assert restarts.ended(100.0) == 0.1
    assert restarts.down_s(101.0) == 1.0

"""The client at the other end of each connection."""

from typing import cast

import pytest

from slipstream.broker.server import sessions
from slipstream.broker.server.keyring import KeyHolder
from slipstream.broker.server.router import EventLoopRouter, Peer
from slipstream.broker.server.sessions import Sessions
from slipstream.wire.errors import ForbiddenError, NameTakenError, RefusedError, SupersededError
from slipstream.wire.messages.broker import Hello

NOWHERE = cast("EventLoopRouter", None)  # a session never sends


def peer(number: int, key: str = "") -> Peer:
    return Peer(NOWHERE, str(number).encode(), key)


def hello(name: str, **fields: object) -> Hello:
    return Hello(role="reward_worker", name=name, **fields)  # type: ignore[arg-type]


def test_a_token_is_good_on_its_own_connection_alone():
    known = Sessions()
    session = known.hello(peer(1), hello("a"))
    assert known.find(session.token, peer(1)) is session
    assert known.find(session.token, peer(2)) is None
    assert known.find(b"", peer(1)) is None


def test_a_second_hello_on_a_connection_ends_the_first_session():
    known = Sessions()
    first = known.hello(peer(1), hello("a"))
    second = known.hello(peer(1), hello("a"))
    assert known.find(first.token, peer(1)) is None
    assert known.find(second.token, peer(1)) is second


def test_clients_of_a_role_are_counted_until_they_say_goodbye_or_are_replaced():
    known = Sessions()
    first = known.hello(peer(1), hello("worker-0"))
    other = known.hello(peer(2), hello("worker-1"))
    known.hello(peer(3), Hello(role="observer", name="desk"))
    assert known.num_of("reward_worker") == 2
    known.leaves(other)
    known.leaves(other)
    assert known.num_of("reward_worker") == 1
    known.hello(peer(1), hello("worker-0", incarnation="second"))
    assert known.find(first.token, peer(1)) is None
    known.hello(peer(2), hello("worker-2"))  # on the connection of the one that left
    assert known.num_of("reward_worker") == 2


def test_full_session_table_evicts_the_oldest_client():
    known = Sessions(max_clients=2)
    oldest = known.hello(peer(1), hello("a"))
    kept = known.hello(peer(2), hello("b"))
    known.hello(peer(3), hello("c"))
    assert known.find(oldest.token, peer(1)) is None
    assert known.find(kept.token, peer(2)) is kept
    known.hello(peer(2), hello("b", reconnects=True))  # now it is the youngest
    known.hello(peer(4), hello("d"))
    assert known.find(known.hello(peer(2), hello("b")).token, peer(2)) is not None
    assert len(known._by_name[""]) == len(known._by_token) == 2


def test_of_those_that_only_read_the_oldest_gives_way_and_no_other_client_does():
    known = Sessions()
    worker = known.hello(peer(0), hello("worker"))
    readers = [
        known.hello(peer(1 + n), Hello(role=role, name="view"))
        for n, role in enumerate(["observer", "operator"] * (sessions.MAX_READERS // 2))
    ]
    assert all(known.find(one.token, one.peer) is one for one in readers)
    last = known.hello(peer(1 + len(readers)), Hello(role="observer", name="view"))
    assert [one for one in readers if known.find(one.token, one.peer) is None] == readers[:1]
    assert known.find(worker.token, worker.peer) is worker
    assert known.find(last.token, last.peer) is last
    more = [
        known.hello(peer(1_000 + n), hello(f"worker-{n}")) for n in range(sessions.MAX_READERS + 1)
    ]
    everyone = [worker, *more, *readers[1:], last]
    assert all(known.find(one.token, one.peer) is one for one in everyone)


def test_names_belong_to_their_key():
    holders = {
        "A": KeyHolder(name="judge-1", role="reward_worker", public="A"),
        "B": KeyHolder(name="judge-2", role="reward_worker", public="B"),
    }
    known = Sessions(holders.get)
    learner = known.hello(peer(0), Hello(role="learner", name="learner"))
    first = known.hello(peer(1, "A"), hello("learner"))
    second = known.hello(peer(2, "B"), hello("learner"))
    assert [s.name for s in (learner, first, second)] == [
        "learner",
        "judge-1/learner",
        "judge-2/learner",
    ]
    assert all(known.is_current(session) for session in (learner, first, second))


def test_clients_of_one_key_evict_only_each_other():
    holders = {"A": KeyHolder(name="a", role="reward_worker", public="A")}
    known = Sessions(holders.get, max_clients=2)
    learner = known.hello(peer(0), Hello(role="learner", name="learner"))
    mine = [known.hello(peer(i, "A"), hello(f"w{i}")) for i in range(1, 6)]
    assert known.is_current(learner)
    assert [known.is_current(session) for session in mine] == [False] * 3 + [True] * 2


def test_the_relay_of_a_learner_has_the_learners_key():
    known = Sessions({"A": KeyHolder(name="train-1", role="learner", public="A")}.get)
    learner = known.hello(peer(1, "A"), Hello(role="learner", name="learner"))
    relay = known.hello(peer(2, "A"), Hello(role="relay", name="relay"))
    assert (relay.name, relay.role) == ("train-1/relay", "relay")
    assert known.is_current(learner)


def test_a_key_is_good_for_no_role_beyond_its_own():
    for made_for, asked_for in [
        ("relay", "learner"),
        ("generator", "relay"),
        ("reward_worker", "relay"),
        ("operator", "relay"),
        ("learner", "generator"),
        ("learner", "operator"),
    ]:
        known = Sessions({"A": KeyHolder(name="a", role=made_for, public="A")}.get)
        with pytest.raises(
            ForbiddenError, match=f"was made for the role {made_for}, not {asked_for}"
        ):
            known.hello(peer(1, "A"), Hello(role=asked_for, name="x"))


@pytest.mark.parametrize("name", ["", "a/b", "a@b", "a\nb", "x" * 101])
def test_a_name_that_could_be_taken_for_another_is_refused(name: str):
    with pytest.raises(RefusedError, match="a client's name is"):
        Sessions().hello(peer(0), hello(name))


def test_whose_connection_was_lost_for_a_moment_keeps_its_name_from_one_that_waits_for_it():
    """The one that waited got it, and the one that trained was superseded as it came back."""
    there, clock = {1: True}, [0.0]
    known = Sessions(
        is_there=lambda one: there.get(int(one.routing_id), True), now=lambda: clock[0]
    )
    known.hello(peer(1), hello("a", incarnation="first"))
    with pytest.raises(NameTakenError, match="another process is connected as a: end it"):
        known.hello(peer(2), hello("a", incarnation="second"))
    there[1] = False
    for clock[0] in (10.0, 11.0):
        with pytest.raises(NameTakenError, match="was connected a moment ago and may come back"):
            known.hello(peer(2), hello("a", incarnation="second"))
    back = known.hello(peer(3), hello("a", incarnation="first", reconnects=True))
    assert known.is_current(back)
    with pytest.raises(NameTakenError, match="is connected"):
        known.hello(peer(2), hello("a", incarnation="second"))
    there[3] = False
    for clock[0] in (20.0, 22.9):
        with pytest.raises(NameTakenError, match="a moment ago"):
            known.hello(peer(2), hello("a", incarnation="second"))
    clock[0] = 23.1
    assert known.is_current(known.hello(peer(2), hello("a", incarnation="second")))
    with pytest.raises(SupersededError):
        known.hello(peer(4), hello("a", incarnation="first", reconnects=True))


def test_a_role_that_died_is_replaced_at_its_first_hello():
    known = Sessions(is_there=lambda one: int(one.routing_id) != 1)
    known.hello(peer(1), hello("a", incarnation="first"))
    assert known.is_current(known.hello(peer(2), hello("a", incarnation="second")))


def test_restarted_broker_reserves_a_name_for_its_last_holder_for_a_moment():
    may = [True]
    known = Sessions(
        is_there=lambda _: True, may_come_back=lambda _, holder: may[0] and holder != "a@first"
    )
    with pytest.raises(NameTakenError, match="another process was a and may come back"):
        known.hello(peer(2), hello("a", incarnation="second"))
    first = known.hello(peer(1), hello("a", incarnation="first", reconnects=True))
    may[0] = False
    with pytest.raises(NameTakenError, match="another process is connected"):
        known.hello(peer(2), hello("a", incarnation="second"))
    assert known.is_current(first)

"""Node 0's answers to processes that come as nodes of its engine, and what it notes of them."""

from dataclasses import replace

import pytest

from slipstream.weightbus.hosts.book import HostBook
from slipstream.weightbus.hosts.membership import Membership
from slipstream.weightbus.hosts.verdict import HostEnd
from slipstream.wire.messages.followers import (
    EndNode,
    Follow,
    FollowerAccepted,
    FollowerEnds,
    FollowerRefused,
    FollowerState,
    Following,
    StartNode,
    ToFollower,
)
from tests.support.memberships import membership

FACTS = {"generators.dtype": "bfloat16", "generators.nodes": "3"}
ACCEPTED = FollowerAccepted(leader="zero", host="h0")
START = StartNode(host="10.0.0.1", port=40001)


class Nodes:
    """Processes that come to a book, and time."""

    def __init__(self, own: Membership | None = None) -> None:
        self.now_s = 100.0
        own = own or membership(0, 3, 2, facts=FACTS, silence_s=30.0)
        self.book = HostBook(own, leader="zero", host="h0", now_s=self.now_s)

    def come(self, node: int, who: str, facts: dict[str, str] = FACTS) -> ToFollower | None:
        message = Follow(node=node, incarnation=who, host=f"h{node}", pid=7, facts=facts)
        return self.book.heard(who.encode(), message)

    def say(self, node: int, who: str, state: FollowerState = "waiting") -> ToFollower | None:
        return self.book.heard(who.encode(), Following(node=node, incarnation=who, state=state))

    def leave(self, node: int, who: str, reason: str = "") -> ToFollower | None:
        message = FollowerEnds(node=node, incarnation=who, reason=reason)
        return self.book.heard(who.encode(), message)

    def wait(self, seconds: float, *alive: tuple[int, str]) -> None:
        for _ in range(int(seconds)):
            self.now_s += 1.0
            for node, who in alive:
                self.say(node, who, self.book.known[node].state)
            self.book.look(self.now_s)

    def begin(self) -> None:
        assert (self.come(1, "a"), self.come(2, "b")) == (ACCEPTED, ACCEPTED)
        self.book.begin(START)


@pytest.fixture
def nodes() -> Nodes:
    return Nodes()


def test_nodes_are_missing_until_a_process_came_as_each(nodes: Nodes):
    assert nodes.book.missing == [1, 2]
    assert nodes.come(2, "b") == ACCEPTED
    assert nodes.book.missing == [1]
    assert nodes.come(1, "a") == ACCEPTED
    assert nodes.come(1, "a") == ACCEPTED  # its first answer was lost
    assert nodes.book.missing == []


def test_a_node_that_differs_is_refused_with_both_values_and_another_is_waited_for(nodes: Nodes):
    answer = nodes.come(1, "a", FACTS | {"generators.dtype": "float32"})
    assert answer == FollowerRefused(
        reason="node 1 (host h1, ranks 2-3) cannot be a node of the engine of node 0 (host h0) at "
        "10.0.0.1:29500: generators.dtype is float32 there, expected bfloat16"
    )
    assert nodes.book.missing == [1, 2]
    assert nodes.book.refused == nodes.book.differs == answer.reason
    assert nodes.come(1, "a2") == ACCEPTED


def test_a_refusal_that_ends_the_start_is_remembered_until_it_was_heard():
    own = replace(membership(0, 3, 2, facts=FACTS), difference_ends=True)
    nodes = Nodes(own)
    others = FACTS | {"generators.dtype": "float32"}
    for _ in range(2):
        assert isinstance(nodes.come(1, "a", others), FollowerRefused)
    assert nodes.book.turned_away == {"a": 1}
    nodes.leave(1, "a", "refused")
    assert nodes.book.turned_away == {}
    nodes.come(1, "a", others)
    nodes.begin()
    assert isinstance(nodes.come(1, "late", others), FollowerRefused)
    assert nodes.book.turned_away == {}, "the run's end does not wait for it"


def test_a_node_beyond_the_last_is_refused(nodes: Nodes):
    answer = nodes.come(3, "c")
    assert isinstance(answer, FollowerRefused)
    assert answer.reason.startswith("there is no node 3 (host h3, ranks 6-7)")


def test_a_second_process_is_refused_once_the_first_has_shown_that_it_lives(nodes: Nodes):
    nodes.come(1, "a")
    assert nodes.come(1, "other") is None
    nodes.say(1, "a")
    assert nodes.come(1, "other") is None
    nodes.say(1, "a")
    answer = nodes.come(1, "other")
    assert isinstance(answer, FollowerRefused)
    assert answer.is_taken
    assert answer.reason.startswith("two processes came as node 1 (host h1, ranks 2-3)")
    assert nodes.say(1, "a") == ACCEPTED
    assert nodes.book.known[1].incarnation == "a"


def test_a_second_process_takes_the_place_of_one_that_is_gone_before_the_start(nodes: Nodes):
    nodes.come(1, "a")
    assert nodes.come(1, "next") is None
    nodes.wait(10.0)
    assert nodes.come(1, "next") == ACCEPTED
    assert nodes.book.ended == {}


def test_who_leaves_before_the_start_is_waited_for_again(nodes: Nodes):
    nodes.come(1, "a")
    nodes.leave(1, "a", "no memory")
    assert nodes.book.missing == [1, 2]
    assert nodes.book.ended == {}


def test_a_waiting_node_is_told_to_start_until_it_does(nodes: Nodes):
    nodes.begin()
    assert nodes.say(1, "a") == START
    assert nodes.say(1, "a") == START
    assert nodes.say(1, "a", "starting") == ACCEPTED
    assert nodes.book.not_in("running") == [1, 2]
    nodes.say(1, "a", "running")
    nodes.say(2, "b", "running")
    assert nodes.book.not_in("running") == []


def test_a_node_that_is_silent_after_the_start_has_ended(nodes: Nodes):
    nodes.begin()
    nodes.wait(29, (1, "a"))
    assert nodes.book.ended == {}
    assert nodes.book.silent(3.0) == {2: "it gave no sign of life for 3 s"}
    nodes.wait(1, (1, "a"))
    silence = "it gave no sign of life for 30 s (generators.node_silence_s)"
    assert nodes.book.ended == {2: HostEnd(2, silence)}
    assert nodes.book.named(2) == "node 2 (host h2, ranks 4-5)"


def test_time_in_which_node_0_itself_did_not_run_counts_little(nodes: Nodes):
    nodes.begin()
    nodes.now_s += 3600.0
    nodes.book.look(nodes.now_s)
    assert nodes.book.ended == {}


def test_a_node_that_ends_after_the_start_says_why_and_is_not_replaced(nodes: Nodes):
    nodes.begin()
    nodes.leave(1, "a", "SGLang ended\nwith code -9")
    assert nodes.book.ended == {1: HostEnd(1, "SGLang ended with code -9")}
    assert nodes.come(1, "next") is None
    assert nodes.book.named(1) == "node 1 (host h1, ranks 2-3)"


def test_a_node_that_was_asked_to_end_is_known_to_wait(nodes: Nodes):
    nodes.begin()
    nodes.say(2, "b", "stopping")
    assert nodes.book.stopping == [2]
    assert nodes.book.ended == {}


def test_at_the_end_every_node_is_told_and_none_is_missed(nodes: Nodes):
    nodes.begin()
    end = EndNode(reason="it was asked to end", is_orderly=True)
    nodes.book.finish(end)
    assert nodes.say(1, "a", "running") == end
    nodes.leave(1, "a")
    nodes.wait(60)
    assert nodes.book.ended == {}
    assert list(nodes.book.known) == [2]
    assert nodes.come(1, "next") is None


def test_a_node_of_an_earlier_node_0_is_told_to_end(nodes: Nodes):
    answer = nodes.say(1, "a", "running")
    assert isinstance(answer, EndNode)
    assert not answer.is_orderly
    assert nodes.leave(1, "a") is None


def test_a_node_that_was_asked_to_end_gives_no_reason(nodes: Nodes):
    nodes.begin()
    nodes.leave(1, "a")
    assert nodes.book.ended == {1: HostEnd(1, "it was asked to end", is_orderly=True)}


def test_a_node_without_work_is_not_missed(nodes: Nodes):
    nodes.begin()
    nodes.say(1, "a", "done")
    assert nodes.book.not_in("done") == [2]
    nodes.wait(60, (2, "b"))
    assert nodes.book.ended == {}


def test_a_second_process_after_the_start_is_refused_and_disturbs_nothing(nodes: Nodes):
    nodes.begin()
    assert nodes.come(1, "other") is None, "the first may have died a moment ago"
    nodes.wait(2, (1, "a"), (2, "b"))
    answer = nodes.come(1, "other")
    assert isinstance(answer, FollowerRefused)
    assert answer.is_taken
    assert nodes.book.ended == {}
    assert nodes.book.known[1].incarnation == "a"


def test_a_text_of_another_host_becomes_one_short_line(nodes: Nodes):
    answer = nodes.come(1, "a", FACTS | {"generators.dtype": "a\nb\x1b[2J" + "x" * 9000})
    assert isinstance(answer, FollowerRefused)
    assert answer.reason.isprintable()
    assert len(answer.reason) < 2_300

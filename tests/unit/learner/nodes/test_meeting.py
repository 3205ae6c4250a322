"""Node 0's answers to processes that come, over a store of its own."""

from pathlib import Path

import msgspec
import pytest
from torch.distributed import HashStore

from slipstream.learner.layout import Layout, Place
from slipstream.learner.nodes.card import Card
from slipstream.learner.nodes.meeting import Answer, Host, LateComers, _Guest
from slipstream.learner.nodes.verdict import Ended
from slipstream.wire.errors import ConfigError
from slipstream.wire.process.patience import Patience
from slipstream.wire.settings.rendezvous import Address
from tests.support.waiting import NEVER_S

LAYOUT = Layout(ranks=3, ranks_per_node=1)
PLACE = Place(LAYOUT, 0, Address("10.0.0.1", 29400))
FACTS = {"run.name": "a", "learner.lr": "1"}


class Guests:
    """Processes that come to a host's store, as their side of it writes there."""

    def __init__(self) -> None:
        self.store = HashStore()
        own = Card(node=0, host="zero", pid=1, facts=FACTS)
        self.host = Host(self.store, PLACE, own, Path("/runs/a/.nodes-x"), "x")

    def come(self, node: int, host: str, facts: dict[str, str] | None = None) -> int:
        number = self.store.add("arrivals", 1)
        card = Card(node=node, host=host, pid=100 + number, facts=facts or FACTS)
        self.store.set(f"card/{number}", msgspec.json.encode(card).decode())
        self.host.look()
        return number

    def answer(self, number: int) -> Answer | None:
        if not self.store.check([f"answer/{number}"]):
            return None
        return msgspec.json.decode(self.store.get(f"answer/{number}"), type=Answer)

    def beat(self, *numbers: int) -> None:
        for number in numbers:
            self.store.add(f"beat/{number}", 1)
        self.host.look()


@pytest.fixture
def guests() -> Guests:
    return Guests()


def test_a_node_is_missing_until_it_has_seen_the_file(guests: Guests):
    one = guests.come(1, "b")
    assert guests.answer(one) == Answer(file="/runs/a/.nodes-x", content="x")
    assert guests.host.missing() == [1, 2]
    guests.store.set(f"report/{one}", "")
    guests.host.look()
    assert guests.host.missing() == [2]


def test_a_node_that_does_not_see_the_file_ends_the_start_with_its_reason(guests: Guests):
    one = guests.come(1, "b")
    guests.store.set(f"report/{one}", "run.dir must be shared\nx")
    with pytest.raises(ConfigError, match=r"^run\.dir must be shared x$"):
        guests.host.look()


def test_a_node_that_differs_is_told_what_node_0_says(guests: Guests):
    with pytest.raises(ConfigError) as refusal:
        guests.come(2, "b", FACTS | {"learner.lr": "2"})
    answer = guests.answer(1)
    assert answer is not None
    assert answer.error == str(refusal.value)
    assert answer.error == (
        "node 2 (host b, rank 2) cannot train with node 0 (host zero) at 10.0.0.1:29400: "
        "learner.lr is 2 there, expected 1"
    )
    assert not answer.is_taken


def test_of_two_processes_that_live_the_second_is_refused(guests: Guests):
    one, double = guests.come(1, "b"), guests.come(1, "c")
    guests.beat(one)
    assert guests.answer(double) is None, "the first may have died a moment ago"
    guests.beat(one)
    answer = guests.answer(double)
    assert answer is not None
    assert answer.is_taken
    assert answer.error == (
        "two processes came as node 1 (host b, rank 1) to 10.0.0.1:29400: process 101 on host b "
        "and process 102 on host c, which is refused: give each host a number of its own (--node)"
    )
    assert guests.host.admitted[1].number == one


def test_a_second_node_0_is_refused_at_once(guests: Guests):
    answer = guests.answer(guests.come(0, "c"))
    assert answer is not None
    assert answer.is_taken


def test_a_node_that_was_asked_to_end_is_missing_again_and_the_next_takes_its_place(guests: Guests):
    one = guests.come(1, "b")
    guests.store.set(f"report/{one}", "")
    again = guests.come(1, "b")
    assert guests.answer(again) is None
    guests.store.set(f"gone/{one}", "yes")
    guests.host.look()
    assert guests.answer(again) == Answer(file="/runs/a/.nodes-x", content="x")
    assert guests.host.missing() == [1, 2]


def test_what_is_no_card_is_left_alone(guests: Guests):
    guests.store.add("arrivals", 1)
    guests.store.set("card/1", "hello")
    two = guests.come(2, "b")
    assert guests.answer(1) is None
    assert guests.answer(two) == Answer(file="/runs/a/.nodes-x", content="x")


def test_who_comes_while_its_node_trains_is_refused_once_that_is_known_to_live():
    guests = Guests()
    late = LateComers(guests.store, PLACE, {1: "b"})
    number = guests.store.add("arrivals", 1)
    card = Card(node=1, host="c", pid=7, facts=FACTS)
    guests.store.set(f"card/{number}", msgspec.json.encode(card).decode())
    for life in (5, 5, 6):
        late.look({0: life, 1: life})
        assert guests.answer(number) is None
    late.look({0: 7, 1: 7})
    answer = guests.answer(number)
    assert answer is not None
    assert answer.is_taken
    assert answer.error == (
        "node 1 (host b, rank 1) trains with node 0 at 10.0.0.1:29400 already: process 7 on host "
        "c, which came as the same node, is refused (--node)"
    )


def test_who_was_answered_before_the_beginning_is_no_late_comer(guests: Guests):
    one = guests.come(1, "b")
    late = LateComers(guests.store, PLACE, {1: "b"})
    for life in range(5):
        late.look({1: life})
    assert guests.answer(one) == Answer(file="/runs/a/.nodes-x", content="x")


class Hurried(HashStore):
    """Node 0 answers and ends in the moment after a first look at its answer."""

    def check(self, keys: list[str]) -> bool:
        found: bool = super().check(keys)
        if keys == ["answer/1"] and not found:
            refused = Answer(error="torch is 9.9.0 there, expected 2.13.0")
            self.set(keys[0], msgspec.json.encode(refused).decode())
            ended = Ended(node=0, text="node 1 cannot train with node 0")
            self.set("failed", msgspec.json.encode(ended).decode())
        return found


def test_an_answer_counts_although_node_0_has_ended_since():
    card = Card(node=1, host="one", pid=2, facts=FACTS)
    guest = _Guest(Hurried(), Place(LAYOUT, 1, PLACE.address), card, Patience("", NEVER_S))
    with pytest.raises(ConfigError, match=r"torch is 9\.9\.0 there"):
        guest.wait()

"""Chains behind the relay, whatever order engines come, fail and leave in."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from slipstream.weightbus.relay.chain import Chains, may_be_source, sources_behind
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.messages.weightbus import BulkDoor

NAMES = st.sampled_from([f"g{i}" for i in range(9)])
EVENTS = st.lists(st.tuples(st.sampled_from(["place", "place", "leave", "newer"]), NAMES))


@given(st.integers(0, 4), EVENTS)
def test_no_cycle_no_self_one_successor_and_no_source_that_failed(
    fanout: int, events: list[tuple[str, str]]
):
    chains, step = Chains(fanout), 0
    before: dict[str, str | None] = {}  # of each engine, for the version; latest decision
    rank: dict[str, int] = {}  # when it was first placed
    failed: set[str] = set()
    for what, name in events:
        if what == "newer":
            step, before, rank, failed = step + 1, {}, {}, set()
        elif what == "leave":
            chains.leave(name)
            if rank:  # else no decision for this version is affected
                failed.add(name)
            before.pop(name, None)
        else:
            source = chains.place(PolicyVersion(1, step), name)
            is_again = name in rank or name in failed
            rank.setdefault(name, len(rank))
            assert source is None or fanout > 0
            assert source is None or not is_again, "one that comes again may close a circle"
            assert source not in failed
            if source is not None:
                assert rank[source] < rank[name]
            before[name] = source
            served = Counter(one for one in before.values() if one is not None)
            assert all(count == 1 for count in served.values())


@given(st.integers(1, 5), st.integers(1, 40))
def test_without_failures_chains_are_even_and_as_many_as_allowed(fanout: int, num: int):
    chains, version = Chains(fanout), PolicyVersion(1, 0)
    depth: dict[str, int] = {}
    for i in range(num):
        source = chains.place(version, f"g{i}")
        depth[f"g{i}"] = 1 if source is None else depth[source] + 1
    at = Counter(depth.values())
    assert at[1] == min(fanout, num)
    assert max(depth.values()) == -(-num // fanout)
    assert all(at[level] == fanout for level in range(1, max(at)))


def test_every_engine_behind_another_has_the_relay_last():
    before, own = BulkDoor(endpoint="tcp://b", key="k"), BulkDoor(endpoint="tcp://relay", key="r")
    parts = [(BulkDoor(endpoint=f"tcp://part{i}", key="p"),) for i in range(3)]
    engine = replace(before, of_engine=True)
    assert sources_behind(before, own) == ((engine, own),)
    assert sources_behind(before, own, parts) == tuple((engine, *doors) for doors in parts)
    assert sources_behind(None, own) == ()
    assert sources_behind(None, own, parts) == tuple(parts)


def test_nobody_is_sent_to_a_door_without_a_key_or_that_is_no_address_of_another_host():
    far = BulkDoor(endpoint="tcp://10.0.0.7:5", key="k" * 40)
    assert may_be_source(far)
    for door in (
        None,
        BulkDoor(endpoint="tcp://10.0.0.7:5"),
        BulkDoor(endpoint="tcp://10.0.0.7:5", key="short"),
        BulkDoor(endpoint="tcp://10.0.0.7:5", key="\0" * 40),
        BulkDoor(endpoint="ipc:///run/x", key="k" * 40),
        BulkDoor(endpoint="tcp://slow.to.look.up:5", key="k" * 40),
        BulkDoor(endpoint="tcp://10.0.0.7:5;10.0.0.8:5", key="k" * 40),
        BulkDoor(endpoint="tcp://10.0.0.7:5\0", key="k" * 40),
    ):
        assert not may_be_source(door)

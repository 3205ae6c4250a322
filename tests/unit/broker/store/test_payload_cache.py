"""What the broker keeps of trajectories in memory, and how much."""

from slipstream.broker.store.base import StoredTrajectory
from slipstream.broker.store.group_commit import GroupCommitter
from slipstream.broker.store.payload_cache import FrameCache
from tests.support.memory_store import MemoryStore


def cache(max_bytes: int) -> FrameCache:
    store = MemoryStore()
    return FrameCache(max_bytes, store, GroupCommitter(store))


def trajectory(num_bytes: int) -> StoredTrajectory:
    return StoredTrajectory(b"p" * (num_bytes - 2), b"t" * 2)


def test_what_is_pinned_counts_to_the_budget_and_never_takes_more_than_half_of_it():
    frames = cache(1_000)
    for i in range(20):
        frames.put((0, i), trajectory(100))
    assert frames.num_bytes == 1_000
    for i in range(20):
        frames.pin((1, i), trajectory(100))
        assert frames.num_bytes == 1_000
    for i in range(5):
        assert frames.get((1, i)) is not None  # pinned: nothing pushes them out
    frames.discard((1, i) for i in range(20))
    frames.discard((0, i) for i in range(20))
    assert frames.num_bytes == 0


def test_what_is_pinned_twice_counts_once():
    frames = cache(1_000)
    for _ in range(3):
        frames.pin((0, 0), trajectory(100))
    assert frames.num_bytes == 100


def test_what_comes_again_takes_the_place_of_what_was_there_pinned_or_not():
    frames = cache(1_000)
    frames.put((0, 0), trajectory(100))
    frames.put((0, 0), trajectory(200))
    assert frames.num_bytes == 200
    frames.pin((0, 0), trajectory(300))
    assert frames.num_bytes == 300
    frames.put((0, 0), trajectory(400))
    assert frames.num_bytes == 400
    assert frames.get((0, 0)) == trajectory(400)

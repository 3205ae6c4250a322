import asyncio

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from slipstream.learner.batches.prefetch import EarlyPlans, PayloadPrefetch
from slipstream.wire.errors import PeerLostError
from slipstream.wire.messages.codec import Frame

KEYS = ((3, 0), (3, 1), (4, 0))


class Payloads:
    """Where payloads come from; opens when a test sets it."""

    def __init__(self, error: Exception | None = None) -> None:
        self.asked: list[tuple[tuple[int, int], ...]] = []
        self.open = asyncio.Event()
        self.cancelled = 0
        self._error = error

    async def fetch(self, keys: tuple[tuple[int, int], ...]) -> list[Frame]:
        self.asked.append(keys)
        try:
            await self.open.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self._error is not None:
            raise self._error
        return [f"{group}/{sibling}".encode() for group, sibling in keys]


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_payloads_of_the_step_are_handed_out_once():
    payloads = Payloads()
    payloads.open.set()
    prefetch = PayloadPrefetch(payloads.fetch)
    prefetch.begin(7, KEYS)
    await settle()
    wanted = [(4, 0), (3, 0), (9, 0)]
    assert await prefetch.take(7, wanted) == {(4, 0): b"4/0", (3, 0): b"3/0"}
    assert await prefetch.take(7, wanted) == {}
    assert payloads.asked == [KEYS]


async def test_training_waits_for_payloads_that_are_on_their_way():
    payloads = Payloads()
    prefetch = PayloadPrefetch(payloads.fetch)
    prefetch.begin(7, KEYS)
    taking = asyncio.create_task(prefetch.take(7, KEYS))
    await settle()
    assert not taking.done()
    payloads.open.set()
    assert set(await taking) == set(KEYS)


@pytest.mark.parametrize(
    ("step", "keys"), [(6, KEYS), (8, KEYS), (7, [(5, 0)])], ids=["older", "newer", "other groups"]
)
async def test_payloads_of_another_step_or_of_other_groups_are_thrown_away_at_once(
    step: int, keys: list[tuple[int, int]]
):
    payloads = Payloads()  # never opens
    prefetch = PayloadPrefetch(payloads.fetch)
    prefetch.begin(7, KEYS)
    await settle()
    assert await prefetch.take(step, keys) == {}
    await settle()
    assert payloads.cancelled == 1
    assert await prefetch.take(7, KEYS) == {}


async def test_one_step_takes_the_place_of_another():
    payloads = Payloads()
    prefetch = PayloadPrefetch(payloads.fetch)
    prefetch.begin(7, KEYS)
    await settle()
    payloads.open.set()
    prefetch.begin(8, [(9, 0)])
    assert await prefetch.take(8, [(9, 0)]) == {(9, 0): b"9/0"}
    assert payloads.asked == [KEYS, ((9, 0),)]


async def test_payloads_that_could_not_be_prefetched_are_not_there(
    caplog: pytest.LogCaptureFixture,
):
    payloads = Payloads(PeerLostError("the broker is gone"))
    payloads.open.set()
    prefetch = PayloadPrefetch(payloads.fetch)
    prefetch.begin(7, KEYS)
    assert await prefetch.take(7, KEYS) == {}
    assert "cannot prefetch the payloads of step 7: the broker is gone" in caplog.text


def test_ranks_learn_of_a_step_until_it_is_removed():
    store = HashStore()
    leading, following = EarlyPlans(store), EarlyPlans(store)
    assert following.read(5) is None
    leading.post(5, (((1, 0), (2, 1)), ((1, 1),)))
    assert following.read(5) == (((1, 0), (2, 1)), ((1, 1),))
    assert following.read(6) is None
    leading.post(5, (((7, 0),), ((7, 1),)))
    assert following.read(5) == (((7, 0),), ((7, 1),))
    leading.remove(5)
    assert following.read(5) is None
    leading.remove(5)

"""The loop of a process that scores: leases trajectories, has them scored, sends the scores.

Consumes: scoring leases. Produces: one score per trajectory. Waits for: work, and for free credits.
A slow scorer holds few trajectories at a time and requests more when it has scored some, so fast
ones get more.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from itertools import chain
from typing import Protocol

from slipstream.broker.client import BrokerClient
from slipstream.broker.images import LocalImages
from slipstream.wire.errors import ImageError, ProtocolError
from slipstream.wire.messages.broker import (
    Done,
    Heartbeat,
    HeartbeatAnswer,
    LeaseScoring,
    ReleaseLease,
    ScoringItem,
    ScoringLeased,
    SubmitScores,
)
from slipstream.wire.messages.codec import Frame, decode_transcript
from slipstream.wire.messages.trajectory import MAX_REASON, Score, Transcript
from slipstream.wire.process.phases import WAIT, PhaseClock
from slipstream.wire.process.run_until import running, unless

_log = logging.getLogger(__name__)
_POLL_S = 2.0
_MAX_SCORES = 64  # in one message, which stays small however long the texts of a reward
Work = Sequence[tuple[ScoringItem, Transcript]]


class Rewards(Protocol):
    """Turns answers into scores: slipstream.broker.reward_worker.pool.RewardPool."""

    @property
    def needs_groups(self) -> bool:
        """True if it must be given all siblings of a group at once."""
        ...

    def score(self, work: Work) -> AsyncIterator[Score]:
        """Yield exactly one score per item that is not given back, as scores arrive."""
        ...

    def give_back(self, group_id: int) -> Sequence[ScoringItem]:
        """Forget answers of a group that were not started; return them."""
        ...


class Scorer:
    """Keeps ``rewards`` busy with trajectories of the broker."""

    def __init__(
        self,
        client: BrokerClient,
        rewards: Rewards,
        images: LocalImages,
        *,
        max_credits: int,
        heartbeat_s: float,
        poll_s: float = _POLL_S,
    ) -> None:
        self._images = images
        self._client = client
        self._rewards = rewards
        self._max_credits = max_credits
        self._few = max(1, max_credits // 4)
        self._heartbeat_s = heartbeat_s
        self._poll_s = poll_s
        self._held: dict[int, None] = {}  # leases whose score is not sent yet
        self._scoring: set[asyncio.Task[None]] = set()
        # A score, and leases of siblings that are given back after it. As many as leases are held.
        self._scored: asyncio.Queue[tuple[Score, list[int]]] = asyncio.Queue()
        self._sent = asyncio.Event()
        self._stop = asyncio.Event()
        self._num_answers = 0  # the broker's answers to requests for work, while no work was held
        self.clock = PhaseClock()
        self.counters = dict.fromkeys(("scored", "unavailable", "leases_lost"), 0.0)

    def signs(self) -> tuple[float, int]:
        """Return figures that change with progress: scores sent, or answers without any work."""
        return self.counters["scored"] + self.counters["unavailable"], self._num_answers

    def stop(self) -> None:
        """Take on nothing more; ``run`` returns when all held work is scored."""
        self._stop.set()

    async def run(self) -> None:
        """Work until the run is over, which needs no score any more, or until stopped."""
        async with asyncio.TaskGroup() as group:
            sides = [group.create_task(self._heartbeats()), group.create_task(self._send_forever())]
            is_over = await self._lease_forever(group)
            while self._held and not is_over:
                await self._until_some_are_sent()
            for task in [*sides, *(self._scoring if is_over else ())]:
                task.cancel()

    async def _lease_forever(self, group: asyncio.TaskGroup) -> bool:
        """Take on work until stopped, or until the run is over; return whether it is."""
        async with running(self._stop.wait()) as (stopping,):
            while not stopping.done():
                free = self._max_credits - len(self._held)
                if free < self._few:  # requests for single answers would cost more than they bring
                    await self._until_some_are_sent()
                    continue
                request = LeaseScoring(
                    credits=free, wait_s=self._poll_s, whole_groups=self._rewards.needs_groups
                )
                asking = self._client.ask(request, ScoringLeased, extra_wait_s=self._poll_s)
                answer = await unless(asking, stopping)
                if answer is None:
                    return False  # later grants go back with Goodbye
                leased, frames = answer
                self._num_answers += not self._held
                self._take_on(group, leased, frames)
                if leased.finished:
                    return True
        return False

    def _take_on(
        self, group: asyncio.TaskGroup, leased: ScoringLeased, frames: Sequence[Frame]
    ) -> None:
        if not leased.items:
            return
        self._held.update(dict.fromkeys(item.lease_id for item in leased.items))
        self.clock.enter("score")
        work: list[tuple[ScoringItem, Transcript]] = []
        for item, frame in zip(leased.items, frames, strict=True):
            try:
                work.append((item, decode_transcript(frame)))
            except ProtocolError as error:
                self._scored.put_nowait((_unavailable(item, f"invalid: {error}"), []))
        if work:
            task = group.create_task(self._score(work))
            self._scoring.add(task)
            task.add_done_callback(self._scoring.discard)

    async def _score(self, work: Work) -> None:
        async with AsyncExitStack() as stack:
            await self._score_shown(
                [
                    (item, shown)
                    for item, transcript in work
                    if (shown := await self._shown(item, transcript, stack)) is not None
                ]
            )

    async def _shown(
        self, item: ScoringItem, transcript: Transcript, stack: AsyncExitStack
    ) -> Transcript | None:
        """Return a transcript with files of its images; None: the score is that one is missing."""
        try:
            return await self._images.shown(transcript, stack)
        except ImageError as error:
            self._scored.put_nowait((_unavailable(item, f"an image: {error}"), []))
            return None

    async def _score_shown(self, work: Work) -> None:
        async for score in self._rewards.score(work):
            given_back: list[int] = []
            if score.reward is None:  # its group may be lost: the broker tries this answer first
                given_back = [item.lease_id for item in self._rewards.give_back(score.group_id)]
            self._scored.put_nowait((score, given_back))

    async def _send_forever(self) -> None:
        """Send the scores, including later ones."""
        while True:
            ready = [await self._scored.get()]
            while len(ready) < _MAX_SCORES and not self._scored.empty():
                ready.append(self._scored.get_nowait())
            scores = [score for score, _ in ready]
            await self._client.ask(SubmitScores(scores=tuple(scores)), Done)
            for lease_id in chain.from_iterable(given_back for _, given_back in ready):
                release = ReleaseLease(lease_id=lease_id, reason="a sibling has no reward yet")
                await self._client.ask(release, Done)  # now that the broker knows why
                self._held.pop(lease_id, None)
            for score in scores:
                self._held.pop(score.lease_id, None)
                self.counters["scored"] += score.reward is not None
                self.counters["unavailable"] += score.reward is None
            if not self._held:
                self.clock.enter(WAIT)
            self._sent.set()

    async def _until_some_are_sent(self) -> None:
        self._sent.clear()
        await self._sent.wait()

    async def _heartbeats(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_s)
            if self._held:
                answer, _ = await self._client.ask(
                    Heartbeat(lease_ids=tuple(self._held)), HeartbeatAnswer
                )
                self.counters["leases_lost"] += len(answer.lost)


def _unavailable(item: ScoringItem, reason: str) -> Score:
    return Score(
        group_id=item.group_id,
        sibling=item.sibling,
        lease_id=item.lease_id,
        unavailable=reason[:MAX_REASON],
    )

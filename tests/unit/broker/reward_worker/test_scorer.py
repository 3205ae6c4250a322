"""The loop of a scorer, against a broker and a reward of this file's own."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from typing_extensions import override

from slipstream.broker.images import LocalImages
from slipstream.broker.reward_worker.scorer import Scorer
from slipstream.wire.errors import ImageError
from slipstream.wire.messages.broker import (
    Done,
    Heartbeat,
    HeartbeatAnswer,
    LeaseScoring,
    ScoringItem,
    ScoringLeased,
    SubmitScores,
)
from slipstream.wire.messages.codec import encode
from slipstream.wire.messages.images import digest_of
from slipstream.wire.messages.trajectory import ChatMessage, ContentPart, Prompt, Score, Transcript
from slipstream.wire.models.pixels import checked_image
from tests.support.drawn_images import NO_IMAGES, drawn
from tests.support.waiting import HANG_S, until_async


def transcript(text: str) -> bytes:
    return encode(
        Transcript(
            prompt=Prompt(prompt="?"), response=text, num_response_tokens=1, finish_reason="stop"
        )
    )


class Work:
    """A broker with so many trajectories."""

    def __init__(self, *texts: bytes) -> None:
        self.waiting = deque(enumerate(texts))
        self.held: set[int] = set()
        self.is_over = False  # whatever is held
        self.most_held = 0
        self.asked: list[LeaseScoring] = []
        self.scores: list[Score] = []
        self.kept_alive: list[tuple[int, ...]] = []

    async def ask(self, request: object, _kind: type, **_options: object) -> tuple[Any, list[Any]]:
        await asyncio.sleep(0)
        match request:
            case LeaseScoring(credits=credits_left):
                self.asked.append(request)
                given = [
                    self.waiting.popleft() for _ in range(min(credits_left, len(self.waiting)))
                ]
                self.held |= {i for i, _ in given}
                self.most_held = max(self.most_held, len(self.held))
                items = tuple(ScoringItem(group_id=i, sibling=0, lease_id=i) for i, _ in given)
                finished = self.is_over or not (self.waiting or self.held)
                return ScoringLeased(items=items, finished=finished), [t for _, t in given]
            case SubmitScores(scores=scores):
                self.scores += scores
                self.held -= {score.lease_id for score in scores}
            case Heartbeat(lease_ids=lease_ids):
                self.kept_alive.append(lease_ids)
                return HeartbeatAnswer(lost=()), []
        return Done(), []


class Lengths:
    """The reward is the length of the answer; each takes a moment."""

    def __init__(self, *, takes_s: float = 0.0, needs_groups: bool = False) -> None:
        self.takes_s = takes_s
        self.needs_groups = needs_groups

    def give_back(self, _group_id: int) -> list[ScoringItem]:
        """Every answer is a group of its own here."""
        return []

    async def score(self, work: Sequence[tuple[ScoringItem, Transcript]]) -> AsyncIterator[Score]:
        for item, text in work:
            await asyncio.sleep(self.takes_s)
            yield Score(
                group_id=item.group_id,
                sibling=item.sibling,
                lease_id=item.lease_id,
                reward=float(len(text.response)),
            )


def scorer(broker: Work, rewards: Lengths, **options: Any) -> Scorer:  # noqa: ANN401
    images = options.pop("images", NO_IMAGES)
    limits = {"max_credits": 4, "heartbeat_s": 10.0, "poll_s": 0.1} | options
    return Scorer(broker, rewards, images, **limits)  # type: ignore[arg-type]  # a broker by hand


def test_everything_is_scored_once_and_no_more_is_held_than_the_credits_allow():
    broker = Work(*(transcript("x" * i) for i in range(50)))
    worker = scorer(broker, Lengths())
    asyncio.run(worker.run())
    assert sorted(score.lease_id for score in broker.scores) == list(range(50))
    assert all(score.reward == score.lease_id for score in broker.scores)
    assert broker.most_held <= 4
    assert (worker.counters["scored"], worker.counters["unavailable"]) == (50, 0)


def test_a_transcript_that_cannot_be_read_is_unavailable_and_the_others_are_scored():
    broker = Work(transcript("a"), b"no transcript", transcript("abc"))
    asyncio.run(scorer(broker, Lengths()).run())
    rewards = {score.lease_id: score.reward for score in broker.scores}
    assert rewards == {0: 1.0, 1: None, 2: 3.0}
    (bad,) = [score for score in broker.scores if score.reward is None]
    assert bad.unavailable.startswith("invalid: not a valid transcript")


def test_what_is_held_is_kept_alive_while_it_takes_long():
    broker = Work(transcript("a"), transcript("b"))

    class UntilKeptAlive(Lengths):
        async def score(
            self, work: Sequence[tuple[ScoringItem, Transcript]]
        ) -> AsyncIterator[Score]:
            await until_async(lambda: (0, 1) in broker.kept_alive)
            async for score in super().score(work):
                yield score

    asyncio.run(scorer(broker, UntilKeptAlive(), heartbeat_s=0.01).run())
    assert len(broker.scores) == 2


def test_a_reward_of_whole_groups_asks_for_whole_groups():
    broker = Work(transcript("a"))
    asyncio.run(scorer(broker, Lengths(needs_groups=True)).run())
    assert all(request.whole_groups for request in broker.asked)


async def test_a_scorer_does_not_wait_for_a_function_that_hangs_once_the_run_is_over():
    broker = Work(transcript("a"), transcript("b"))
    worker = scorer(broker, Lengths(takes_s=10 * HANG_S))
    async with asyncio.timeout(HANG_S), asyncio.TaskGroup() as group:
        group.create_task(worker.run())
        await until_async(lambda: broker.held)
        broker.is_over = True
    assert broker.scores == []


async def test_stopping_scorer_takes_no_more_work_and_sends_its_scores():
    broker = Work(*(transcript("x") for _ in range(100)))
    worker = scorer(broker, Lengths(takes_s=0.002))
    job = asyncio.create_task(worker.run())
    while len(broker.scores) < 3:  # noqa: ASYNC110 there is nothing to wait on
        await asyncio.sleep(0)
    worker.stop()
    async with asyncio.timeout(HANG_S):
        await job
    assert broker.held == set()
    assert len(broker.scores) + len(broker.waiting) == 100
    assert broker.waiting


async def test_an_answer_without_work_is_progress_and_beside_a_function_that_hangs_it_is_not():
    class Endless(Work):
        """It may get more work at any time."""

        async def ask(
            self, request: object, kind: type, **options: object
        ) -> tuple[Any, list[Any]]:
            answer, frames = await super().ask(request, kind, **options)
            if isinstance(answer, ScoringLeased):
                answer = ScoringLeased(items=answer.items, finished=False)
            return answer, frames

    class Hanging(Lengths):
        may_go = asyncio.Event()

        async def score(
            self, work: Sequence[tuple[ScoringItem, Transcript]]
        ) -> AsyncIterator[Score]:
            await self.may_go.wait()
            async for score in super().score(work):
                yield score

    broker, rewards = Endless(), Hanging()
    worker = scorer(broker, rewards)
    job = asyncio.create_task(worker.run())
    seen = worker.signs()
    await until_async(lambda: worker.signs() != seen, "no progress without work")
    broker.waiting.append((0, transcript("abc")))
    await until_async(lambda: broker.held)
    seen, asked = worker.signs(), len(broker.asked)
    await until_async(lambda: len(broker.asked) > asked + 3, "it does not ask for more")
    assert worker.signs() == seen
    rewards.may_go.set()
    await until_async(lambda: worker.signs() != seen, "no progress with the score")
    worker.stop()
    await job


class Sums(Lengths):
    """The reward is the size of the images, whose files are there."""

    @override
    async def score(self, work: Sequence[tuple[ScoringItem, Transcript]]) -> AsyncIterator[Score]:
        for item, text in work:
            files = [Path(file) for file in text.prompt.extra_info["images"]]
            yield Score(
                group_id=item.group_id,
                sibling=item.sibling,
                lease_id=item.lease_id,
                reward=float(sum(file.stat().st_size for file in files)),
            )


def test_reward_functions_get_files_of_the_images_and_a_missing_one_is_the_reason(tmp_path: Path):
    red, blue, gone = drawn(seed=1), drawn(seed=2), drawn(seed=3)
    kept = {digest_of(content): content for content in (red, blue)}

    async def fetch(digest: str) -> bytes:
        await asyncio.sleep(0)
        if digest not in kept:
            raise ImageError("changed on disk")
        return kept[digest]

    def asked(*contents: bytes) -> bytes:
        parts = tuple(ContentPart(image=checked_image(content)) for content in contents)
        prompt = Prompt(prompt=(ChatMessage("user", parts),), extra_info={"index": 3})
        return encode(
            Transcript(prompt=prompt, response="x", num_response_tokens=1, finish_reason="stop")
        )

    broker = Work(asked(red, blue, red), asked(gone), asked(blue))
    images = LocalImages(fetch, tmp_path, most_bytes=len(blue))
    asyncio.run(scorer(broker, Sums(), images=images).run())
    rewards = {score.lease_id: (score.reward, score.unavailable) for score in broker.scores}
    assert rewards == {
        0: (2 * len(red) + len(blue), ""),
        1: (None, "an image: changed on disk"),
        2: (len(blue), ""),
    }
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= len(blue), "past the limit"

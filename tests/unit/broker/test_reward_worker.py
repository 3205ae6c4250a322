"""A reward function that hangs costs its own answer and its worker, nothing else."""

import asyncio
import threading
from collections.abc import Mapping
from typing import Any

import pytest

from broker.reward_worker import Limits, RewardHangsError, work
from broker.rewards.loading import Reward
from wire.codec import encode
from wire.control import (
    Done,
    LeaseScoring,
    RoleReport,
    ScoringItem,
    ScoringLeased,
    SubmitScores,
)
from wire.trajectory import Prompt, Score, Transcript


class OneLease:
    """A broker that hands out two trajectories and keeps what comes back."""

    def __init__(self) -> None:
        self.scores: list[Score] = []

    async def ask(self, request: object, _kind: type, **_options: object) -> tuple[Any, list[Any]]:
        match request:
            case LeaseScoring():
                items = (
                    ScoringItem(group_id=0, sibling=0, lease_id=0),
                    ScoringItem(group_id=0, sibling=1, lease_id=1),
                )
                texts = [encode(transcript(text)) for text in ("fast", "hang")]
                return ScoringLeased(items=items), texts
            case SubmitScores(scores=scores):
                self.scores.extend(scores)
            case RoleReport():
                pass
        return Done(), []


def transcript(text: str) -> Transcript:
    return Transcript(
        prompt=Prompt(prompt="?"), response=text, num_response_tokens=1, finish_reason="stop"
    )


def test_what_was_scored_before_a_hang_is_sent_and_the_worker_ends():
    release = threading.Event()

    def score(_source: str, solution: str, _truth: str, _extra: Mapping[str, object]) -> float:
        if solution == "hang":
            release.wait(10)
        return 1.0

    broker = OneLease()
    limits = Limits(max_credits=2, timeout_s=0.1, heartbeat_s=5.0)
    try:
        with pytest.raises(RewardHangsError, match=r"reward\.timeout_s = 0\.1"):
            asyncio.run(work(broker, Reward("test:score", score), limits))  # type: ignore[arg-type]
    finally:
        release.set()
    fast, hung = broker.scores
    assert fast.reward == 1.0
    assert hung.reward is None
    assert "took longer" in hung.unavailable

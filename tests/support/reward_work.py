"""Answers for a reward pool, and their scores."""

from slipstream.broker.reward_worker.pool import RewardPool
from slipstream.wire.messages.broker import ScoringItem
from slipstream.wire.messages.trajectory import Prompt, Score, Transcript


def work(*answers: str, groups: int = 1) -> list[tuple[ScoringItem, Transcript]]:
    """Return answers, dealt out to groups one by one."""
    return [
        (
            ScoringItem(group_id=number % groups, sibling=number // groups, lease_id=number),
            Transcript(
                prompt=Prompt(prompt="1+1=", ground_truth="2", data_source="add"),
                response=answer,
                num_response_tokens=1,
                finish_reason="stop",
            ),
        )
        for number, answer in enumerate(answers)
    ]


async def score_all(pool: RewardPool, todo: list[tuple[ScoringItem, Transcript]]) -> list[Score]:
    """Return the scores in the order of the answers; one each."""
    scores = {}
    async for score in pool.score(todo):
        assert score.lease_id not in scores, "an answer has two scores"
        scores[score.lease_id] = score
    return [scores[item.lease_id] for item, _ in todo]

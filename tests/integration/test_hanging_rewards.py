"""A reward function that hangs for some answers, in real children, under the real broker's loop."""

import asyncio
from pathlib import Path

import pytest

from slipstream.broker.config import RewardSection
from slipstream.broker.reward_worker.pool import RewardPool
from slipstream.broker.reward_worker.scorer import Scorer
from slipstream.wire.messages.broker import (
    BatchNotReady,
    Done,
    GroupsLeased,
    LeaseGroups,
    RequestBatch,
    SubmitTrajectory,
    TakeOver,
    TookOver,
)
from tests.support.drawn_images import NO_IMAGES
from tests.support.ledger_driver import header, make_ledger, make_rules
from tests.support.running_broker import V0, running
from tests.support.waiting import until_async

pytestmark = pytest.mark.integration
GROUPS, SIBLINGS, ATTEMPTS = 4, 8, 3
FUNCTION = """
import time

def score(data_source, solution_str, ground_truth, extra_info):
    if ground_truth == "1":
        time.sleep(3600)
    return float(len(solution_str) % 3)
"""


@pytest.mark.parametrize("processes", [1, 2])
async def test_group_with_a_hanging_reward_delays_others_no_longer_than_its_attempts(
    short_folder: Path, processes: int
):
    """All siblings of such a group were tried in rounds, one after the other: 24 times."""
    (short_folder / "hangs.py").write_text(FUNCTION)
    settings = RewardSection(
        function=f"{short_folder}/hangs.py:score", timeout_s=1.0, processes=processes
    )
    rules = make_rules(
        groups_per_step=GROUPS,
        group_size=SIBLINGS,
        total_steps=1,
        max_attempts=ATTEMPTS,
        drop_zero_variance=False,
    )

    async with running(short_folder, make_ledger(rules)) as it:
        learner = await it.client("learner", "learner")
        generator = await it.client("generator", "generator-0")
        worker = await it.client("reward_worker", "w")
        await learner.ask(TakeOver(step=0), TookOver)
        leased, _ = await generator.ask(
            LeaseGroups(adopted=V0, max_sequences=GROUPS * SIBLINGS, wait_s=30.0), GroupsLeased
        )
        for group in leased.groups:
            for sibling in group.siblings:
                sent = header(group.group_id, sibling, V0, lease_id=group.lease_id)
                frames = [b"payload", b"r" * sibling]
                await generator.ask(SubmitTrajectory(header=sent), Done, frames=frames)
        pool = await RewardPool.start(settings)
        scorer = Scorer(worker, pool, NO_IMAGES, max_credits=64, heartbeat_s=1.0)
        scoring = asyncio.create_task(scorer.run())
        try:
            await until_async(
                lambda: it.server._handlers.learner._trouble._tries, "nothing was scored"
            )
            await until_async(
                lambda: it.ledger.book.state.dropped["reward_unavailable"], "nothing was dropped"
            )
            await until_async(lambda: not it.server._leases._scoring.num_waiting)
            request = RequestBatch(version=V0, step=0, wait_s=0.0)
            answer, _ = await learner.ask(request, BatchNotReady)
            assert it.status.in_flight["ready"] == GROUPS - 1
            dropped, replaced, _ = it.ledger.book.state.dropped, pool.replaced, answer.reason
        finally:
            scoring.cancel()
            await asyncio.gather(scoring, return_exceptions=True)
            await pool.close()
    assert dropped == {"reward_unavailable": 1}
    # Each child may be at another sibling when the first one fails.
    assert ATTEMPTS <= replaced["timeout"] <= ATTEMPTS + processes - 1

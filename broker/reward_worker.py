"""`start-reward-worker`: leases trajectories, scores them, answers."""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress

from broker.client import BrokerClient
from broker.rewards.loading import Reward, load_reward
from wire.codec import decode_transcript
from wire.command_line import load_arguments, refuse_settings, role_parser, run_role
from wire.control import (
    Done,
    Heartbeat,
    HeartbeatAnswer,
    LeaseScoring,
    RoleReport,
    ScoringItem,
    ScoringLeased,
    SubmitScores,
)
from wire.errors import ConfigError
from wire.logs import start_logging
from wire.phases import PhaseClock
from wire.stopping import stop_event
from wire.trajectory import Score, Transcript

_log = logging.getLogger(__name__)
_POLL_S = 2.0


async def work(
    client: BrokerClient, reward: Reward, *, max_credits: int, heartbeat_s: float
) -> None:
    """Score until the broker says that no work will come again.

    The function runs on a thread, so that a slow one does not delay the connection.
    """
    clock = PhaseClock()
    scored = unavailable = 0
    while True:
        leased, frames = await client.ask(
            LeaseScoring(credits=max_credits, wait_s=_POLL_S), ScoringLeased, extra_wait_s=_POLL_S
        )
        if leased.items:
            with clock.phase("score"):
                transcripts = [decode_transcript(frame) for frame in frames]
                pairs = list(zip(leased.items, transcripts, strict=True))
                scores = await _score_all(client, reward, pairs, heartbeat_s)
                await client.ask(SubmitScores(scores=tuple(scores)), Done)
            scored += len(scores)
            unavailable += sum(score.reward is None for score in scores)
        counters = {"scored": float(scored), "unavailable": float(unavailable)}
        await client.ask(RoleReport(phase_seconds=clock.seconds(), counters=counters), Done)
        if leased.finished:
            return


async def _score_all(
    client: BrokerClient,
    reward: Reward,
    pairs: Sequence[tuple[ScoringItem, Transcript]],
    heartbeat_s: float,
) -> list[Score]:
    """Score on a thread, and keep the leases meanwhile."""
    job = asyncio.create_task(
        asyncio.to_thread(lambda: [reward.score(item, text) for item, text in pairs])
    )
    lease_ids = tuple(item.lease_id for item, _ in pairs)
    while True:
        done, _ = await asyncio.wait({job}, timeout=heartbeat_s)
        if done:
            return job.result()
        await client.ask(Heartbeat(lease_ids=lease_ids), HeartbeatAnswer)


async def _serve(endpoint: str, name: str, reward: Reward, max_credits: int) -> None:
    client, welcome = await BrokerClient.connect(endpoint, role="reward_worker", name=name)
    stop = asyncio.create_task(stop_event().wait())
    job = asyncio.create_task(
        work(client, reward, max_credits=max_credits, heartbeat_s=welcome.heartbeat_s)
    )
    try:
        await asyncio.wait({stop, job}, return_when=asyncio.FIRST_COMPLETED)
        if job.done():
            job.result()
    finally:
        for task in (stop, job):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        client.close()


def main() -> int:
    """Parse, check, run."""
    parser = role_parser(
        "start-reward-worker",
        "Score trajectories for the broker of a run.",
        [
            "start-reward-worker --config run.toml",
            "start-reward-worker --config run.toml --reward my_pkg.rewards:score --name worker-1",
        ],
    )
    parser.add_argument("--reward", metavar="MODULE:FUNCTION", help="instead of reward.function")
    parser.add_argument("--name", default="reward-worker-0", help="unique within the run")
    arguments = parser.parse_args()
    from broker.config import broker_settings

    try:
        settings = broker_settings(load_arguments(arguments))
        reward = load_reward(arguments.reward or settings.reward.function)
        endpoint = settings.run.endpoint("broker")
    except ConfigError as error:
        return refuse_settings(error)
    if arguments.dry_run:
        print(f"would score with {reward.name} for {endpoint}")  # noqa: T201
        return 0
    start_logging(arguments.name)

    def body() -> int:
        asyncio.run(_serve(endpoint, arguments.name, reward, settings.reward.credits))
        return 0

    return run_role(body)


if __name__ == "__main__":
    raise SystemExit(main())

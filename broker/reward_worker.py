"""`start-reward-worker`: leases trajectories, scores them, answers."""

import asyncio
import logging
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from broker.client import BrokerClient
from broker.config import RewardSection, broker_settings
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
from wire.errors import ConfigError, SlipstreamError
from wire.logs import start_logging
from wire.phases import PhaseClock
from wire.stopping import stop_event
from wire.trajectory import Score, Transcript

_log = logging.getLogger(__name__)
_POLL_S = 2.0


class RewardHangsError(SlipstreamError):
    """A reward function did not return in time; the thread that runs it cannot be ended."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a worker allows itself."""

    max_credits: int  # trajectories leased at a time
    timeout_s: float  # for one answer
    heartbeat_s: float


async def work(client: BrokerClient, reward: Reward, limits: Limits) -> None:
    """Score until the broker says that no work will come again.

    The function runs on a thread, so that a slow one does not delay the connection.
    """
    clock = PhaseClock()
    scored = unavailable = 0
    while True:
        leased, frames = await client.ask(
            LeaseScoring(credits=limits.max_credits, wait_s=_POLL_S),
            ScoringLeased,
            extra_wait_s=_POLL_S,
        )
        if leased.items:
            with clock.phase("score"):
                transcripts = [decode_transcript(frame) for frame in frames]
                pairs = list(zip(leased.items, transcripts, strict=True))
                scores = await _score_all(client, reward, pairs, limits)
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
    limits: Limits,
) -> list[Score]:
    """Score on a thread, and keep the leases meanwhile.

    Raises:
        RewardHangsError: one answer took too long. What was scored before it is sent.
    """
    scores: asyncio.Queue[Score] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def score_in_order() -> None:
        for item, text in pairs:
            score = reward.score(item, text)
            with suppress(RuntimeError):  # the loop is closed: this worker gave up on us
                loop.call_soon_threadsafe(scores.put_nowait, score)

    # A daemon: a function that hangs must not keep the process from ending.
    threading.Thread(target=score_in_order, name="reward", daemon=True).start()
    lease_ids = tuple(item.lease_id for item, _ in pairs)
    heartbeats = asyncio.create_task(_heartbeats(client, lease_ids, limits.heartbeat_s))
    done: list[Score] = []
    try:
        while len(done) < len(pairs):
            async with asyncio.timeout(limits.timeout_s):
                done.append(await scores.get())
    except TimeoutError as error:
        item = pairs[len(done)][0]
        reason = f"took longer than reward.timeout_s = {limits.timeout_s:g}"
        hung = Score(
            group_id=item.group_id,
            sibling=item.sibling,
            lease_id=item.lease_id,
            unavailable=reason,
            function=reward.name,
        )
        await client.ask(SubmitScores(scores=(*done, hung)), Done)
        raise RewardHangsError(f"{reward.name} {reason}; this worker ends") from error
    finally:
        heartbeats.cancel()
    return done


async def _heartbeats(client: BrokerClient, lease_ids: tuple[int, ...], every_s: float) -> None:
    while True:
        await asyncio.sleep(every_s)
        await client.ask(Heartbeat(lease_ids=lease_ids), HeartbeatAnswer)


async def _serve(
    endpoint: str, name: str, reward: Reward, settings: RewardSection, outage_s: float
) -> None:
    client, welcome = await BrokerClient.connect(
        endpoint, role="reward_worker", name=name, outage_s=outage_s
    )
    stop = asyncio.create_task(stop_event().wait())
    limits = Limits(settings.credits, settings.timeout_s, welcome.heartbeat_s)
    job = asyncio.create_task(work(client, reward, limits))
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
        asyncio.run(
            _serve(endpoint, arguments.name, reward, settings.reward, settings.run.outage_s)
        )
        return 0

    return run_role(body)


if __name__ == "__main__":
    raise SystemExit(main())

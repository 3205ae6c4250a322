"""Generate without a run: prompts, an engine and a reward function make a trajectory file.

Without broker and learner: the policy is run.model, and its tokens are labelled v0.0. A later start
with the same settings answers the prompts that are not in the file yet.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from slipstream.broker.config import private_folders
from slipstream.broker.data.mixture import PromptSource
from slipstream.broker.data.sources import load_training_prompts, local_data
from slipstream.broker.reward_worker.pool import RewardPool
from slipstream.broker.reward_worker.scorer import Rewards
from slipstream.generators.environments.host import EnvironmentFailedError
from slipstream.generators.environments.turn_sampler import TurnSampler
from slipstream.generators.lanes.concurrency import Range
from slipstream.generators.lanes.lanes import Lanes
from slipstream.generators.rollout import Sampler, Submission, run_rollouts, submitted_transcript
from slipstream.generators.sglang.running import make_sampler, running_engine, watch
from slipstream.generators.text.codec import BadPromptError, OverlongPromptError, TextCodec
from slipstream.generators.text.images import Encoded
from slipstream.generators.tools.offline_config import OfflineSettings
from slipstream.wire.errors import ConfigError, EngineError
from slipstream.wire.files.trajectory_file import (
    NOT_TRAINED,
    RecordedGroup,
    TrajectoryFileWriter,
    read_groups,
)
from slipstream.wire.messages.broker import (
    DeliveredGroup,
    DeliveredTrajectory,
    LeasedGroup,
    ScoringItem,
)
from slipstream.wire.messages.codec import encode
from slipstream.wire.messages.trajectory import Score, Transcript
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.process.command_line import EXIT_FAILED, EXIT_INTERRUPTED
from slipstream.wire.process.run_until import first_ended, running
from slipstream.wire.process.stopping import stop_event

_log = logging.getLogger(__name__)
_VERSION = PolicyVersion(0, 0)
_PROGRESS_S = 5.0
_ATTEMPTS = 2
_RETRY_AFTER_S = 2.0  # time in which the end of an engine's process is noticed


def answered_positions(path: Path) -> set[int]:
    """Return the positions of the prompts whose groups are in a file, which may not exist."""
    if not path.exists():
        return set()
    return {recorded.group.group_id for recorded in read_groups(path)}


async def generate(
    settings: OfflineSettings,
    name: str,
    start_pool: Callable[..., Awaitable[RewardPool]] = RewardPool.start,
) -> int:
    """Write the file; return the exit code. It holds all answers finished before Ctrl-C."""
    run = settings.generator.run
    codec = TextCodec(settings.generator.model, settings.generator.sampling)
    source = load_training_prompts(local_data(settings.generator.data, run), seed=run.seed)
    folders = private_folders(run)  # those of a run in the same folder, if they exist
    hidden = [p for p in settings.generator.hidden if p not in folders or p.exists()]
    async with AsyncExitStack() as cleanup:
        pool = await start_pool(settings.reward, hide=hidden)
        cleanup.push_async_callback(pool.close)
        stop = stop_event()
        answered = answered_positions(settings.out)
        writer = TrajectoryFileWriter(settings.out)
        cleanup.callback(writer.close)
        origin = msgspec.json.format(msgspec.json.encode(settings.origin), indent=2)
        settings.origin_file.write_bytes(origin + b"\n")
        stopping = asyncio.create_task(stop.wait())
        cleanup.callback(stopping.cancel)
        started = await cleanup.enter_async_context(
            running_engine(settings.generator, name, stopping)
        )
        if started is None:
            return EXIT_INTERRUPTED
        process, engine = started
        await engine.label(_VERSION)
        sampler = make_sampler(settings.generator, engine, codec)
        turn_sampler: TurnSampler | None = None
        generator = settings.generator
        if generator.environment.is_named:
            turns = TurnSampler.running(
                generator.environment, generator.sampling, sampler, hide=generator.hidden
            )
            turn_sampler = await cleanup.enter_async_context(turns)
        generation = OfflineGeneration(
            settings, source, sampler, pool, writer, answered, turn_sampler=turn_sampler
        )
        async with running(generation.run(), watch(process)) as (job, watching):
            if job not in await first_ended(stopping, job, watching):
                return EXIT_INTERRUPTED
            return EXIT_FAILED if job.result() else 0


@dataclass(slots=True)
class _Progress:
    """Counts of the work done so far."""

    total: int
    started_s: float = field(default_factory=time.monotonic)
    prompts: int = 0
    tokens: int = 0
    dropped: int = 0
    failed: int = 0  # dropped because the engine or an environment failed
    rewards: list[float] = field(default_factory=list)

    def line(self) -> str:
        seconds = time.monotonic() - self.started_s
        mean = sum(self.rewards) / len(self.rewards) if self.rewards else float("nan")
        return (
            f"{self.prompts} of {self.total} prompts, {self.dropped} dropped, "
            f"{len(self.rewards)} answers, {self.tokens / seconds:.0f} tokens/s, "
            f"mean reward {mean:.3f}"
        )


class OfflineGeneration:
    """Keeps the engine busy with whole groups."""

    def __init__(
        self,
        settings: OfflineSettings,
        source: PromptSource,
        sampler: Sampler,
        rewards: Rewards,
        writer: TrajectoryFileWriter,
        answered: set[int],
        *,
        turn_sampler: TurnSampler | None = None,
        retry_after_s: float = _RETRY_AFTER_S,
    ) -> None:
        """Prepare; ``answered`` are the positions of prompts with an answer in the file.

        A ``turn_sampler`` runs trajectories of several turns; None answers prompts in one.
        """
        self._turn_sampler = turn_sampler
        most = settings.generator.generators.max_sequences
        self._lanes = Lanes(Range(lowest=1, highest=most, step=1))
        self._retry_after_s = retry_after_s
        self._settings = settings
        self._source = source
        self._sampler = sampler
        self._rewards = rewards
        self._writer = writer
        total = settings.num_prompts or source.num_rows
        self._open = [position for position in range(total) if position not in answered]
        self._progress = _Progress(total, prompts=total - len(self._open))

    async def run(self) -> int:
        """Answer, score and record every prompt; return how many could not be answered."""
        generator = self._settings.generator
        under_way = generator.generators.max_sequences + generator.most_outside
        lanes = max(1, under_way // generator.run.group_size)
        if self._progress.prompts:
            _log.info("%d prompts are in the file already", self._progress.prompts)
        positions = iter(self._open)
        report = asyncio.create_task(self._report())
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(lanes, len(self._open))):
                    group.create_task(self._lane(positions))
        finally:
            report.cancel()
            _log.info("%s, in %s", self._progress.line(), self._settings.out)
        if self._progress.failed:
            _log.error(
                "%d prompts failed: start again to try them once more", self._progress.failed
            )
        return self._progress.failed

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(_PROGRESS_S)
            _log.info("%s", self._progress.line())

    async def _lane(self, positions: Iterator[int]) -> None:
        for position in positions:
            reason = await self._one_prompt(position)
            self._progress.prompts += 1
            if reason:
                self._progress.dropped += 1
                _log.warning("prompt %d dropped: %s", position, reason)

    async def _one_prompt(self, position: int) -> str:
        """Record the group of one prompt, or return the reason for dropping it."""
        prompt = self._source.at(position)
        try:
            encoded = self._sampler.codec.encode(prompt)
        except OverlongPromptError as error:
            return str(error)
        except BadPromptError as error:
            if not self._settings.generator.skips_bad_prompts:
                raise
            return str(error)
        if encoded.images:
            raise ConfigError("prompts with images are answered in a run (slipstream run)")
        siblings = tuple(range(self._settings.generator.run.group_size))
        work = LeasedGroup(
            group_id=position,
            lease_id=0,
            item="train",
            position=position,
            prompt=prompt,
            siblings=siblings,
        )
        try:
            submissions = await self._sampled(work, siblings, encoded)
        except (EngineError, EnvironmentFailedError) as error:
            self._progress.failed += 1
            return str(error)
        headers = [message.header for message, _ in submissions]
        cut_off = [header for header in headers if header.finish_reason == "length"]
        if cut_off and self._settings.generator.sampling.overlong_responses == "drop":
            return f"{len(cut_off)} responses were cut off (sampling.overlong_responses)"
        transcripts = [submitted_transcript(submission, prompt) for submission in submissions]
        scores = await self._scores(submissions, transcripts)
        self._progress.tokens += sum(header.num_response_tokens for header in headers)
        trajectories = []
        for header in headers:
            score = scores[header.sibling]
            if score.reward is None:
                return f"reward unavailable: {score.unavailable}"
            trajectories.append(
                DeliveredTrajectory(
                    header=header,
                    reward=score.reward,
                    parts=score.parts,
                    turn_rewards=score.turn_rewards,
                )
            )
        self._progress.rewards += [t.reward for t in trajectories]
        group = RecordedGroup(
            step=NOT_TRAINED,
            group=DeliveredGroup(group_id=position, trajectories=tuple(trajectories)),
            payloads=tuple(frames[0] for _, frames in submissions),
            transcripts=tuple(encode(transcript) for transcript in transcripts),
        )
        self._writer.append([group])
        return ""

    async def _scores(
        self, submissions: Sequence[Submission], transcripts: Sequence[Transcript]
    ) -> dict[int, Score]:
        """Return scores by sibling: those of the environment, else of the reward function."""
        scores = {
            message.header.sibling: message.score
            for message, _ in submissions
            if message.score is not None
        }
        to_score = [
            (
                ScoringItem(
                    group_id=message.header.group_id,
                    sibling=message.header.sibling,
                    lease_id=message.header.lease_id,
                ),
                transcript,
            )
            for (message, _), transcript in zip(submissions, transcripts, strict=True)
            if message.score is None
        ]
        if to_score:
            scores |= {score.sibling: score async for score in self._rewards.score(to_score)}
        return scores

    async def _sampled(
        self, work: LeasedGroup, siblings: Sequence[int], prompt: Encoded
    ) -> list[Submission]:
        """Return all siblings, with one more attempt at those that fail."""
        done: dict[int, Submission] = {}
        for attempt in range(1, _ATTEMPTS + 1):
            missing = [sibling for sibling in siblings if sibling not in done]
            try:
                await self._sample(work, missing, prompt, done)
                break
            except (EngineError, EnvironmentFailedError) as error:
                if attempt == _ATTEMPTS:
                    raise
                _log.warning("prompt %d, attempt %d: %s", work.position, attempt, error)
                await asyncio.sleep(self._retry_after_s)
        return [done[sibling] for sibling in siblings]

    async def _sample(
        self,
        work: LeasedGroup,
        siblings: Sequence[int],
        prompt: Encoded,
        done: dict[int, Submission],
    ) -> None:
        """Sample siblings into ``done``; the failure of one does not affect the others."""
        turn_sampler = self._turn_sampler
        if turn_sampler is None:
            sampled = await run_rollouts(self._sampler, work, siblings, prompt)
            done |= {message.header.sibling: (message, frames) for message, frames in sampled}
            return
        booking = self._lanes.book(len(siblings))

        async def run(sibling: int) -> None:
            async with booking.by_call() as lanes:
                done[sibling] = await turn_sampler.run(work, sibling, lanes)

        try:
            await booking.enter()
            failures = await asyncio.gather(*map(run, siblings), return_exceptions=True)
        finally:
            booking.close()
        for error in failures:
            if error is not None:
                raise error

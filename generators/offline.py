"""Generate without a run: prompts, an engine and a reward function make a trajectory file.

No broker, no learner: the policy is run.model, its tokens are labelled v0.0.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from broker.config import DataSection, RewardSection
from broker.data.mixture import PromptSource
from broker.data.sources import load_training_prompts
from broker.rewards.loading import Reward, load_reward
from generators.config import GeneratorSettings, generator_settings
from generators.prompting import TextCodec
from generators.rollout import Rollout, Sampler, run_rollouts
from generators.running_engine import running_engine, sampling_by_item, watch
from wire.codec import decode_transcript
from wire.command_line import EXIT_INTERRUPTED
from wire.control import DeliveredGroup, DeliveredTrajectory, LeasedGroup, ScoringItem
from wire.errors import ConfigError, SlipstreamError
from wire.settings import Table, section
from wire.stopping import stop_event
from wire.trajectory import Score
from wire.trajectory_file import NOT_TRAINED, RecordedGroup, TrajectoryFileWriter
from wire.versions import PolicyVersion

_log = logging.getLogger(__name__)
_VERSION = PolicyVersion(0, 0)
_PROGRESS_S = 5.0


class OfflineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """All that generating without a run reads."""

    generator: GeneratorSettings
    data: DataSection
    reward: RewardSection
    out: Path
    num_prompts: int  # 0 is every prompt once


def offline_settings(table: Table, out: Path, num_prompts: int) -> OfflineSettings:
    """Decode and check the sections that are read.

    Raises:
        ConfigError: naming the setting or the option.
    """
    if num_prompts < 0:
        raise ConfigError(f"--num-prompts must be at least 1, got {num_prompts}")
    if out.exists():
        raise ConfigError(f"--out {out} exists; name another file or remove it")
    return OfflineSettings(
        generator=generator_settings(table),
        data=section(table, "data", DataSection),
        reward=section(table, "reward", RewardSection),
        out=out,
        num_prompts=num_prompts,
    )


async def generate(settings: OfflineSettings, name: str) -> int:
    """Write the file; return the exit code. What was finished before Ctrl-C is in it."""
    stop = stop_event()
    run = settings.generator.run
    codec = TextCodec(settings.generator.model, settings.generator.sampling)
    source = load_training_prompts(settings.data, seed=run.seed)
    reward = load_reward(settings.reward.function)
    writer = TrajectoryFileWriter(settings.out)
    stopping = asyncio.create_task(stop.wait())
    try:
        async with running_engine(settings.generator, name, stopping) as running:
            if running is None:
                return EXIT_INTERRUPTED
            process, engine = running
            await engine.label(_VERSION)
            sampler = Sampler(
                engine=engine,
                codec=codec,
                params=sampling_by_item(settings.generator),
                run_seed=run.seed if settings.generator.sampling.seed_per_sibling else None,
            )
            job = asyncio.create_task(_Generation(settings, source, sampler, reward, writer).run())
            watching = asyncio.create_task(watch(process))
            try:
                tasks = {stopping, job, watching}
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                return 0 if job in done else EXIT_INTERRUPTED
            finally:
                for task in (job, watching):
                    task.cancel()
                await asyncio.gather(job, watching, return_exceptions=True)
    finally:
        stopping.cancel()
        writer.close()


@dataclass(slots=True)
class _Progress:
    """What has been done so far."""

    total: int
    started_s: float = field(default_factory=time.monotonic)
    prompts: int = 0
    tokens: int = 0
    dropped: int = 0
    rewards: list[float] = field(default_factory=list)

    def line(self) -> str:
        seconds = time.monotonic() - self.started_s
        mean = sum(self.rewards) / len(self.rewards) if self.rewards else float("nan")
        return (
            f"{self.prompts} of {self.total} prompts, {self.dropped} dropped, "
            f"{len(self.rewards)} answers, {self.tokens / seconds:.0f} tokens/s, "
            f"mean reward {mean:.3f}"
        )


class _Generation:
    """Keeps the engine busy with whole groups."""

    def __init__(
        self,
        settings: OfflineSettings,
        source: PromptSource,
        sampler: Sampler,
        reward: Reward,
        writer: TrajectoryFileWriter,
    ) -> None:
        self._settings = settings
        self._source = source
        self._sampler = sampler
        self._reward = reward
        self._writer = writer
        self._progress = _Progress(settings.num_prompts or source.num_rows)

    async def run(self) -> None:
        """Answer, score and record every prompt."""
        generator = self._settings.generator
        lanes = max(1, generator.generators.max_sequences // generator.run.group_size)
        positions = iter(range(self._progress.total))
        report = asyncio.create_task(self._report())
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(lanes, self._progress.total)):
                    group.create_task(self._lane(positions))
        finally:
            report.cancel()
            _log.info("%s, in %s", self._progress.line(), self._settings.out)

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
        """Record the group of one prompt, or return why there is none."""
        prompt = self._source.at(position)
        try:
            prompt_ids = self._sampler.codec.encode(prompt)
        except ValueError as error:  # too long and to be dropped, or without tokens
            return str(error)
        siblings = tuple(range(self._settings.generator.run.group_size))
        work = LeasedGroup(
            group_id=position,
            lease_id=0,
            item="train",
            position=position,
            prompt=prompt,
            siblings=siblings,
        )
        rollouts = await run_rollouts(self._sampler, work, siblings, prompt_ids)
        cut_off = [r for r in rollouts if r.message.header.finish_reason == "length"]
        if cut_off and self._settings.generator.sampling.overlong_responses == "drop":
            return f"{len(cut_off)} responses were cut off (sampling.overlong_responses)"
        scores = await self._scored(rollouts)
        self._progress.tokens += sum(r.num_response_tokens for r in rollouts)
        trajectories = []
        for rollout, score in zip(rollouts, scores, strict=True):
            if score.reward is None:
                return f"reward unavailable: {score.unavailable}"
            trajectories.append(
                DeliveredTrajectory(
                    header=rollout.message.header, reward=score.reward, parts=score.parts
                )
            )
        self._progress.rewards += [t.reward for t in trajectories]
        group = RecordedGroup(
            step=NOT_TRAINED,
            group=DeliveredGroup(group_id=position, trajectories=tuple(trajectories)),
            payloads=tuple(r.frames[0] for r in rollouts),
            transcripts=tuple(r.frames[1] for r in rollouts),
        )
        self._writer.append(group)
        return ""

    async def _scored(self, rollouts: list[Rollout]) -> list[Score]:
        """Score on a thread of its own: a function that hangs must not keep us from ending."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[list[Score]] = loop.create_future()

        def finish(scores: list[Score]) -> None:
            if not answer.done():
                answer.set_result(scores)

        def score() -> None:
            scores = [
                self._reward.score(
                    ScoringItem(group_id=h.group_id, sibling=h.sibling, lease_id=h.lease_id),
                    decode_transcript(rollout.frames[1]),
                )
                for rollout in rollouts
                for h in (rollout.message.header,)
            ]
            with suppress(RuntimeError):  # the loop is closed: we were asked to end
                loop.call_soon_threadsafe(finish, scores)

        threading.Thread(target=score, name="reward", daemon=True).start()
        limit_s = self._settings.reward.timeout_s * len(rollouts)
        try:
            async with asyncio.timeout(limit_s):
                return await answer
        except TimeoutError as error:
            raise SlipstreamError(
                f"{self._reward.name} took longer than reward.timeout_s = "
                f"{self._settings.reward.timeout_s:g} per answer"
            ) from error

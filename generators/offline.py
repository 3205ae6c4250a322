"""Generate without a run: prompts, an engine and a reward function make a trajectory file.

No broker, no learner: the policy is run.model, its tokens are labelled v0.0. FILE.json beside the
file notes the settings that it was generated with, so that a later start with the same ones can
answer the prompts that are not in it yet.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec

from slipstream.broker.config import RewardSection, private_folders
from slipstream.broker.data.mixture import PromptSource
from slipstream.broker.data.sources import load_training_prompts
from slipstream.broker.reward_worker.pool import RewardPool
from slipstream.generators.config import GeneratorSettings, generator_settings
from slipstream.generators.rollout import Sampler, Submission, run_rollouts, submitted_transcript
from slipstream.generators.sglang.running import make_sampler, running_engine, watch
from slipstream.generators.text.codec import BadPromptError, OverlongPromptError, TextCodec
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
from slipstream.wire.messages.trajectory import Score, TrajectoryHeader, Transcript
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.process.command_line import EXIT_FAILED, EXIT_INTERRUPTED
from slipstream.wire.process.run_until import first_ended, running
from slipstream.wire.process.stopping import stop_event
from slipstream.wire.settings.load import Table, section

_log = logging.getLogger(__name__)
_VERSION = PolicyVersion(0, 0)
_PROGRESS_S = 5.0
_ENGINE_ATTEMPTS = 2
_RETRY_AFTER_S = 2.0  # by then we know whether the engine's process has ended


class OfflineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings for generating without a run."""

    generator: GeneratorSettings
    reward: RewardSection
    out: Path
    num_prompts: int  # 0 is every prompt once

    @property
    def origin_file(self) -> Path:
        """File with the settings that the answers were generated with."""
        return self.out.with_name(f"{self.out.name}.json")

    @property
    def origin(self) -> dict[str, Any]:
        """All settings that determine the prompts and their answers."""
        run = self.generator.run
        return {
            "run.model": str(self.generator.model.resolve()),
            "run.seed": run.seed,
            "run.group_size": run.group_size,
            "reward.function": self.reward.function,
            **self._further_rewards,
            **_settings("data", self.generator.data),
            **_settings("sampling", self.generator.sampling),
        }

    @property
    def _further_rewards(self) -> dict[str, Any]:
        """Further settings that determine the rewards, if set."""
        further = {"options": self.reward.options, "sources": self.reward.sources}
        return {
            f"reward.{key}": msgspec.to_builtins(value) for key, value in further.items() if value
        }


class Scorer(Protocol):
    """Gives rewards: a RewardPool."""

    def score(self, work: Sequence[tuple[ScoringItem, Transcript]], /) -> AsyncIterator[Score]:
        """Yield one score per answer, in any order."""
        ...


def _settings(section_name: str, values: msgspec.Struct) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(values)
    return {f"{section_name}.{key}": value for key, value in plain.items()}


def offline_settings(table: Table, out: Path, num_prompts: int) -> OfflineSettings:
    """Decode and check the sections that are read.

    Raises:
        ConfigError: naming the setting or the option.
    """
    if num_prompts < 0:
        raise ConfigError(f"--num-prompts must be at least 1, got {num_prompts}")
    generator = generator_settings(table)
    settings = OfflineSettings(
        generator=generator,
        reward=section(table, "reward", RewardSection),
        out=out,
        num_prompts=num_prompts,
    )
    if out.exists():
        _refuse_other_origin(settings)
    return settings


def _refuse_other_origin(settings: OfflineSettings) -> None:
    """Refuse a file that was not generated with these settings."""
    out, path = settings.out, settings.origin_file
    another = "name another file or remove it"
    try:
        there: dict[str, Any] = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"--out {out} exists, and {path.name}, which holds its settings, cannot "
            f"be read: {error}; {another}"
        ) from error
    ours: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(settings.origin))
    for name in sorted({*there, *ours}):
        if there.get(name) != ours.get(name):
            raise ConfigError(
                f"--out {out} exists and was generated with {name} = {there.get(name)!r}, now it "
                f"is {ours.get(name)!r}; {another}"
            )


def answered_positions(path: Path) -> set[int]:
    """Return the positions of the prompts whose groups are in a file, which may not exist."""
    if not path.exists():
        return set()
    return {recorded.group.group_id for recorded in read_groups(path)}


async def generate(settings: OfflineSettings, name: str) -> int:
    """Write the file; return the exit code. What was finished before Ctrl-C is in it."""
    run = settings.generator.run
    codec = TextCodec(settings.generator.model, settings.generator.sampling)
    source = load_training_prompts(settings.generator.data, seed=run.seed)
    folders = private_folders(run)  # of a run in the same place, if there is one
    hidden = [p for p in settings.generator.hidden if p not in folders or p.exists()]
    pool = await RewardPool.start(settings.reward, hide=hidden)
    try:
        return await _generate_with(settings, name, source, codec, pool)
    finally:
        await pool.close()


async def _generate_with(
    settings: OfflineSettings,
    name: str,
    source: PromptSource,
    codec: TextCodec,
    pool: RewardPool,
) -> int:
    stop = stop_event()
    answered = answered_positions(settings.out)
    writer = TrajectoryFileWriter(settings.out)
    origin = msgspec.json.format(msgspec.json.encode(settings.origin), indent=2)
    settings.origin_file.write_bytes(origin + b"\n")
    stopping = asyncio.create_task(stop.wait())
    try:
        async with running_engine(settings.generator, name, stopping) as started:
            if started is None:
                return EXIT_INTERRUPTED
            process, engine = started
            await engine.label(_VERSION)
            sampler = make_sampler(settings.generator, engine, codec)
            generation = Generation(settings, source, sampler, pool, writer, answered)
            async with running(generation.run(), watch(process)) as (job, watching):
                if job not in await first_ended(stopping, job, watching):
                    return EXIT_INTERRUPTED
                return EXIT_FAILED if job.result() else 0
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
    failed: int = 0  # of those dropped: by the engine
    rewards: list[float] = field(default_factory=list)

    def line(self) -> str:
        seconds = time.monotonic() - self.started_s
        mean = sum(self.rewards) / len(self.rewards) if self.rewards else float("nan")
        return (
            f"{self.prompts} of {self.total} prompts, {self.dropped} dropped, "
            f"{len(self.rewards)} answers, {self.tokens / seconds:.0f} tokens/s, "
            f"mean reward {mean:.3f}"
        )


class Generation:
    """Keeps the engine busy with whole groups."""

    def __init__(
        self,
        settings: OfflineSettings,
        source: PromptSource,
        sampler: Sampler,
        scorer: Scorer,
        writer: TrajectoryFileWriter,
        answered: set[int],
        *,
        retry_after_s: float = _RETRY_AFTER_S,
    ) -> None:
        """Prepare; ``answered`` are the positions of the prompts that are done already."""
        self._retry_after_s = retry_after_s
        self._settings = settings
        self._source = source
        self._sampler = sampler
        self._scorer = scorer
        self._writer = writer
        total = settings.num_prompts or source.num_rows
        self._open = [position for position in range(total) if position not in answered]
        self._progress = _Progress(total, prompts=total - len(self._open))

    async def run(self) -> int:
        """Answer, score and record every prompt; return how many the engine failed at."""
        generator = self._settings.generator
        lanes = max(1, generator.generators.max_sequences // generator.run.group_size)
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
                "the engine failed at %d prompts: start again to try them once more",
                self._progress.failed,
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
        """Record the group of one prompt, or return why there is none."""
        prompt = self._source.at(position)
        try:
            prompt_ids = self._sampler.codec.encode(prompt)
        except OverlongPromptError as error:
            return str(error)
        except BadPromptError as error:
            if not self._settings.generator.skips_bad_prompts:
                raise
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
        try:
            submissions = await self._sampled(work, siblings, prompt_ids)
        except EngineError as error:
            self._progress.failed += 1
            return str(error)
        headers = [message.header for message, _ in submissions]
        cut_off = [header for header in headers if header.finish_reason == "length"]
        if cut_off and self._settings.generator.sampling.overlong_responses == "drop":
            return f"{len(cut_off)} responses were cut off (sampling.overlong_responses)"
        transcripts = [submitted_transcript(one, prompt) for one in submissions]
        scores = await self._scored(headers, transcripts)
        self._progress.tokens += sum(header.num_response_tokens for header in headers)
        trajectories = []
        for header, score in zip(headers, scores, strict=True):
            if score.reward is None:
                return f"reward unavailable: {score.unavailable}"
            trajectories.append(
                DeliveredTrajectory(header=header, reward=score.reward, parts=score.parts)
            )
        self._progress.rewards += [t.reward for t in trajectories]
        group = RecordedGroup(
            step=NOT_TRAINED,
            group=DeliveredGroup(group_id=position, trajectories=tuple(trajectories)),
            payloads=tuple(frames[0] for _, frames in submissions),
            transcripts=tuple(encode(transcript) for transcript in transcripts),
        )
        self._writer.append(group)
        return ""

    async def _sampled(
        self, work: LeasedGroup, siblings: Sequence[int], prompt_ids: list[int]
    ) -> list[Submission]:
        """Return all siblings, with one more attempt if the engine fails."""
        for attempt in range(1, _ENGINE_ATTEMPTS):
            try:
                return await run_rollouts(self._sampler, work, siblings, prompt_ids)
            except EngineError as error:
                _log.warning("prompt %d, attempt %d: %s", work.position, attempt, error)
                await asyncio.sleep(self._retry_after_s)
        return await run_rollouts(self._sampler, work, siblings, prompt_ids)

    async def _scored(
        self, headers: Sequence[TrajectoryHeader], transcripts: Sequence[Transcript]
    ) -> list[Score]:
        """Return the scores in the order of the answers."""
        work = [
            (ScoringItem(group_id=h.group_id, sibling=h.sibling, lease_id=h.lease_id), transcript)
            for h, transcript in zip(headers, transcripts, strict=True)
        ]
        by_sibling = {score.sibling: score async for score in self._scorer.score(work)}
        return [by_sibling[item.sibling] for item, _ in work]

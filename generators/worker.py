"""The agent's loop: lease -> rollouts of a group -> send siblings as they finish.

Consumes: leases from the broker. Produces: trajectories. Waits for: permits (the staleness bound)
and free lanes, whose number follows the engine's KV cache. Never stops for weights: while the
engine is paused for an adopt, answers in flight wait inside it.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Literal

from slipstream.broker.client import BrokerClient
from slipstream.broker.images import LocalImages
from slipstream.broker.reward_worker.scorer import Rewards, Scorer
from slipstream.generators.engine import EngineLoad
from slipstream.generators.environments.host import EnvironmentFailedError, EnvironmentLostError
from slipstream.generators.environments.turn_sampler import TurnSampler
from slipstream.generators.lanes.lanes import Booking, EngineLanes, Lanes
from slipstream.generators.lanes.pace import EnginePace
from slipstream.generators.rollout import (
    Sampler,
    Submission,
    decision_bytes,
    newest_version,
    run_rollouts,
    submitted_transcript,
)
from slipstream.generators.text.codec import BadPromptError, OverlongPromptError
from slipstream.generators.text.images import Encoded
from slipstream.generators.versions.probe_audit import ProbeAudit
from slipstream.wire.errors import EngineError, HostRoomError, ImageError, RefusedError
from slipstream.wire.messages.bounds import finite, shortened
from slipstream.wire.messages.broker import (
    Done,
    EngineQuarantined,
    Goodbye,
    GroupsLeased,
    Heartbeat,
    HeartbeatAnswer,
    LeasedGroup,
    LeaseGroups,
    RejectPrompt,
    ReleaseLease,
    RoleReport,
    ScoringItem,
    SubmitTrajectory,
)
from slipstream.wire.messages.status import REPORT_EVERY_S
from slipstream.wire.messages.trajectory import NO_SCORING_LEASE, Prompt
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.process.phases import ACT, WAIT, PhaseClock
from slipstream.wire.process.usage import ProcessUsage

_log = logging.getLogger(__name__)
_POLL_S = 0.5  # free lanes beyond those asked for wait no longer than this
_RETRY_S = 0.5
_SHARE_WEIGHT = REPORT_EVERY_S / 60.0  # weight of a reading in a mean over about a minute
_COUNTED = (
    "tokens",
    "trajectories",
    "retracted",
    "decision_bytes",
    "refused",
    "failed",
    "rejected",
    "unavailable",
    "environment_failed",
    "engine_s",  # trajectories of several turns alone have these two
    "environment_s",
)


class GeneratorWorker:
    """Keeps one engine busy with groups of the broker."""

    def __init__(
        self,
        *,
        client: BrokerClient,
        images: LocalImages,
        sampler: Sampler,
        lanes: Lanes,
        siblings_together: bool,
        skips_bad_prompts: bool,
        rewards: Rewards | None = None,
        max_credits: int = 64,
        engine_patience_s: float = 120.0,
        audit: ProbeAudit | None = None,
        turn_sampler: TurnSampler | None = None,
    ) -> None:
        """Start without weights.

        Args:
            client: Client of the broker.
            images: Files of images of prompts.
            sampler: Samples answers.
            lanes: Lanes of the engine.
            siblings_together: True if the siblings of a group are one request.
            skips_bad_prompts: True if a prompt without tokens is rejected instead of raising.
            rewards: Scores answers before they are sent, and answers that another generator could
                not score; None leaves both to reward workers.
            max_credits: Most answers of other generators to score at a time.
            engine_patience_s: Time in which an engine that failed must answer again.
            audit: Passes versions whose answers may be sent; None passes all.
            turn_sampler: Runs trajectories of several turns; None answers prompts in one turn.
        """
        self._audit = audit
        self._max_credits = max_credits
        self._engine_patience_s = engine_patience_s
        self._rewards = rewards
        self._images = images
        self._client = client
        self._sampler = sampler
        self._turn_sampler = turn_sampler
        self._lanes = lanes
        self._together = siblings_together
        self._skips_bad_prompts = skips_bad_prompts
        self._load: EngineLoad | None = None  # last observed load
        self._adopted: PolicyVersion | None = None
        self._situation_changed = asyncio.Event()
        self._num_answers = 0  # the broker's answers to requests for work, while the engine idled
        self._mean_share = 1.0  # lanes by a tenant's fair share of them, averaged
        self._finished = False
        self._paused = False
        self._groups: dict[int, asyncio.Task[None]] = {}  # keys are leases
        self._generating: set[int] = set()  # leases whose siblings are not all sampled yet
        client.held = self._groups.keys
        self._clock = PhaseClock()
        self._pace = EnginePace(self._stood_s, counts_calls=not siblings_together)
        self._counters = dict.fromkeys(_COUNTED, 0.0)
        self._usage = ProcessUsage(gpus=True)
        self._more_counters: Callable[[], Mapping[str, float]] = dict

    # ---- callbacks of the weight bus -----------------------------------------

    def pausing(self) -> None:
        """The engine is about to stop for new weights."""
        self._paused = True
        self._clock.enter_within("adopt")

    def adopted(self, version: PolicyVersion, stood_s: float | None = None) -> None:
        """The engine runs ``version``, and stood still for ``stood_s``; None is since ``pausing``.

        An engine finishes its current batch before it pauses, and generates again before its answer
        arrives.
        """
        self._adopted = version
        self._paused = False
        if stood_s is not None:
            self._clock.settle(stood_s)
        self._situation_changed.set()
        self._enter_phase()
        _log.info("adopted %s with %d groups under way", version.label, len(self._groups))

    def _stood_s(self) -> float:
        """Seconds that the engine has stood still for new weights."""
        return self._clock.seconds().get("adopt", 0.0)

    def _enter_phase(self) -> None:
        if self._paused:
            return
        is_idle = self._lanes.acting > 0 and not self._lanes.calling
        busy = ACT if is_idle else "generate"
        self._clock.enter(busy if self._groups else WAIT)

    # ---- health --------------------------------------------------------------

    def signs(self) -> tuple[object, ...]:
        """Return figures that change with progress: tokens of the engine, answers sent, versions.

        The broker's answers count only while the engine has nothing to do: a worker also asks for
        work while its engine hangs.
        """
        used_tokens = self._load.used_tokens if self._load is not None else 0
        ended = tuple(self._counters[name] for name in _COUNTED)
        return used_tokens, ended, self._adopted, self._num_answers

    def missing(self) -> str:
        """Return the reason why the worker cannot generate yet; empty if it can."""
        return "" if self._adopted is not None else "its engine has adopted no version yet"

    # ---- the loop ------------------------------------------------------------

    async def run(
        self,
        *,
        heartbeat_s: float,
        report_every_s: float = REPORT_EVERY_S,
        more_counters: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        """Work until the run is finished; report ``more_counters`` besides the worker's own."""
        self._more_counters = more_counters
        async with asyncio.TaskGroup() as group:
            others = [
                group.create_task(self._heartbeats(heartbeat_s)),
                group.create_task(self._observe_load(report_every_s)),
                group.create_task(self._reports(report_every_s)),
            ]
            if self._rewards is not None:
                scorer = Scorer(
                    self._client,
                    self._rewards,
                    self._images,
                    max_credits=self._max_credits,
                    heartbeat_s=heartbeat_s,
                )
                group.create_task(scorer.run())
            try:
                while not self._finished:
                    await self._lanes.until_free()
                    self._situation_changed.clear()
                    request = group.create_task(self._ask_for_groups(group))
                    change = asyncio.create_task(self._situation_changed.wait())
                    # An adopt replaces the pending request: it earns new permits.
                    await asyncio.wait({request, change}, return_when=asyncio.FIRST_COMPLETED)
                    change.cancel()
            finally:
                for task in others:
                    task.cancel()
        await self._report()

    async def _ask_for_groups(self, group: asyncio.TaskGroup) -> None:
        asked = self._lanes.ask()
        leased, _ = await self._client.ask(
            LeaseGroups(adopted=self._adopted, max_sequences=asked, wait_s=_POLL_S),
            GroupsLeased,
            extra_wait_s=_POLL_S,
        )
        self._num_answers += not self._lanes.in_flight
        for work in leased.groups:
            booking = self._lanes.book(len(work.siblings))
            task = group.create_task(self._run_group(work, booking))
            self._groups[work.lease_id] = task
            self._generating.add(work.lease_id)
            self._enter_phase()
        self._lanes.answered(asked, sum(len(work.siblings) for work in leased.groups))
        self._finished = self._finished or leased.finished

    async def _run_group(self, work: LeasedGroup, booking: Booking) -> None:
        try:
            async with AsyncExitStack() as stack:
                try:
                    prompt = self._sampler.codec.encode(work.prompt)
                    files = await self._files_of(work.prompt, stack)
                except OverlongPromptError as why:
                    await self._reject(work, "overlong_prompt", why)
                except BadPromptError as why:
                    if not self._skips_bad_prompts:
                        raise
                    await self._reject(work, "bad_prompt", why)
                else:
                    await booking.enter()
                    await self._generate(work, prompt, files, booking)
        except* (EngineError, EnvironmentFailedError, ValueError) as failed:
            error = failed.exceptions[0]
            if isinstance(error, EngineError):
                await self._await_engine()
            self._counters["failed"] += 1
            _log.warning("group %d handed back: %s", work.group_id, error)
            with suppress(RefusedError):
                release = ReleaseLease(
                    lease_id=work.lease_id,
                    reason=str(error)[:200],
                    is_stranded=isinstance(error, EnvironmentLostError),
                )
                await self._client.ask(release, Done)
        finally:
            del self._groups[work.lease_id]
            self._generating.discard(work.lease_id)
            booking.close()
            self._enter_phase()

    async def _files_of(self, prompt: Prompt, stack: AsyncExitStack) -> list[Path]:
        """Return files of a prompt's images, which stay until the stack is closed.

        Raises:
            BadPromptError: an image is missing, or changed on disk.
            EngineError: there is no room for it here, as for an engine that cannot start.
        """
        digests = [image.digest for image in prompt.images]
        try:
            return await stack.enter_async_context(self._images.files(digests))
        except HostRoomError as error:
            raise EngineError(str(error)) from error
        except ImageError as error:
            raise BadPromptError(prompt, str(error)) from error

    async def _await_engine(self) -> None:
        """Wait until the engine answers again: a group handed back at once would return at once.

        If the engine's process has ended, this generator ends meanwhile, and its leases are one
        attempt together. The wait for an engine that neither ends nor answers is limited.
        """
        until_s = time.monotonic() + self._engine_patience_s
        while time.monotonic() < until_s:
            with suppress(EngineError):
                await self._sampler.engine.load()
                return
            await asyncio.sleep(_RETRY_S)

    async def _reject(
        self, work: LeasedGroup, reason: Literal["overlong_prompt", "bad_prompt"], error: Exception
    ) -> None:
        self._counters["rejected"] += 1
        _log.info("group %d rejected: %s", work.group_id, error)
        with suppress(RefusedError):
            rejection = RejectPrompt(
                lease_id=work.lease_id, reason=reason, detail=shortened(str(error))
            )
            await self._client.ask(rejection, Done)

    async def _generate(
        self, work: LeasedGroup, prompt: Encoded, files: list[Path], booking: Booking
    ) -> None:
        """Sample the siblings, together or one by one, and send each when it is finished."""
        together = [work.siblings] if self._together else [(s,) for s in work.siblings]
        unsent = len(work.siblings)
        failed: list[EnvironmentFailedError] = []

        async def score_and_send(submission: Submission) -> None:
            nonlocal unsent
            if self._rewards is not None and submission[0].score is None:
                submission = await self._scored(submission, work.prompt, self._rewards)
            unsent -= 1
            if unsent == 0:
                self._generating.discard(work.lease_id)  # the broker ends it
            message, frames = submission
            self._counters["tokens"] += message.header.num_response_tokens
            self._counters["trajectories"] += 1
            self._counters["decision_bytes"] += decision_bytes(submission)
            try:
                await self._client.ask(message, Done, frames=frames)
            except RefusedError as error:
                self._counters["refused"] += 1
                _log.warning("%s", error)

        async def sample_and_send(siblings: tuple[int, ...]) -> None:
            try:
                submissions = await self._sampled(work, siblings, prompt, files, booking)
            except EnvironmentFailedError as error:  # its siblings continue
                self._counters["environment_failed"] += 1
                booking.leave(len(siblings))
                failed.append(error)
                return
            if self._audit is not None:  # answers keep their lanes while they wait, so few can wait
                await self._audit.until_proven(newest_version(submissions))
            booking.leave(len(siblings))  # scoring and sending take no lane
            await asyncio.gather(*map(score_and_send, submissions))

        async with asyncio.TaskGroup() as group:  # an error ends all siblings
            for siblings in together:
                group.create_task(sample_and_send(siblings))
        if failed:  # an error of the group's own counts more than a lost server
            raise min(failed, key=lambda error: isinstance(error, EnvironmentLostError))

    async def _sampled(
        self,
        work: LeasedGroup,
        siblings: tuple[int, ...],
        prompt: Encoded,
        files: list[Path],
        booking: Booking,
    ) -> list[Submission]:
        """Sample siblings; a trajectory of several turns comes alone."""
        if self._turn_sampler is None:
            with self._pace.call() as call:
                sampled = await run_rollouts(self._sampler, work, siblings, prompt, files)
                call.num_tokens = max(message.header.num_response_tokens for message, _ in sampled)
            return sampled
        async with booking.by_call(self._enter_phase) as lanes:
            try:
                return [
                    await self._turn_sampler.run(work, sibling, lanes, images=self._images)
                    for sibling in siblings
                ]
            finally:
                engine_s, environment_s = lanes.seconds()
                self._counters["engine_s"] += engine_s
                self._counters["environment_s"] += environment_s

    async def _scored(self, submission: Submission, prompt: Prompt, rewards: Rewards) -> Submission:
        """Score an answer here; an answer without a reward is scored elsewhere."""
        message, frames = submission
        header = message.header
        item = ScoringItem(
            group_id=header.group_id, sibling=header.sibling, lease_id=NO_SCORING_LEASE
        )
        found = None
        async with AsyncExitStack() as stack:
            transcript = submitted_transcript(submission, prompt)
            shown = await self._images.shown(transcript, stack)
            async for score in rewards.score([(item, shown)]):
                self._counters["unavailable"] += score.reward is None
                found = score
        return SubmitTrajectory(header=header, score=found), frames

    async def _heartbeats(self, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            if not self._generating:
                continue
            answer, _ = await self._client.ask(
                Heartbeat(lease_ids=tuple(self._generating)), HeartbeatAnswer
            )
            for lease_id in self._generating.intersection(answer.lost):
                if (task := self._groups.get(lease_id)) is not None:
                    _log.warning("lease %d was lost", lease_id)
                    task.cancel()

    async def _observe_load(self, every_s: float) -> None:
        """Adjust the lanes to the engine's load, except while it is paused."""
        fails = False
        while True:
            try:
                load = await self._sampler.engine.load()
            except EngineError as error:
                if not fails:
                    _log.warning("%s; the lanes stay as they are", error)
                fails = True
            else:
                fails = False
                self._load = load
                self._counters["retracted"] = load.num_retractions
                self._pace.observe(load.num_running)
                if not self._paused:
                    self._lanes.observe(load)
            await asyncio.sleep(every_s)

    async def _reports(self, every_s: float) -> None:
        while True:
            await self._report()
            await asyncio.sleep(every_s)

    async def _report(self) -> None:
        lanes = self._lanes
        gauges: dict[str, float] = {"sequences": lanes.in_flight, "sequence_limit": lanes.limit}
        if self._load is not None:
            gauges["kv_use"] = self._load.kv_use
        if lanes.shared is not None:
            gauges["lane_share"] = self._lane_share(lanes.shared)
        counters = {**self._counters, **self._pace.counters, **self._more_counters()}
        rewritten = ""
        if self._turn_sampler is not None:
            gauges["acting"] = lanes.acting
            counters |= self._turn_sampler.counters
            rewritten = self._turn_sampler.differences.newest
        if self._audit is not None:
            counters |= self._audit.counters
            gauges |= self._audit.gauges
        gauges |= self._usage.gauges()
        report = RoleReport(
            phase_seconds=self._clock.seconds(),
            counters=finite(counters),
            adopted=self._adopted,
            gauges=finite(gauges),
            rewritten=rewritten,
        )
        await self._client.ask(report, Done)

    def _lane_share(self, shared: EngineLanes) -> float:
        """Return this tenant's lanes by its fair share, averaged; 1 if it needs no more."""
        fair = shared.fair_share(self._lanes)
        now = self._lanes.in_flight / fair if fair and not self._lanes.is_sated else 1.0
        self._mean_share += (min(1.0, now) - self._mean_share) * _SHARE_WEIGHT
        return self._mean_share

    async def report_quarantine(self, why: str) -> None:
        """Have the broker record why the engine is not trusted. Cancel ``run`` before."""
        await self._report()
        if self._audit is not None and self._audit.condemned is not None:
            found = EngineQuarantined(version=self._audit.condemned, reason=why)
            await self._client.ask(found, Done)

    async def hand_back(self) -> None:
        """Return every lease, because this generator ends. Cancel ``run`` before."""
        await self._client.ask(Goodbye(), Done)

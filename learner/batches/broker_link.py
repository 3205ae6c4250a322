"""Rank 0's requests to the broker and the weight relay, for a thread without a loop."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from typing_extensions import override

from slipstream.learner.batches.orders import Rejection, StepPlan, plan_batch
from slipstream.learner.batches.payload_link import PayloadLink
from slipstream.learner.batches.prefetch import EarlyPlans
from slipstream.learner.config import LearnerSettings
from slipstream.learner.publish.relay_link import RelayLink
from slipstream.learner.publish.relay_process import RelayLaunch
from slipstream.wire.errors import ProtocolError, RefusedError, SlipstreamError
from slipstream.wire.files.checkpoints import CheckpointInfo
from slipstream.wire.messages.bounds import finite, shortened
from slipstream.wire.messages.broker import (
    BatchDelivered,
    BatchNotReady,
    Done,
    GetLedgerSnapshot,
    Goodbye,
    LedgerSnapshotAnswer,
    RejectBatch,
    RequestBatch,
    Role,
    RoleReport,
    RunComplete,
    SealSteps,
    StepCommit,
    StepCommitted,
    TakeOver,
    TookOver,
)
from slipstream.wire.messages.manifest import WeightManifest
from slipstream.wire.messages.probe import ProbeLogprobs
from slipstream.wire.messages.status import REPORT_EVERY_S
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.messages.weightbus import RelayAddress
from slipstream.wire.models.flops import SequenceCost
from slipstream.wire.models.hf_config import load_hf_config
from slipstream.wire.process.background import BackgroundLoop
from slipstream.wire.process.phases import PhaseClock
from slipstream.wire.process.usage import ProcessUsage

_log = logging.getLogger(__name__)
_POLL_S, _LOG_WAITING_AFTER_S = 1.0, 10.0
_GOODBYE_S = 10.0


class LeaderLink(PayloadLink):
    """Rank 0's further requests: batches, commits, publishes, reports."""

    publishes = True  # whole weights are wanted after each step
    _role: Role = "learner"

    def __init__(
        self,
        loop: BackgroundLoop,
        settings: LearnerSettings,
        clock: PhaseClock,
        should_stop: Callable[[], bool],
        *,
        relay: RelayLaunch,
        early: EarlyPlans | None = None,
        on_door: Callable[[RelayAddress], None] | None = None,
    ) -> None:
        """Connect to the broker; the weight relay is started with ``open_weights``.

        ``early`` announces coming batches to the other ranks; None if there are none. ``on_door``
        receives the address where each relay listens for other hosts.

        Raises:
            PeerLostError: no broker answers.
            ConfigError: the broker does not want this client.
        """
        super().__init__(loop, settings, "learner", replica=0, early=early)
        self._settings = settings
        self._cost = SequenceCost.of(load_hf_config(settings.model), settings.adapters)
        self._clock = clock
        self._should_stop = should_stop
        self._tokens = 0
        self._usage = ProcessUsage(gpus=True)
        self._version: PolicyVersion | None = None
        self._waits_for: PolicyVersion | None = None  # start of the step awaited
        self._waits_since = 0.0
        self._logged = ""  # last logged reason of that wait
        self._last_step = settings.run.steps  # last step, as the other ranks know it
        self._found: StepPlan | None = None  # plan of a coming step
        self._posted: int | None = None  # step posted for the other ranks
        self._watched: asyncio.Task[None] | None = None  # wait for an answer that is no wait
        settings.run.make_socket_folder()
        self._relay = RelayLink(settings.run.endpoint("relay"), relay, on_door=on_door)
        loop.start(self._reports())

    @property
    def run_id(self) -> str:
        """The identity of the run that the broker serves."""
        return self._client.run_id

    def take_over(
        self, step: int, checkpoint: str, resumed: CheckpointInfo | None
    ) -> PolicyVersion:
        """Become the run's learner at ``step``; return the version of the weights held.

        ``checkpoint`` is the name of the checkpoint resumed from, ``resumed`` its description;
        empty and None for the policy that the run started with.
        """
        request = TakeOver(
            step=step,
            checkpoint=checkpoint,
            held=resumed.version if resumed is not None else None,
            run_id=resumed.run_id if resumed is not None else "",
        )
        answer, _ = self._loop.run(self._client.ask(request, TookOver))
        self._version = answer.version
        return answer.version

    def next_order(
        self, version: PolicyVersion, *, max_wait_s: float
    ) -> StepPlan | BatchNotReady | RunComplete:
        """Wait for the batch of the step that starts from ``version``, or for a stop request.

        News of the run's last step come at once, not after ``max_wait_s``.
        The request is sent even if the batch was found in the background: this answer counts,
        and the same batch comes again at once.
        """
        self._loop.run(self._end_watch())
        self._loop.call(self._end_search)
        since = time.monotonic()
        if self._waits_for != version:  # otherwise the same wait goes over several calls
            self._waits_for, self._waits_since, self._logged = version, since, ""
        while True:
            self._loop.check()
            wait_s = min(_POLL_S, max_wait_s)
            match self._loop.run(self._request_batch(version, version.step, wait_s=wait_s)):
                case BatchDelivered() as batch:
                    self._waits_for = None
                    found = self._found  # already planned for its prefetch
                    if found is not None and found.batch == batch:
                        return found
                    return plan_batch(batch, self._settings, cost=self._cost)
                case RunComplete() as complete:
                    return complete
                case BatchNotReady(reason=reason, last_step=last_step) as answer:
                    now = time.monotonic()
                    is_news = last_step != self._last_step
                    self._last_step = last_step
                    waited_s = now - self._waits_since
                    if waited_s > _LOG_WAITING_AFTER_S and reason != self._logged:
                        _log.info("no batch for %.0f s: waiting for %s", waited_s, reason)
                        self._logged = reason
                    if is_news or now - since > max_wait_s or self._should_stop():
                        return answer

    @property
    def has_news(self) -> bool:
        """True if ``next_order`` would not wait, after ``watch``."""
        return self._watched is not None and self._watched.done()

    def watch(self, version: PolicyVersion) -> None:
        """Begin to wait for what follows ``version``, in the background.

        A batch is planned, and its payloads are fetched.
        """
        self._loop.run(self._begin_watch(version))

    def reject_batch(self, version: PolicyVersion, rejection: Rejection) -> None:
        """Report that the batch of this step was not trained; returns when durable."""
        request = RejectBatch(
            version=version,
            step=version.step,
            reason=rejection.reason,
            groups=rejection.groups,
            detail=shortened(rejection.detail),
        )
        self._loop.run(self._forget_next())
        self._loop.run(self._client.ask(request, Done))

    def commit(
        self, version: PolicyVersion, metrics: dict[str, float], num_tokens: int
    ) -> StepCommitted:
        """Report that the step is trained; return all evaluations so far and the last step."""
        self._tokens += num_tokens
        request = StepCommit(version=version, metrics=finite(metrics))
        answer, _ = self._loop.run(self._client.ask(request, StepCommitted))
        self._version = version
        self._last_step = answer.last_step
        return answer

    def ledger_snapshot(self, version: PolicyVersion) -> bytes:
        """Return the broker's ledger, for a checkpoint of ``version``."""
        request = GetLedgerSnapshot(version=version)
        answer, _ = self._loop.run(self._client.ask(request, LedgerSnapshotAnswer))
        return answer.data

    def leave(self, *, is_stopped: bool = False) -> None:
        """Let the other roles leave; returns when that is durable.

        Args:
            is_stopped: True reports a requested stop, if the broker can be reached.
        """
        if not is_stopped:
            self._loop.run(self._client.ask(Goodbye(), Done))
            return
        with suppress(SlipstreamError, TimeoutError):
            self._loop.run(self._stopped())

    async def _stopped(self) -> None:
        async with asyncio.timeout(_GOODBYE_S):
            await self._client.ask(Goodbye(is_stopped=True), Done)

    def seal(self, version: PolicyVersion, *, step: int, oldest_kept: int) -> None:
        """Report steps that the broker need not keep any more; returns when that is durable."""
        request = SealSteps(version=version, step=step, oldest_kept=oldest_kept)
        self._loop.run(self._client.ask(request, Done))

    def open_weights(
        self, paths: Sequence[str], layout: WeightManifest, *, part_keys: Sequence[str] = ()
    ) -> None:
        """Start the relay and announce where versions will be written.

        ``part_keys`` are the public keys of the relays of the learner's other hosts.
        """
        self._loop.start(self._relay.run())
        epoch = self._version.epoch if self._version is not None else 0
        opening = self._relay.open(
            paths, layout, epoch=epoch, run_id=self.run_id, part_keys=part_keys
        )
        self._loop.run(opening)

    def reserve(self) -> int:
        """Return the slot to write the next version into."""
        self._loop.check()
        return self._loop.run(self._relay.reserve())

    def publish(self, version: PolicyVersion, slot: int, probe: ProbeLogprobs | None) -> None:
        """Hand a version to the relay, with its probe; the transfer does not wait."""
        self._loop.run(self._relay.written(version, slot, probe))

    def end(self) -> None:
        """Stop the relay: this learner ends as planned, and no other follows it."""
        self._loop.run(self._relay.end())

    # ---- the next batch, on the event loop -----------------------------------

    async def _request_batch(
        self, version: PolicyVersion, step: int, *, wait_s: float = _POLL_S
    ) -> BatchDelivered | BatchNotReady | RunComplete:
        request = RequestBatch(version=version, step=step, wait_s=wait_s)
        answer, _ = await self._client.ask_any(request, extra_wait_s=wait_s)
        match answer:
            case BatchDelivered() | BatchNotReady() | RunComplete():
                return answer
            case _:
                raise ProtocolError(f"RequestBatch was answered by {answer!r}")

    @override
    async def _begin_search(self, step: int) -> None:
        await self._forget_next()
        if step < self._last_step:
            await super()._begin_search(step)

    @override
    async def _find(self, step: int) -> None:
        """Wait for the batch of a coming step, post it for other ranks, fetch this rank's share."""
        batch = await self._find_batch(step)
        if batch is not None:
            self._prepare(batch)

    def _prepare(self, batch: BatchDelivered) -> None:
        """Plan a batch, post it for other ranks, begin to fetch this rank's share."""
        order, step = plan_batch(batch, self._settings, cost=self._cost), batch.step
        self._found = order
        if self._early is not None:
            replicas = range(len(order.plans[0].microbatches))
            self._early.post(step, tuple(order.keys(replica) for replica in replicas))
            self._posted = step
        self._prefetched.begin(step, order.keys(self._replica))

    async def _begin_watch(self, version: PolicyVersion) -> None:
        await self._end_watch()
        self._watched = asyncio.create_task(self._watching(version))

    async def _end_watch(self) -> None:
        """End the wait; raise the error that ended it before."""
        watched, self._watched = self._watched, None
        if watched is None:
            return
        if not watched.done():
            watched.cancel()
        elif not watched.cancelled():
            watched.result()

    async def _watching(self, version: PolicyVersion) -> None:
        """Return once the broker has a batch, the end of the run, or news of its last step."""
        if self._search is not None:  # begun while the step before was trained
            await asyncio.wait({self._search})
        if self._found is not None and self._found.step == version.step:
            return
        while True:
            asked_at_s = time.monotonic()
            match await self._request_batch(version, version.step):
                case BatchDelivered() as batch:
                    self._prepare(batch)
                    return
                case BatchNotReady(last_step=last_step) if last_step == self._last_step:
                    await asyncio.sleep(max(0.0, asked_at_s + _POLL_S - time.monotonic()))
                case _:
                    return

    async def _find_batch(self, step: int) -> BatchDelivered | None:
        """Ask until there is a batch; None if no more will come."""
        while True:
            asked_at_s = time.monotonic()
            if self._version is None:
                return None
            try:
                answer = await self._request_batch(self._version, step)
            except RefusedError as error:  # asked with the version before a commit
                _log.debug("step %d is asked for again: %s", step, error)
            else:
                match answer:
                    case BatchDelivered():
                        return answer
                    case BatchNotReady(last_step=last_step) if step < last_step:
                        pass
                    case _:
                        return None
            await asyncio.sleep(max(0.0, asked_at_s + _POLL_S - time.monotonic()))

    async def _forget_next(self) -> None:
        self._end_search()
        self._prefetched.drop()
        self._found = None
        if self._early is not None and self._posted is not None:
            self._early.remove(self._posted)
        self._posted = None

    # ---- reports -------------------------------------------------------------

    async def _reports(self) -> None:
        while True:
            report = RoleReport(
                phase_seconds=self._clock.seconds(),
                counters={"tokens": float(self._tokens)},
                adopted=self._version,
                gauges=finite(self._usage.gauges()),
            )
            await self._client.ask(report, Done)
            await asyncio.sleep(REPORT_EVERY_S)

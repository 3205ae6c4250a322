"""Proof that an engine computes what its learner does, version by version.

Consumes: adopted versions with the learner's logprobs of a probe. Produces: a verdict on each.
Waits for: the engine's logprobs of the probe, which it computes among its other work. Until a
version is proven, answers with tokens of it wait; a verdict against it ends the generator, and they
are never sent.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from slipstream.generators.engine import Scores
from slipstream.generators.versions.probe_noise import LogprobDifference, Noise, difference
from slipstream.wire.errors import EngineError, QuarantineError
from slipstream.wire.messages.probe import ProbeLogprobs
from slipstream.wire.messages.versions import PolicyVersion

_log = logging.getLogger(__name__)
_TRIES = 3  # failures of an engine to answer
_RETRY_S = 1.0  # after an error
_AGAIN_S = 0.05  # after a change of versions
_KEPT = 8  # probes of versions that may still have answers


class ScoringEngine(Protocol):
    """The part of an engine that computes probes."""

    async def score(self, sequences: Sequence[Sequence[int]], *, num_context: int) -> Scores:
        """Return the logprobs of tokens after the context, from the cache where it has any."""
        ...


class ProbeAudit:
    """Verdicts on the versions of one engine. Use it inside one event loop."""

    def __init__(self, engine: ScoringEngine, noise: Noise) -> None:
        self._engine = engine
        self._noise = noise
        self._probes: dict[PolicyVersion, ProbeLogprobs] = {}  # the newest, oldest first
        self._engines: Sequence[str] = ()  # engines that served parts of the last version
        self._pending: PolicyVersion | None = None  # last adopted version, without a verdict
        self._passed: PolicyVersion | None = None  # answers up to this version may be sent
        self._changed = asyncio.Event()
        self._scored: PolicyVersion | None = (
            None  # newest version that the engine has answered under
        )
        self._is_unsure = False  # True: it may have computed a probe since then
        self._num_adopts = 0
        self._num_pauses = 0
        self._is_paused = False
        self.condemned: PolicyVersion | None = None  # version that the engine does not compute
        self.last: LogprobDifference | None = None
        self.counters = dict.fromkeys(("probes", "unproven"), 0.0)

    # ---- callbacks of the weight bus -----------------------------------------

    def pausing(self) -> None:
        """The engine is about to stop for new weights."""
        self._is_paused = True
        self._num_pauses += 1

    def resumed(self) -> None:
        """The engine generates again, with a new version or the one before."""
        self._is_paused = False

    def adopted(
        self, version: PolicyVersion, probe: ProbeLogprobs | None, engines: Sequence[str] = ()
    ) -> None:
        """The engine runs a version; without a probe its answers are sent as they come.

        Args:
            version: Version that the engine runs.
            probe: Logprobs that the engine should compute; None for a version without a probe.
            engines: Other engines that have served parts of the version.
        """
        self._num_adopts += 1
        self._engines = engines
        if probe is None:
            if self._pending is not None:
                self._unproven(self._pending, "a version without a probe followed")
            self._pass(version)
        else:
            self._probes[version] = probe
            while len(self._probes) > _KEPT:
                del self._probes[next(iter(self._probes))]
            self._pending = version
        self._wake()

    # ---- for the worker --------------------------------------------------------

    async def until_proven(self, version: PolicyVersion) -> None:
        """Return once answers of a version may be sent: never, after a verdict against it."""
        while self._passed is None or self._passed < version:
            await self._changed.wait()

    @property
    def gauges(self) -> dict[str, float]:
        """The last difference, and the largest that is taken for noise, in nats."""
        if self.last is None:
            return {}
        return {"probe_difference": self.last.mean, "probe_bound": self._noise.bound.mean}

    # ---- the loop ----------------------------------------------------------------

    async def run(self) -> None:
        """Compare until cancelled.

        Raises:
            QuarantineError: the engine computes other logprobs than the learner.
        """
        num_failed, of_adopt = 0, 0
        while True:
            if self._num_adopts != of_adopt:
                num_failed, of_adopt = 0, self._num_adopts
            version = self._pending
            if version is None:
                await self._changed.wait()
                continue
            again_s = _AGAIN_S
            try:
                why = await self._ask(version)
            except EngineError as error:
                self._is_unsure = True
                why, again_s = str(error), _RETRY_S
            if not why or version != self._pending:
                continue
            num_failed += not self._is_paused
            if num_failed >= _TRIES:
                self._condemn(version, f"it was asked {num_failed} times for a probe: {why}")
            _log.warning("the probe of %s is asked again: %s", version.label, why)
            await asyncio.sleep(again_s)

    async def _ask(self, version: PolicyVersion) -> str:
        """Have a probe computed and judge it; return why there is no verdict, or an empty text.

        After a pause a request is computed again, under the next version, whose probe has other
        tokens: then there is no verdict.

        Raises:
            EngineError: the engine did not answer.
        """
        probe, num_pauses = self._probes[version], self._num_pauses
        scores = await self._engine.score(probe.sequences, num_context=probe.num_context)
        found = scores.version
        if found is None:
            self._is_unsure = True
            return "versions changed while it was computed"
        is_new = self._scored is None or self._scored < found
        is_first = is_new and not self._is_unsure and num_pauses == self._num_pauses
        self._scored, self._is_unsure = found, False
        # A proven version is pending again after a repair.
        is_due = found == self._pending or self._is_open(found)
        if found != version or not is_due:
            return f"the engine computed it under {found.label}"
        self._judge(found, probe, scores, is_first=is_first)
        return ""

    def _judge(
        self, version: PolicyVersion, probe: ProbeLogprobs, scores: Scores, *, is_first: bool
    ) -> None:
        """Pass a version or raise; ``is_first`` is True for the engine's first probe of it."""
        self.counters["probes"] += 1
        found = difference(scores.logprobs, probe.logprobs)
        self.last, bound = found, self._noise.bound
        if is_first and scores.num_cached > probe.num_context // 2:
            self._condemn(
                version,
                f"its prefix cache held {scores.num_cached} tokens of the probe from before",
            )
        if not self._noise.is_noise(found):
            self._condemn(version, f"its logprobs of the probe differ by {found}, of noise {bound}")
        _log.info("%s is proven: %s", version.label, found)
        self.counters["unproven"] += sum(
            self._is_open(known) and known < version for known in self._probes
        )
        if self._pending is not None and self._pending <= version:
            self._pending = None
        self._pass(version)

    def _is_open(self, version: PolicyVersion) -> bool:
        return self._passed is None or self._passed < version

    def _unproven(self, version: PolicyVersion, why: str) -> None:
        self.counters["unproven"] += 1
        self._pending = None
        _log.warning("%s is not proven: %s", version.label, why)

    def _pass(self, version: PolicyVersion) -> None:
        if self._passed is None or self._passed < version:
            self._passed = version
        self._wake()

    def _condemn(self, version: PolicyVersion, why: str) -> None:
        self.condemned = version
        engines = ", ".join(self._engines)
        served = f"; parts of its weights came from {engines}" if engines else ""
        raise QuarantineError(f"the engine does not compute {version.label}: {why}{served}")

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

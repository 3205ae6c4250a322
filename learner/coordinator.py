"""Rank 0's requests, with the answers on every rank.

Every rank calls every method at the same place of the loop. Rank 0 asks the broker and the weight
relay through its ``LeadingLink``; the other ranks wait in the broadcast of the answer. So no rank
ever acts on an answer that another rank lacks.

A request that fails raises on rank 0 alone. Rank 0 then ends, and the others end with it: they are
its children (launch.py), or on other nodes learn it from the watch (nodes/watch.py). In a pool of
tenants it raises on every rank, and all of them leave that tenant alone.
"""

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from slipstream.learner.batches.links import LeadingLink
from slipstream.learner.batches.orders import (
    Order,
    Rejection,
    StopTraining,
    decode_order,
    encode_order,
)
from slipstream.learner.model.collectives import any_rank, broadcast_bytes
from slipstream.learner.stop import StopRequest
from slipstream.wire.errors import PeerLostError, SlipstreamError, text_of
from slipstream.wire.files.checkpoints import CheckpointInfo
from slipstream.wire.messages.broker import StepCommitted
from slipstream.wire.messages.manifest import WeightManifest
from slipstream.wire.messages.probe import ProbeLogprobs
from slipstream.wire.messages.versions import PolicyVersion

_log = logging.getLogger(__name__)
T = TypeVar("T")


class Coordinator:
    """One rank's view of the requests that rank 0 sends for all ranks."""

    def __init__(
        self, leader: LeadingLink | None, stop: StopRequest, *, shares_failures: bool = False
    ) -> None:
        """Connect the ranks; rank 0 alone has a ``leader``.

        With ``shares_failures`` what fails on rank 0 raises on every rank: they go on with others.
        """
        self._leader = leader
        self._stop = stop
        self._shares_failures = shares_failures
        self._publishes = False

    @property
    def is_leader(self) -> bool:
        """True on rank 0, which logs and records for all."""
        return self._leader is not None

    def log(self, text: str, *arguments: object) -> None:
        """Log once for all ranks."""
        if self.is_leader:
            _log.info(text, *arguments)

    @property
    def run_id(self) -> str:
        """The run's identity for its checkpoints; empty on the other ranks, which write none."""
        return self._leader.run_id if self._leader is not None else ""

    @property
    def publishes(self) -> bool:
        """True if whole weights are wanted after each step; known after ``take_over``."""
        return self._publishes

    def agreed(self, value: T | None, kind: type[T]) -> T:
        """Return rank 0's value on every rank; the other ranks' values are ignored."""
        return msgspec.msgpack.decode(broadcast_bytes(msgspec.msgpack.encode(value)), type=kind)

    def _led(self, ask: Callable[[LeadingLink], T], kind: type[T]) -> T:
        """Return what rank 0 is answered, on every rank."""
        return self.agreed(self._asked(ask), kind)

    def _asked(self, ask: Callable[[LeadingLink], T]) -> T | None:
        """Return what rank 0 is answered, there; None on the others."""
        if not self._shares_failures:
            return ask(self._leader) if self._leader is not None else None
        answer, failure = None, None
        try:
            answer = ask(self._leader) if self._leader is not None else None
        except SlipstreamError as error:
            failure = error
        reason = self.agreed(text_of(failure) if failure is not None else "", str)
        if failure is not None:
            raise failure
        if reason:
            raise PeerLostError(f"rank 0 failed: {reason}")
        return answer

    def on_any(self, flag: bool) -> bool:
        """Return True on every rank if the flag is set on any; waits for all ranks."""
        return any_rank(flag)

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.on_any(False)

    # ---- batches ---------------------------------------------------------------

    def take_over(
        self, step: int, checkpoint: str, resumed: CheckpointInfo | None
    ) -> PolicyVersion:
        """Become the run's learner at ``step``; return the version of the weights held."""
        version = self._led(
            lambda leader: leader.take_over(step, checkpoint, resumed), PolicyVersion
        )
        self._publishes = self._led(lambda leader: leader.publishes, bool)
        self.log("took over as %s", version.label)
        return version

    def next_order(self, version: PolicyVersion, *, max_wait_s: float) -> Order:
        """Return the planned batch of the step that starts from ``version``, or why not (yet)."""

        def order(leader: LeadingLink) -> bytes:
            stops = self._stop.requested
            return encode_order(
                StopTraining() if stops else leader.next_order(version, max_wait_s=max_wait_s)
            )

        return decode_order(broadcast_bytes(self._asked(order)))

    def reject_batch(self, version: PolicyVersion, rejection: Rejection) -> None:
        """Have the batch of the step that starts from ``version`` replaced."""
        if self.is_leader:
            _log.error("the batch of step %d is not trained: %s", version.step, rejection.detail)
        self._asked(lambda leader: leader.reject_batch(version, rejection))

    def commit(
        self, version: PolicyVersion, figures: dict[str, float], num_tokens: int
    ) -> StepCommitted:
        """Record that a step is trained; return the evaluations so far and the last step."""
        return self._led(lambda leader: leader.commit(version, figures, num_tokens), StepCommitted)

    # ---- weights ---------------------------------------------------------------

    def open_weights(
        self, paths: Sequence[str], layout: WeightManifest, *, part_keys: Sequence[str] = ()
    ) -> None:
        """Announce the slots in which versions will be written, before the first is.

        ``part_keys`` are the public keys of the relays of the learner's other hosts.
        """
        self._asked(lambda leader: leader.open_weights(paths, layout, part_keys=part_keys))

    def reserve(self) -> int:
        """Return the slot to write the next version into."""
        return self._led(lambda leader: leader.reserve(), int)

    def publish(self, version: PolicyVersion, slot: int, probe: ProbeLogprobs | None) -> None:
        """Hand out a version that every rank has written, with its probe; returns at once."""
        self._asked(lambda leader: leader.publish(version, slot, probe))

    # ---- checkpoints and the end -----------------------------------------------

    def ledger_snapshot(self, version: PolicyVersion) -> bytes:
        """Return the broker's part of a checkpoint of ``version``; empty on the other ranks."""
        return self._leader.ledger_snapshot(version) if self._leader is not None else b""

    def seal(self, version: PolicyVersion, step: int, oldest_kept: int) -> None:
        """Report that a durable checkpoint holds every step before ``step``."""
        if self._leader is not None:
            self._leader.seal(version, step=step, oldest_kept=oldest_kept)

    def leave(self, *, is_stopped: bool = False) -> None:
        """Report that this learner has no more requests: the run is complete, or it is stopped."""
        self._asked(lambda leader: leader.leave(is_stopped=is_stopped))

    def end(self) -> None:
        """Stop the relay: this learner ends as planned and no other follows it."""
        self._asked(lambda leader: leader.end())

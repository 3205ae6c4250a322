"""Holders of work, of generation and of scoring: one book over the ledger and the queue.

Every change that concerns both is one call here, so that no caller can forget the other half.
"""

from collections.abc import Callable, Collection, Iterable

from slipstream.broker.ledger.commands import Ledger
from slipstream.broker.ledger.events import LeaseEnd, LedgerEvent
from slipstream.broker.ledger.groups import Group
from slipstream.broker.ledger.leases import name_of
from slipstream.broker.ledger.scoring_queue import ScoringQueue
from slipstream.wire.messages.broker import Answer, GroupsLeased, ScoringLeased
from slipstream.wire.messages.trajectory import (
    NO_SCORING_LEASE,
    Score,
    TrajectoryHeader,
    TrajectoryKey,
)


class LeaseBook:
    """Leases of both kinds, by holder."""

    def __init__(
        self,
        ledger: Ledger,
        scoring: ScoringQueue,
        *,
        scores_inline: bool = False,
        on_return: Callable[[], None] = lambda: None,
    ) -> None:
        """Open the book of a ledger and its scoring queue.

        ``on_return`` is called when work that was held may be granted again.
        """
        self._ledger = ledger
        self._book = ledger.book
        self._scoring = scoring
        self._scores_inline = scores_inline
        self._on_return = on_return

    def restarted(self, now_s: float) -> None:
        """Start after a replay: every lease has a full term, unscored trajectories are queued."""
        self._ledger.restarted(now_s)
        for group in self._book.groups.values():
            for sibling in group.unscored:
                holder = group.lessees.get(group.headers[sibling].lease_id, "")
                self._queue((group.group_id, sibling), holder)

    @property
    def holders(self) -> set[str]:
        """Holders of leases of generation."""
        return set(self._book.by_holder)

    # ---- terms ---------------------------------------------------------------

    def extend(self, holder: str, lease_ids: Collection[int], *, now_s: float) -> tuple[int, ...]:
        """Extend leases of either kind; return the ones the holder no longer has."""
        lost = set(self._ledger.heartbeat(holder, lease_ids, now_s=now_s))
        lost &= set(self._scoring.heartbeat(holder, lease_ids, now_s=now_s))
        return tuple(sorted(lost))

    def postpone(self, by_s: float) -> None:
        """Have every lease lapse later: heartbeats of ``by_s`` seconds are still unread."""
        self._ledger.postpone(by_s)
        self._scoring.postpone(by_s)

    def expire(self, now_s: float) -> int:
        """End the leases of silent holders; return how many of generation."""
        lapsed = self._ledger.expire(now_s)
        for key, holder in self._scoring.expire(now_s):
            self._attempt_ended([key], holder, "the reward worker fell silent")
        for key, name in self._scoring.abandoned(now_s):
            reason = "the generator that delivered it is gone, and no reward worker is there"
            self._attempt_ended([key], name, reason)
        if self._scoring.num_waiting:
            self._on_return()  # failed work may be due again
        return lapsed

    # ---- work that comes back ------------------------------------------------

    def release_all(self, holder: str, reason: LeaseEnd) -> None:
        """Take back everything from a holder that is gone."""
        self._ledger.release_all(holder, reason)
        self._scoring.release_all(holder)
        self._on_return()

    def restart(self, holder: str, held: Collection[int]) -> None:
        """Take back everything from earlier incarnations of a client.

        ``held`` are the new incarnation's own leases of generation, if it reconnects.
        """
        name = name_of(holder)
        for other in [h for h in self._book.by_holder if name_of(h) == name]:
            own = other == holder
            self._ledger.release_all(other, "lost" if own else "restarted", held if own else ())
        for other in [h for h in self._scoring.holders() if name_of(h) == name]:
            keys = self._scoring.release_all(other)
            if other != holder:  # else it repeats its scores
                self._attempt_ended(keys, other, "the reward worker died")
        self._on_return()

    def release(
        self, holder: str, lease_id: int, reason: str = "", *, is_stranded: bool = False
    ) -> bool:
        """Take back a lease before its end; True if it is one of generation, which failed.

        A stranded one failed without any fault of the group, and counts as no attempt.
        """
        if self._scoring.give_back(holder, lease_id):
            self._on_return()
            return False
        self._ledger.release(holder, lease_id, "stranded" if is_stranded else "failed", reason)
        return True

    def undelivered(self, answer: Answer) -> None:
        """Take back leases whose answer could not be sent."""
        if isinstance(answer, GroupsLeased):
            for granted in answer.groups:
                lease = self._book.leases.get(granted.lease_id)
                if lease is not None:
                    self._ledger.release(lease.holder, lease.lease_id, "lost")
        elif isinstance(answer, ScoringLeased):
            self._scoring.release(item.lease_id for item in answer.items)
            self._on_return()

    # ---- trajectories and scores ---------------------------------------------

    def submit(self, holder: str, header: TrajectoryHeader, num_bytes: int) -> Group | None:
        """Take a trajectory and queue it for a reward; None if nothing of it is to be kept.

        Raises:
            RefusedError: as ``Ledger.submit``.
        """
        if not self._ledger.submit(holder, header, num_bytes):
            return None
        group = self._book.groups.get(header.group_id)
        if group is not None:  # else dropped on arrival
            self._queue((header.group_id, header.sibling), holder)
        return group

    def _queue(self, key: TrajectoryKey, holder: str) -> None:
        self._scoring.add(key, deliverer=name_of(holder) if self._scores_inline else "")

    def lease_scoring(
        self,
        holder: str,
        credits_left: int,
        *,
        now_s: float,
        whole_groups: bool = False,
        own_only: bool = False,
    ) -> dict[int, TrajectoryKey]:
        """Grant trajectories to score, by lease.

        Whole groups are granted only once all of one is generated. A generator is granted its own
        answers alone (``own_only``), one by one.
        """
        siblings_of = self._generated_siblings if whole_groups and not own_only else None
        return self._scoring.lease(
            holder,
            credits_left,
            now_s=now_s,
            siblings_of=siblings_of,
            own_only=own_only,
            size_of=self._size_of,
        )

    def _size_of(self, key: TrajectoryKey) -> int:
        """Return the mean bytes of a sibling of that group."""
        group = self._book.groups.get(key[0])
        return group.num_bytes // max(1, len(group.headers)) if group is not None else 0

    def _generated_siblings(self, group_id: int) -> tuple[int, ...]:
        group = self._book.groups.get(group_id)
        return tuple(range(group.size)) if group is not None and not group.missing else ()

    def accepts(self, holder: str, score: Score) -> bool:
        """End the lease of a score; True if it counts. A late reward is as good as any."""
        key = (score.group_id, score.sibling)
        if self._scoring.finish(holder, score.lease_id, key):
            return True
        return score.reward is not None and self._scoring.lapsed(holder, score.lease_id, key)

    def score(self, score: Score, holder: str, *, now_s: float) -> Group | None:
        """Take the outcome of one attempt to score; return its group, None if that is over."""
        key = (score.group_id, score.sibling)
        group = self._book.groups.get(score.group_id)
        if group is None or score.sibling not in group.headers:
            return None
        self._ledger.score(score, holder)
        if score.sibling in group.scores:
            self._scoring.discard(key)
        elif score.group_id in self._book.groups:
            self._scoring.failed(key, name_of(holder), now_s=now_s)
            self._on_return()
        return group

    def drain(self) -> tuple[list[LedgerEvent], list[TrajectoryKey]]:
        """As ``Ledger.drain``; trajectories whose group ended need no reward."""
        events, released = self._ledger.drain()
        for key in released:
            self._scoring.discard(key)
        return events, released

    def _attempt_ended(self, keys: Iterable[TrajectoryKey], holder: str, reason: str) -> None:
        """Count an attempt to score that ended without an answer."""
        for group_id, sibling in keys:
            score = Score(
                group_id=group_id, sibling=sibling, lease_id=NO_SCORING_LEASE, unavailable=reason
            )
            self._ledger.score(score, holder)

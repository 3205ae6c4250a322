"""Decides clients' requests about items: each command checks, then records events.

A pure state machine: an event is the only thing that changes the state (broker/ledger/effects.py),
so that replaying the stored events rebuilds it. Time comes in as ``now_s``. Deadlines of leases are
not stored: after a restart every lease gets one full term again.

At every moment, for groups: issued = trained + dropped + in flight. The same holds for
trajectories, counting a group as its ``group_size`` siblings.

    issued -> leased -> generated -> ready -> delivered -> trained -> sealed
       ^         |          |          |          |           |
       +- lapse -+          +----------+----------+-> dropped(reason)
       +------------------------- take-over, payload gone ----+
"""

from collections.abc import Callable, Collection, Iterable

from slipstream.broker.ledger.book import Book
from slipstream.broker.ledger.decisions import GroupDecisions
from slipstream.broker.ledger.events import (
    DropReason,
    Generated,
    Leased,
    LeaseEnd,
    LeaseEnded,
    LedgerEvent,
    LetterDropped,
    Retried,
    Scored,
    ScoringFailed,
)
from slipstream.broker.ledger.groups import NOBODY, Group, Lease
from slipstream.broker.ledger.issuing import Issuing
from slipstream.broker.ledger.leases import LeaseTerms
from slipstream.broker.ledger.scores import clamped
from slipstream.broker.ledger.state import BookState, LedgerRules
from slipstream.broker.ledger.training import Training
from slipstream.wire.errors import RefusedError
from slipstream.wire.messages.broker import LeasedGroup
from slipstream.wire.messages.trajectory import (
    MAX_REASON,
    Prompt,
    Score,
    TrajectoryHeader,
    TrajectoryKey,
)
from slipstream.wire.messages.versions import PolicyVersion


class Ledger:
    """Accounts for every item. All methods are immediate.

    The learner's commands are in ``training``, the choice of new items is in ``issuing``.
    """

    def __init__(
        self,
        rules: LedgerRules,
        *,
        prompt_at: Callable[[int], Prompt],
        eval_prompt_at: Callable[[int], Prompt],
        state: BookState | None = None,
    ) -> None:
        self.book = Book(rules, state)
        self._decisions = GroupDecisions(self.book)
        self.training = Training(self._decisions, prompt_at)
        self.issuing = Issuing(self._decisions, prompt_at, eval_prompt_at)
        self._terms = LeaseTerms(rules.lease_s, rules.max_lease_s)

    def drain(self) -> tuple[list[LedgerEvent], list[TrajectoryKey]]:
        """Return the events not stored yet, and the payloads that are no longer needed."""
        return self._decisions.drain()

    def plan_stop(self, reason: str) -> bool:
        """End the run in order; False if its last step is trained or planned already."""
        return self._decisions.plan_stop(reason)

    def restarted(self, now_s: float) -> None:
        """Start after a replay: nothing is to be stored, every lease has a full term."""
        self.drain()
        self.renew_leases(now_s)

    def renew_leases(self, now_s: float) -> None:
        """Give every lease a full term: no heartbeat could have arrived."""
        self._terms.begin_all(self.book.leases, now_s)

    def postpone(self, for_s: float) -> None:
        """Extend every term by the seconds in which no heartbeat could arrive."""
        self._terms.postpone(for_s)

    # ---- generation ----------------------------------------------------------

    def lease(
        self,
        holder: str,
        adopted: PolicyVersion,
        *,
        max_sequences: int,
        now_s: float,
        num_sharing: int = 1,
    ) -> list[LeasedGroup]:
        """Grant generation work: lapsed groups first, then evaluation, then new prompts.

        Of ``num_sharing`` generators that want work, one is granted its share of what there is, and
        may request more: else the lanes of the first would take a whole step's work.
        """
        if adopted.epoch != self.book.version.epoch or self.book.state.awaits_learner:
            return []
        if adopted.step > self.book.step:
            return []  # no learner has made these weights: a deadline that far would never come
        granted: list[LeasedGroup] = []
        bound = self.book.bound_in_force
        lowered = bound if bound < self.book.rules.bound.max_staleness_steps else -1
        room = max_sequences
        most = -(-self.issuing.num_available(adopted) // num_sharing) if num_sharing > 1 else room
        spares = self.issuing.spares(adopted, now_s)
        while room > 0 and len(granted) < max(1, most):
            spare = self.issuing.most_spare if len(granted) < spares else 0
            group = self.issuing.next_group(adopted, room, spare)
            if group is None:
                break
            missing = group.missing
            room -= len(missing)
            lease_id = self.book.state.next_lease_id
            self._decisions.record(
                Leased(
                    lease_id=lease_id,
                    group_id=group.group_id,
                    holder=holder,
                    adopted_step=adopted.step,
                    bound=lowered,
                )
            )
            self._terms.begin(lease_id, now_s)
            granted.append(
                LeasedGroup(
                    group_id=group.group_id,
                    lease_id=lease_id,
                    item=group.item,
                    position=group.position,
                    prompt=group.prompt,
                    siblings=missing,
                )
            )
        return granted

    def heartbeat(self, holder: str, lease_ids: Iterable[int], *, now_s: float) -> list[int]:
        """Extend leases; return the ones the holder no longer has."""
        return self._terms.extend(self.book.leases, holder, lease_ids, now_s)

    def answered(self, holder: str, header: TrajectoryHeader) -> Group:
        """Return the group that a trajectory belongs to, whose sender must have leased it.

        Raises:
            RefusedError: its group has ended, or its lease never was the sender's.
        """
        group = self.book.groups.get(header.group_id)
        if group is None:
            raise RefusedError(f"group {header.group_id} has ended")
        if group.lessees.get(header.lease_id) != holder:
            raise RefusedError(
                f"group {header.group_id} was not leased to {holder} as lease {header.lease_id}"
            )
        return group

    def submit(self, holder: str, header: TrajectoryHeader, num_bytes: int = 0) -> bool:
        """Take one finished sibling; return False if it is there already.

        A late answer from a lapsed lease is as good as any, as long as its sibling is missing
        and no token of it is older than the group's deadline allows.

        Raises:
            RefusedError: its group has ended, its lease never was the sender's, it is longer than
                the settings allow, or its tokens are of weights that it may not hold.
        """
        group = self.answered(holder, header)
        if not 0 <= header.sibling < group.size:
            raise RefusedError(f"sibling {header.sibling} of a group of {group.size}")
        if header.sibling in group.headers:
            return False
        self._check(group, header)
        self._decisions.record(Generated(header=header, num_bytes=num_bytes))
        overlong = header.finish_reason == "length" and group.item == "train"
        if overlong and self.book.rules.drop_overlong:
            self._decisions.drop(group, "overlong_response")
        return True

    def _check(self, group: Group, header: TrajectoryHeader) -> None:
        """Refuse an answer that is too long, or of weights that its group may not hold."""
        rules, version = self.book.rules, self.book.version
        longest = rules.max_response_tokens[group.item]
        if header.num_prompt_tokens > rules.max_prompt_tokens:
            raise RefusedError(
                f"a prompt of {header.num_prompt_tokens} tokens in group {group.group_id}; the "
                f"broker's sampling.max_prompt_tokens is {rules.max_prompt_tokens}"
            )
        if header.num_response_tokens > longest:
            section = "eval or sampling" if group.item == "eval" else "sampling"
            raise RefusedError(
                f"a response of {header.num_response_tokens} tokens in group {group.group_id}; the "
                f"broker's max_response_tokens ({section}) is {longest}"
            )
        if header.num_tokens > rules.max_tokens[group.item]:
            raise RefusedError(
                f"{header.num_tokens} tokens in group {group.group_id}, context included; a "
                f"trajectory of this run has {rules.max_tokens[group.item]} at most "
                "(environment.max_tokens, or max_prompt_tokens and max_response_tokens of sampling "
                "or eval together)"
            )
        if len(header.turns) > rules.max_turns:
            raise RefusedError(
                f"{len(header.turns)} turns in group {group.group_id}; the broker's "
                + (
                    f"environment.max_turns is {rules.max_turns}"
                    if rules.max_turns
                    else "run has no environment (environment.function)"
                )
            )
        versions = [run.version for run in header.version_runs]
        oldest, newest = min(versions), max(versions)
        if newest > version:
            raise RefusedError(f"token of {newest.label}, the learner is at {version.label}")
        for behavior in versions:
            if not self.book.is_ancestor(behavior):
                lease = self.book.leases.get(group.lease_id)
                if lease is not None and lease.lease_id == header.lease_id:
                    self._end_lease(lease, "orphaned")
                raise RefusedError(
                    f"token chosen by {behavior.label}, which {version.label} does not "
                    "descend from: a learner has gone back to an earlier checkpoint"
                )
        if group.adopted_step < 0 or oldest.step < group.adopted_step:
            raise RefusedError(
                f"token chosen by {oldest.label}, group {group.group_id} was admitted at "
                f"v{version.epoch}.{group.adopted_step}"
            )

    def reject(self, holder: str, lease_id: int, reason: DropReason) -> None:
        """Drop a group that no generator could answer."""
        lease = self.book.leases.get(lease_id)
        if lease is not None and lease.holder == holder:
            self._decisions.drop(self.book.groups[lease.group_id], reason)

    def release(self, holder: str, lease_id: int, reason: LeaseEnd, detail: str = "") -> None:
        """Take back a lease before its end; ``detail`` is what its holder says about it."""
        lease = self.book.leases.get(lease_id)
        if lease is not None and lease.holder == holder:
            self._end_lease(lease, reason, detail)

    def release_all(self, holder: str, reason: LeaseEnd, keep: Collection[int] = ()) -> None:
        """Take back a generator's leases, because it restarted or left."""
        for lease_id in [i for i in self.book.by_holder.get(holder, ()) if i not in keep]:
            if lease_id in self.book.leases:  # the end of another may have ended the run
                self._end_lease(self.book.leases[lease_id], reason)

    def expire(self, now_s: float) -> int:
        """End the leases whose holder fell silent; return how many."""
        ended = 0
        for lease_id in self._terms.overdue(now_s):
            if lease_id in self.book.leases:  # the end of another may have ended the run
                self._end_lease(self.book.leases[lease_id], "lapsed")
                ended += 1
        return ended

    def _end_lease(self, lease: Lease, reason: LeaseEnd, detail: str = "") -> None:
        ended = LeaseEnded(lease_id=lease.lease_id, reason=reason, detail=detail[:MAX_REASON])
        self._decisions.record(ended)
        self._terms.end(lease.lease_id)
        group = self.book.groups[lease.group_id]
        if group.attempts >= self.book.rules.max_attempts:
            self._decisions.drop(
                group, "poison" if group.deaths == group.attempts else "lease_exhausted"
            )

    # ---- scoring -------------------------------------------------------------

    def score(self, score: Score, by: str = "") -> None:
        """Take the outcome of one attempt to score a trajectory."""
        group = self.book.groups.get(score.group_id)
        if group is None or score.sibling not in group.headers or score.sibling in group.scores:
            return  # it ended, or was scored already
        score = clamped(score, len(group.headers[score.sibling].turns) or 1)
        if score.reward is None:
            self._decisions.record(
                ScoringFailed(
                    group_id=score.group_id,
                    sibling=score.sibling,
                    reason=score.unavailable,
                    by=by,
                    function=score.function,
                    version=score.version,
                    excerpt=score.excerpt,
                )
            )
            if group.failed_scorings[score.sibling] >= self.book.rules.max_attempts:
                self._decisions.drop(group, "reward_unavailable")
            return
        self._decisions.record(Scored(score=self.book.part_names.bounded(score)))
        if group.item == "eval":
            self._decisions.close_eval_if_complete(group.eval_step)
        elif group.state == "ready" and self.book.rules.drop_zero_variance:
            values = group.values_of(self.book.rules.zero_variance_of)
            if max(values) == min(values):
                self._decisions.drop(group, "zero_variance")

    # ---- dead letters --------------------------------------------------------

    def retry(self, group_ids: Iterable[int]) -> tuple[dict[int, int], dict[int, str]]:
        """Issue the prompts of dead letters again; return new groups, and why others were not."""
        done: dict[int, int] = {}
        refused: dict[int, str] = {}
        for group_id in group_ids:
            letter = self.book.state.dead_letters.get(group_id)
            if letter is None:
                refused[group_id] = "no such dead letter"
            elif letter.item == "eval":
                refused[group_id] = "it belongs to an evaluation that is over"
            elif self.book.state.stop_reason or self.book.step >= self.book.state.last_step:
                refused[group_id] = "the run takes no more prompts"
            else:
                new = self.book.state.next_group_id
                self._decisions.record(
                    Retried(group_id=new, of=group_id, size=self.book.rules.group_size)
                )
                done[group_id] = new
        return done, refused

    def drop_letters(self, group_ids: Iterable[int]) -> tuple[dict[int, int], dict[int, str]]:
        """Forget dead letters; return the forgotten ones, and why others were not."""
        done: dict[int, int] = {}
        refused: dict[int, str] = {}
        for group_id in group_ids:
            if group_id in self.book.state.dead_letters:
                self._decisions.record(LetterDropped(group_id=group_id))
                done[group_id] = NOBODY
            else:
                refused[group_id] = "no such dead letter"
        return done, refused

    # ---- revoked keys --------------------------------------------------------

    def discard_answers_of(self, key: str, *, takes_over: bool = False) -> tuple[int, int]:
        """Drop groups with an answer that was delivered with a key.

        A learner that takes over has no batch yet; else batches stay, because they are in its
        hands.

        Returns:
            groups dropped, and groups that are being trained already.
        """
        own = [
            group
            for group in self.book.groups.values()
            if any(
                group.lessees.get(header.lease_id, "").startswith(f"{key}/")
                for header in group.headers.values()
            )
        ]
        bound: dict[int, list[int]] = {}
        for group in own:
            if group.bound_to != NOBODY:
                bound.setdefault(group.bound_to, []).append(group.group_id)
            elif group.group_id in self.book.groups:  # the end of another may have ended the run
                self._decisions.drop(group, "revoked")
        if takes_over:
            for step, group_ids in bound.items():
                self.training.reject_batch(self.book.version, step, "revoked", group_ids)
            bound = {}
        left = sum(map(len, bound.values()))
        return len(own) - left, left

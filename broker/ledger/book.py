"""The book of all items: its state, views of it, and the moves that events are made of."""

from collections.abc import Iterable

from slipstream.broker.ledger.groups import NOBODY, Group
from slipstream.broker.ledger.index import GroupIndex
from slipstream.broker.ledger.leases import Holdings
from slipstream.broker.ledger.scores import PartNames
from slipstream.broker.ledger.state import BookState, LedgerRules
from slipstream.broker.ledger.survivorship import bucket_of
from slipstream.broker.ledger.throttle import StalenessController
from slipstream.wire.messages.dead_letters import DeadLetter, DeadReason
from slipstream.wire.messages.trajectory import TrajectoryKey
from slipstream.wire.messages.versions import PolicyVersion


class Book:
    """The state of the items; events change it (broker/ledger/effects.py)."""

    def __init__(self, rules: LedgerRules, state: BookState | None = None) -> None:
        self.rules = rules
        self.state = state or BookState(
            prompts=rules.prompts_fingerprint,
            problems=rules.problems_fingerprint,
            group_size=rules.group_size,
            bound=rules.bound,
            last_step=rules.total_steps,
        )
        self.groups = self.state.groups  # neither trained (or evaluated) nor dropped
        self.leases = self.state.leases  # leases of generation
        self.index = GroupIndex(rules.bound, self.groups.values())
        self.by_holder = Holdings()
        for lease in self.leases.values():
            self.by_holder.add(lease.holder, lease.lease_id)
        self.released: list[TrajectoryKey] = []  # payloads that are no longer needed
        self.controller: StalenessController | None = None  # not stored: it begins anew
        if rules.staleness_target is not None:
            self.controller = StalenessController(
                rules.staleness_target, rules.bound, max_in_flight=rules.max_in_flight
            )
        self.find_free_step()
        self.trace_lineage()
        self.part_names = PartNames(self.state.part_names, kept=rules.zero_variance_of)

    # ---- current state -------------------------------------------------------

    @property
    def version(self) -> PolicyVersion:
        """Version of the learner."""
        return self.state.version

    @property
    def step(self) -> int:
        """Number of learner steps completed."""
        return self.state.version.step

    @property
    def bound_in_force(self) -> int:
        """The staleness bound that groups are started under, in learner steps."""
        bound = self.rules.bound.max_staleness_steps
        return bound if self.controller is None else min(bound, self.controller.throttle.bound)

    @property
    def finished(self) -> bool:
        """True once all steps are trained and all evaluations answered."""
        state = self.state
        done = self.step >= state.last_step and not state.eval_rounds
        return done and not state.awaits_learner

    @property
    def over(self) -> bool:
        """True once the learner, too, is done: no further request will come."""
        return self.finished and self.state.learner_left

    @property
    def out_of_prompts(self) -> bool:
        """True at the end of the prompt source."""
        return self.rules.max_prompts is not None and self.state.cursor >= self.rules.max_prompts

    def in_flight(self) -> dict[str, int]:
        """Number of groups for training in each state."""
        return self.index.in_flight()

    def trajectories(self) -> dict[str, int]:
        """Return the equation of groups for trajectories."""
        state, size = self.state, self.rules.group_size
        return {
            "issued": state.issued * size,
            "trained": state.trained * size,
            "dropped": state.dropped.total() * size,
            "in_flight": self.index.num_siblings,
        }

    def unaccounted(self) -> int:
        """Return issued - trained - dropped - in flight, which must be 0."""
        state = self.state
        in_flight = sum(self.in_flight().values())
        return state.issued - state.trained - state.dropped.total() - in_flight

    def sampled_reward(self) -> float | None:
        """Return the mean reward of all training answers scored since the last step.

        Unlike the trained batch it holds the groups that a filter drops.
        """
        state = self.state
        return state.sampled_reward / state.sampled_count if state.sampled_count else None

    def is_ancestor(self, version: PolicyVersion) -> bool:
        """True if the learner's present weights are these or descend from them."""
        return version.step <= self._newest_step.get(version.epoch, -1)

    def can_go_back_to(self, step: int) -> bool:
        """True if a learner may take over at this step."""
        return min(self.state.history, default=self.step) <= step <= self.step

    def descends(self, group: Group) -> bool:
        """True if every answer of a group is of ancestors of the learner's weights."""
        return group.adopted_step <= self.step and all(
            self.is_ancestor(run.version)
            for header in group.headers.values()
            for run in header.version_runs
        )

    def trace_lineage(self) -> None:
        """Find by epoch the last step whose weights are in the present lineage."""
        self._newest_step: dict[int, int] = {}
        limit = self.step
        forks = self.state.forks
        for epoch in range(self.version.epoch, -1, -1):
            if epoch in forks or epoch in {0, self.version.epoch}:  # else of an abandoned life
                self._newest_step[epoch] = limit
                limit = min(limit, forks.get(epoch, limit))

    def find_free_step(self) -> None:
        """Find the first learner step that has no batch."""
        self.free_step = self.step
        while self.free_step in self.state.batches:
            self.free_step += 1

    # ---- groups --------------------------------------------------------------

    def add(self, group: Group) -> None:
        """Take in a new group."""
        self.state.groups[group.group_id] = group
        self.state.next_group_id = group.group_id + 1
        self.index.enter(group)

    def restart(self, group: Group, size: int | None = None) -> None:
        """Discard a group's answers and lease it again as if it were new."""
        self.forget(group)
        again = group.prompt_only()
        again.size = group.size if size is None else size
        self.groups[group.group_id] = again
        self.index.enter(again)

    def bind(self, group_ids: Iterable[int], step: int) -> None:
        """Put groups into the batch of a step, or into none."""
        for group in [self.groups[group_id] for group_id in group_ids]:
            self.index.leave(group)
            group.bound_to = step
            self.index.enter(group)

    def end_lease(self, group: Group) -> None:
        """Forget the lease of a group, if it has one."""
        if group.lease_id == NOBODY:
            return
        lease = self.state.leases.pop(group.lease_id)
        self.by_holder.remove(lease.holder, lease.lease_id)
        group.lease_id = NOBODY

    def forget(self, group: Group) -> None:
        """Remove a group that ended, and release its payloads."""
        self.take_out(group)
        self.released += group.trajectory_keys()

    def take_out(self, group: Group) -> None:
        """Remove a group whose payloads are kept."""
        self.index.leave(group)
        self.end_lease(group)
        del self.state.groups[group.group_id]
        self.state.untrained_bytes -= group.num_bytes

    # ---- records of ended groups ---------------------------------------------

    def measure(self, group: Group, fate: str) -> None:
        """Count answers by length and by fate."""
        counts = self.state.lengths.setdefault(fate, {})
        for header in group.headers.values():
            bucket = bucket_of(header.num_response_tokens)
            counts[bucket] = counts.get(bucket, 0) + 1
        if group.lease_id != NOBODY:
            self.state.cancelled[fate] += group.size - len(group.headers)

    def add_dead_letter(self, group: Group, reason: DeadReason) -> None:
        """Keep an abandoned group for inspection and retry."""
        letters = self.state.dead_letters
        letters[group.group_id] = DeadLetter(
            group_id=group.group_id,
            item=group.item,
            position=group.position,
            prompt=group.prompt,
            reason=reason,
            step=self.step,
            failures=tuple(group.failures),
            retry_of=group.retry_of,
        )
        if len(letters) > self.rules.max_dead_letters:
            del letters[next(iter(letters))]
            self.state.letters_forgotten += 1

    def release_replay(self, step: int) -> None:
        """Release the payloads of a trained step."""
        for group in self.state.replay.pop(step, ()):
            self.state.replay_bytes -= group.num_bytes
            self.released += group.trajectory_keys()

    def cut_history(self, step: int) -> None:
        """Forget the learner steps before ``step``."""
        for trained_step in [s for s in self.state.history if s < step]:
            del self.state.history[trained_step]

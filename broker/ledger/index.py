"""Views of the groups that would cost a walk over all of them. Derived; never stored."""

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterable

from slipstream.broker.ledger.admission import StalenessBound
from slipstream.broker.ledger.groups import STATES, Group, GroupState


class GroupIndex:
    """Counts and queues of groups. A group leaves before it changes and enters afterwards."""

    def __init__(self, bound: StalenessBound, groups: Iterable[Group] = ()) -> None:
        self._bound = bound
        self._in_state: Counter[GroupState] = Counter()  # training groups only
        self.due: Counter[int] = Counter()  # deadline -> live groups
        self.ready: Counter[int] = Counter()  # deadline -> live groups that are ready
        self.num_live = 0
        self.num_siblings = 0  # training groups only
        self.num_generated = 0
        self.num_scored = 0
        self.eval_unscored = 0  # held-out answers that wait for a reward
        self.eval_open = 0  # held-out answers to come, or without a reward
        self._begun: Counter[int] = Counter()  # step of a first lease -> live groups
        self._ready_begun: Counter[int] = Counter()  # the same of those that are ready
        self._heaps: dict[int, list[int]] = {}  # deadline -> ready groups, and some that were
        self._ready: OrderedDict[int, int] = OrderedDict()  # group -> how many were ready before
        self.num_ever_ready = 0
        self.again: dict[int, Group] = {}  # leased before or for evaluation, held by no one
        self.fresh: dict[int, Group] = {}  # training groups, never leased
        for group in groups:
            self.enter(group)

    def enter(self, group: Group) -> None:
        """Take a group into every view that it belongs to."""
        state = group.state
        if group.item == "train":
            self._in_state[state] += 1
        self._count_siblings(group, 1)
        if state == "issued":
            self._queue_of(group)[group.group_id] = group
        if group.is_live:
            deadline = group.deadline(self._bound)
            self.num_live += 1
            self.due[deadline] += 1
            self._begun[group.adopted_step] += 1
            if state == "ready":
                self.ready[deadline] += 1
                self._ready_begun[group.adopted_step] += 1
                self._ready[group.group_id] = self.num_ever_ready
                self.num_ever_ready += 1
                heapq.heappush(self._heaps.setdefault(deadline, []), group.group_id)

    def leave(self, group: Group) -> None:
        """Take a group out of every view."""
        state = group.state
        if group.item == "train":
            self._in_state[state] -= 1
        self._count_siblings(group, -1)
        if state == "issued":
            self._queue_of(group).pop(group.group_id, None)
        if group.is_live:
            deadline = group.deadline(self._bound)
            self.num_live -= 1
            self._count_down(self.due, deadline)
            self._count_down(self._begun, group.adopted_step)
            if state == "ready":
                self._count_down(self._ready_begun, group.adopted_step)
                self._ready.pop(group.group_id, None)
                if not self._count_down(self.ready, deadline):
                    self._heaps.pop(deadline, None)

    def sibling_came(self, group: Group, *, generated: int = 0, scored: int = 0) -> None:
        """Count new trajectories or scores of a group whose state does not change."""
        if group.item == "train":
            self.num_generated += generated
            self.num_scored += scored
        else:
            self.eval_unscored += generated - scored
            self.eval_open -= scored

    def _count_siblings(self, group: Group, sign: int) -> None:
        if group.item == "eval":
            self.eval_unscored += sign * (len(group.headers) - len(group.scores))
            self.eval_open += sign * (group.size - len(group.scores))
            return
        self.num_siblings += sign * group.size
        self.num_generated += sign * len(group.headers)
        self.num_scored += sign * len(group.scores)

    def _queue_of(self, group: Group) -> dict[int, Group]:
        """Return the queue of a group to lease; only one never leased needs a permit."""
        is_new = group.adopted_step < 0 and group.item == "train"
        return self.fresh if is_new else self.again

    @staticmethod
    def _count_down(counts: Counter[int], deadline: int) -> bool:
        counts[deadline] -= 1
        if not counts[deadline]:
            del counts[deadline]
            return False
        return True

    @property
    def oldest_ready(self) -> int | None:
        """Number of groups that became ready before the oldest one still ready."""
        return next(iter(self._ready.values()), None)

    def lags(self, step: int) -> tuple[dict[int, int], dict[int, int]]:
        """Count live groups under way, and ready ones, by their staleness at a step."""
        under_way: Counter[int] = Counter()
        ready: Counter[int] = Counter()
        for begun, count in self._begun.items():
            lag = max(0, step - begun)
            ready[lag] += self._ready_begun[begun]
            under_way[lag] += count - self._ready_begun[begun]
        return +under_way, +ready

    def in_flight(self) -> dict[str, int]:
        """Number of groups for training in each state."""
        return {state: self._in_state[state] for state in STATES}

    def nearest(self, take: dict[int, int]) -> tuple[int, ...]:
        """Return this many ready groups of each deadline, oldest first, without removing them.

        An entry of a heap whose group is not ready any more is forgotten on the way.
        """
        chosen: list[int] = []
        for deadline, count in sorted(take.items()):
            heap = self._heaps[deadline]
            found: list[int] = []
            while len(found) < count:
                group_id = heapq.heappop(heap)
                if group_id in self._ready and group_id not in found[-1:]:
                    found.append(group_id)
            for group_id in found:
                heapq.heappush(heap, group_id)
            chosen += found
        return tuple(chosen)

    def any_due_before(self, step: int) -> bool:
        """True if a live group is due before this step."""
        return min(self.due, default=step) < step

"""One engine in virtual time: all its sequences advance at one pace, in closed form between events.

Every sequence gets one token in a decode step, so each is finished when the engine's own count of
steps, v, has advanced by its length. With n sequences that have C tokens in the cache, d further
steps take (see EngineLaw)

    flat(n) d + k (C d + n d^2 / 2)      seconds

which is solved for d where the time is given. The cost of an event does not depend on n.
"""

import math
from bisect import bisect_right
from heapq import heappop, heappush
from typing import NamedTuple

from slipstream.deploy.simulate.laws import EngineLaw

_CLOSE = 1e-6  # steps: two ends nearer than that are one


class Ended(NamedTuple):
    """A finished sequence."""

    group_id: int
    sibling: int
    lease_id: int
    num_prompt_tokens: int
    num_tokens: int  # of prompt and response
    versions: tuple[tuple[int, int], ...]  # (index of the first token, step of the version)


class SimulatedEngine:
    """An engine and what it has under way."""

    __slots__ = (
        "_boundaries",
        "_constant",
        "_flat_s",
        "_heap",
        "_kept",
        "_law",
        "_of_group",
        "_order",
        "_steps",
        "busy_s",
        "debt_s",
        "holder",
        "now_s",
        "num_behind",
        "num_generated",
        "num_sequences",
        "stalled_s",
        "step",
    )

    def __init__(
        self, law: EngineLaw, holder: str, step: int, now_s: float, *, kept: int = 64
    ) -> None:
        """Start with nothing under way.

        Args:
            law: of its pace.
            holder: its name to the ledger.
            step: of the version that it runs.
            now_s: virtual time.
            kept: versions that a sequence may have, at most.
        """
        self._law = law
        self.holder = holder
        self._kept = kept
        self.step = step
        self.now_s = now_s
        self.debt_s = 0.0  # seconds to stand still or to compute prompts before the next step
        self.num_sequences = 0
        self.num_behind = 0  # ended, of groups that have others under way
        self.busy_s = 0.0  # decoding
        self.stalled_s = 0.0  # standing still, or computing prompts, with work under way
        self.num_generated = 0.0  # tokens
        self._steps = 0.0  # v
        self._constant = 0.0  # C = constant + n v
        self._flat_s = 0.0
        self._order = 0
        self._heap: list[tuple[float, int, int, int, int, float, int, int]] = []
        self._of_group: dict[int, tuple[int, float, int]] = {}  # left, their part of C, ended
        self._boundaries: list[tuple[float, int]] = [(0.0, step)]  # (v, version from there on)

    @property
    def context(self) -> float:
        """Tokens in the cache."""
        return self._constant + self.num_sequences * self._steps

    @property
    def has_room(self) -> bool:
        """Whether the cache has room for more."""
        return self.context < self._law.max_cached_tokens

    def set_law(self, law: EngineLaw) -> None:
        """Go on at another pace; ``advance`` first."""
        self._law = law
        self._flat_s = law.flat_s(self.num_sequences)

    def advance(self, now_s: float) -> None:
        """Let time pass."""
        elapsed, self.now_s = now_s - self.now_s, now_s
        if self.debt_s > 0.0:
            paid = min(self.debt_s, elapsed)
            self.debt_s -= paid
            elapsed -= paid
            if self.num_sequences:
                self.stalled_s += paid
        if elapsed <= 0.0 or not self.num_sequences:
            return
        linear = self._flat_s + self._law.context_s * self.context
        square = self._law.context_s * self.num_sequences / 2
        steps = 2 * elapsed / (linear + math.sqrt(linear * linear + 4 * square * elapsed))
        self._steps += steps
        self.num_generated += steps * self.num_sequences
        self.busy_s += elapsed

    def admit(self, group_id: int, lease_id: int, prompt: int, lengths: dict[int, int]) -> None:
        """Begin a group's sequences; their prompt is computed once.

        Args:
            group_id: of the group.
            lease_id: under which it is answered.
            prompt: its tokens.
            lengths: of the responses, by sibling.
        """
        now = self._steps
        for sibling, length in lengths.items():
            self._order += 1
            heappush(
                self._heap,
                (now + length, self._order, group_id, sibling, lease_id, now, prompt, length),
            )
        part = prompt - now
        self._of_group[group_id] = (len(lengths), part, 0)
        self._constant += len(lengths) * part
        self.num_sequences += len(lengths)
        self._flat_s = self._law.flat_s(self.num_sequences)
        self.debt_s += prompt * self._law.prefill_s

    def stall(self, seconds: float, *, recomputes: bool = False) -> None:
        """Stand still; with ``recomputes`` compute all keys and values again."""
        if recomputes:
            seconds += self.context * self._law.prefill_s
        self.debt_s += seconds

    def adopt(self, step: int) -> None:
        """Run the version of a learner step from the next token on."""
        self.step = step
        if self._boundaries[-1][0] >= self._steps:
            self._boundaries[-1] = (self._boundaries[-1][0], step)
        else:
            self._boundaries.append((self._steps, step))
        if len(self._boundaries) > 2 * self._kept:
            del self._boundaries[: -self._kept]

    def next_end_s(self) -> float:
        """Return when the next sequence ends, if nothing happens before; infinity without one."""
        heap, of_group = self._heap, self._of_group
        while heap and heap[0][2] not in of_group:
            heappop(heap)  # it was cancelled
        if not heap:
            return math.inf
        steps = max(0.0, heap[0][0] - self._steps)
        flat = self._flat_s + self._law.context_s * self.context
        square = self._law.context_s * self.num_sequences / 2
        return self.now_s + self.debt_s + (flat + square * steps) * steps

    def take_ended(self) -> list[Ended]:
        """Take out the sequence whose end the present time is, and those that end with it."""
        ended: list[Ended] = []
        heap, of_group = self._heap, self._of_group
        if heap and heap[0][2] in of_group:
            self._steps = max(self._steps, heap[0][0])
        while heap and heap[0][0] <= self._steps + _CLOSE:
            _, _, group_id, sibling, lease_id, began, prompt, length = heappop(heap)
            if group_id not in of_group:
                continue
            self._remove(group_id, 1)
            versions = self._versions(began, prompt, length)
            ended.append(Ended(group_id, sibling, lease_id, prompt, prompt + length, versions))
        return ended

    def cancel(self, group_id: int) -> None:
        """Give up what is left of a group."""
        if group_id in self._of_group:
            self._remove(group_id, self._of_group[group_id][0])

    def _remove(self, group_id: int, num: int) -> None:
        left, part, ended = self._of_group[group_id]
        if left > num:
            self._of_group[group_id] = (left - num, part, ended + num)
            self.num_behind += num
        else:
            del self._of_group[group_id]
            self.num_behind -= ended
        self._constant -= num * part
        self.num_sequences -= num
        if not self.num_sequences:
            self._constant = 0.0
        self._flat_s = self._law.flat_s(self.num_sequences)

    def _versions(self, began: float, prompt: int, length: int) -> tuple[tuple[int, int], ...]:
        """Return where the versions of a response begin."""
        boundaries = self._boundaries
        at = max(0, bisect_right(boundaries, (began, math.inf)) - 1)
        runs = [(prompt, boundaries[at][1])]
        for began_at, step in boundaries[at + 1 :]:
            token = math.ceil(began_at - began - _CLOSE)
            if token >= length:
                break
            if prompt + token == runs[-1][0]:
                runs[-1] = (prompt + token, step)
            else:
                runs.append((prompt + token, step))
        return tuple(runs)

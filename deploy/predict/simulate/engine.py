"""One engine in virtual time: all its sequences advance at one pace, in closed form between events.

Every sequence gets one token in a decode step, so it ends once the engine's count of steps, v, has
advanced by its length. With n sequences and C tokens in the cache, d further steps take (see
EngineLaw)

    flat(n) d + k (C d + n d^2 / 2)      seconds

solved for d if the time is known. The cost of an event does not depend on n, unless the cache is
full.

A full cache retracts sequences, as SGLang and vLLM do: the sequences begun last give up their keys
and values, and compute them again once there is room, before anything new begins.
"""

import math
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush

from slipstream.deploy.predict.laws.engine_law import EngineLaw

_CLOSE = 1e-6  # steps between two ends that count as one
_FREED_STEPS = 16  # steps with room for all sequences after a retraction
_SPARE = 0.1  # free share of the cache that is needed to begin or resume a sequence


@dataclass(slots=True, eq=False)
class Response:
    """One open or ended response."""

    group_id: int
    sibling: int
    lease_id: int
    prompt: int  # tokens
    length: int  # tokens
    began: float = 0.0  # v at which it would have begun without retractions; less what is done
    since: float = 0.0  # v at its last begin
    order: int = 0  # number of its last begin; 0 while it does not run
    versions: list[tuple[int, int]] = field(default_factory=list)
    """(index of the first token, step of the version), of tokens before its last begin; of all
    tokens once it has ended."""

    @property
    def part(self) -> float:
        """Part of C that does not grow with v."""
        return self.prompt - self.began


class SimulatedEngine:
    """An engine and its open work."""

    def __init__(
        self, law: EngineLaw, holder: str, step: int, now_s: float, *, kept: int = 64
    ) -> None:
        """Start without work.

        Args:
            law: Law of the engine's pace.
            holder: Name of the engine in the ledger.
            step: Step of the running version.
            now_s: Virtual time.
            kept: Largest number of versions of a sequence.
        """
        self._law = law
        self.holder = holder
        self._kept = kept
        self.step = step
        self.now_s = now_s
        self.debt_s = 0.0  # seconds of pause or of prompts before the next step
        self.num_sequences = 0  # includes sequences that wait for room
        self.num_behind = 0  # ended sequences of open groups
        self.busy_s = 0.0  # decoding
        self.stalled_s = 0.0  # seconds of pause or of prompts, with open work
        self.num_generated = 0.0  # tokens
        self.num_retractions = 0
        self._steps = 0.0  # v
        self._constant = 0.0  # C = constant + n v
        self._running = 0  # n
        self._flat_s = 0.0
        self._order = 0
        self._due = 0.0  # v at the end of a sequence, or when the cache is full
        self._heap: list[tuple[float, int, Response]] = []
        self._stack: list[Response] = []  # in order of their begin; includes ended ones
        self._waiting: deque[Response] = deque()  # sequences without room; retracted ones first
        self._groups: dict[int, tuple[list[Response], int]] = {}  # open, ended
        self._boundaries: list[tuple[float, int]] = [(0.0, step)]  # (v, version from there on)

    @property
    def context(self) -> float:
        """Tokens in the cache; a recurrent state counts as those of its size."""
        return self._constant + self._running * (self._steps + self._law.state_tokens)

    @property
    def has_room(self) -> bool:
        """True if the cache has room for more."""
        most = (1 - _SPARE) * self._law.max_cached_tokens
        return not self._waiting and (not self._running or self.context < most)

    def set_law(self, law: EngineLaw) -> None:
        """Continue at another pace; call ``advance`` first."""
        self._law = law
        self._flat_s = law.flat_s(self._running)

    def advance(self, now_s: float) -> None:
        """Let time pass."""
        elapsed, self.now_s = now_s - self.now_s, now_s
        if self.debt_s > 0.0:
            paid = min(self.debt_s, elapsed)
            self.debt_s -= paid
            elapsed -= paid
            if self.num_sequences:
                self.stalled_s += paid
        if elapsed <= 0.0 or not self._running:
            return
        linear = self._flat_s + self._law.context_s * self.context
        square = self._law.context_s * self._running / 2
        steps = 2 * elapsed / (linear + math.sqrt(linear * linear + 4 * square * elapsed))
        self._steps += steps
        self.num_generated += steps * self._running
        self.busy_s += elapsed

    def admit(self, group_id: int, lease_id: int, prompt: int, lengths: dict[int, int]) -> None:
        """Begin a group's sequences; their prompt is computed once.

        Args:
            group_id: Id of the group.
            lease_id: Lease of its answers.
            prompt: Tokens of its prompt.
            lengths: Lengths of the responses, by sibling.
        """
        siblings = [
            Response(group_id, sibling, lease_id, prompt, length)
            for sibling, length in lengths.items()
        ]
        self._groups[group_id] = (siblings, 0)
        self.num_sequences += len(siblings)
        self._waiting.extend(siblings)
        self._begin_waiting()
        self._flat_s = self._law.flat_s(self._running)

    def stall(self, seconds: float, *, recomputes: bool = False) -> None:
        """Pause; with ``recomputes`` compute all keys and values again."""
        if recomputes:
            cached = self.context - self._running * self._law.state_tokens
            seconds += cached * self._law.prefill_s
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
        """Return when a sequence ends or the cache is full, if nothing else happens first.

        Infinity without open work.
        """
        heap = self._heap
        while heap and heap[0][2].order != heap[0][1]:
            heappop(heap)  # cancelled or retracted
        if not heap:
            return math.inf
        steps = max(0.0, heap[0][0] - self._steps)
        self._due, context = heap[0][0], self.context
        if self._running > 1:
            left = (self._law.max_cached_tokens - context) / self._running
            if left < steps:
                steps = max(0.0, left)
                self._due = self._steps + steps
        flat = self._flat_s + self._law.context_s * context
        square = self._law.context_s * self._running / 2
        return self.now_s + self.debt_s + (flat + square * steps) * steps

    def take_ended(self) -> list[Response]:
        """Take out the response that ends now, and those that end with it.

        A full cache retracts sequences; a cache with room resumes retracted ones.
        """
        ended: list[Response] = []
        heap = self._heap
        if self._running:
            self._steps = max(self._steps, self._due)
        while heap and heap[0][0] <= self._steps + _CLOSE:
            _, order, one = heappop(heap)
            if one.order == order:
                self._remove(one)
                one.versions = self._versions(one, one.length)
                ended.append(one)
        self._keep_within()
        self._flat_s = self._law.flat_s(self._running)
        return ended

    def cancel(self, group_id: int) -> None:
        """Give up the open part of a group."""
        if group_id in self._groups:
            for response in list(self._groups[group_id][0]):
                self._remove(response)
            self._keep_within()
            self._flat_s = self._law.flat_s(self._running)

    # ---- one sequence ----------------------------------------------------------------

    def _begin(self, one: Response, done: float) -> None:
        """Begin a sequence, or resume one with this many tokens done."""
        self._order += 1
        one.since, one.began = self._steps, self._steps - done
        one.order = self._order
        heappush(self._heap, (one.began + one.length, one.order, one))
        self._stack.append(one)
        if len(self._stack) > 4 * self.num_sequences + 64:
            self._stack = [other for other in self._stack if other.order]
        self._constant += one.part
        self._running += 1

    def _stop(self, one: Response) -> None:
        """Take a sequence out of the cache."""
        one.order = 0
        self._running -= 1
        self._constant = self._constant - one.part if self._running else 0.0

    def _remove(self, one: Response) -> None:
        """Remove a sequence for good."""
        if one.order:
            self._stop(one)
        else:
            self._waiting.remove(one)
        self.num_sequences -= 1
        left, ended = self._groups[one.group_id]
        left.remove(one)
        if left:
            self._groups[one.group_id] = (left, ended + 1)
            self.num_behind += 1
        else:
            del self._groups[one.group_id]
            self.num_behind -= ended

    def _keep_within(self) -> None:
        """Retract the newest sequences from a full cache; resume those that have room again."""
        most = self._law.max_cached_tokens
        if self._running > 1 and self.context >= most - _CLOSE * self._running:
            while self._running > 1 and self.context + _FREED_STEPS * self._running > most:
                one = self._stack.pop()
                if one.order:
                    self._retract(one)
            return
        self._begin_waiting()

    def _begin_waiting(self) -> None:
        """Begin waiting sequences that have room; siblings compute a prompt once."""
        most = (1 - _SPARE) * self._law.max_cached_tokens
        newest = -1  # group of the last sequence begun here
        while self._waiting:
            one = self._waiting[0]
            done = -one.began
            needed = self.context + self._law.state_tokens + one.prompt + done
            needed += _FREED_STEPS * (self._running + 1)
            if self._running and needed > most:
                break
            self._waiting.popleft()
            siblings, _ = self._groups[one.group_id]
            kept = one.group_id == newest or any(other.order for other in siblings)
            newest = one.group_id
            self.debt_s += (done + one.prompt * (not kept)) * self._law.prefill_s
            self._begin(one, done)

    def _retract(self, one: Response) -> None:
        done = max(0.0, self._steps - one.began)
        one.versions = self._versions(one, math.ceil(done - _CLOSE))
        self._stop(one)
        one.began = -done  # value while it waits
        self._waiting.appendleft(one)
        self.num_retractions += 1

    def _versions(self, one: Response, length: int) -> list[tuple[int, int]]:
        """Return where the versions of a response begin, within its first ``length`` tokens."""
        boundaries, runs = self._boundaries, list(one.versions)
        at = max(0, bisect_right(boundaries, (one.since, math.inf)) - 1)
        if not runs and at == len(boundaries) - 1:
            return [(one.prompt, boundaries[at][1])]  # nothing was adopted since its begin
        begun = (one.since, boundaries[at][1])
        for began_at, step in (begun, *boundaries[at + 1 :]):
            token = max(0, math.ceil(began_at - one.began - _CLOSE))
            if token >= max(1, length):
                break
            if runs and one.prompt + token <= runs[-1][0]:
                runs[-1] = (runs[-1][0], step)
            elif not runs or step != runs[-1][1]:
                runs.append((one.prompt + token, step))
        return runs

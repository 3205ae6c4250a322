"""Pure: which calls the answers of a request make, and whose turn it is.

An answer that runs when its child ends may be to blame. If it ran by itself, it is; if it did not,
it becomes a suspect, and runs once more, alone in a child. The answers of a batch that fails run
one by one.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from slipstream.broker.reward_worker.choice import RewardChoice
from slipstream.broker.rewards.outcomes import FunctionInfo, RewardOutcome, by_sibling, score_of
from slipstream.broker.sandbox.process_table import now_s
from slipstream.wire.messages.broker import ScoringItem
from slipstream.wire.messages.trajectory import Score, Transcript

Work = Sequence[tuple[ScoringItem, Transcript]]


@dataclass(eq=False, slots=True)
class PendingCall:
    """Answers that go to a function together, and share their fate."""

    function: int
    work: Work
    request: "ScoringRequest"
    suspect: bool = False  # runs alone
    divisible: bool = False  # may be split among idle children

    def split(self, parts: int) -> "list[PendingCall]":
        """Return the same answers as at most ``parts`` calls."""
        parts = min(parts, len(self.work))
        ends = [len(self.work) * part // parts for part in range(parts + 1)]
        return [
            PendingCall(self.function, self.work[start:end], self.request)
            for start, end in pairwise(ends)
        ]

    def deliver(self, outcomes: Sequence[RewardOutcome], function: FunctionInfo) -> None:
        """Give every answer its score."""
        for (item, transcript), outcome in zip(self.work, outcomes, strict=True):
            self.request.scores.put_nowait(score_of(item, transcript, outcome, function))


@dataclass(eq=False, slots=True)
class ScoringRequest:
    """One caller's request; every answer not given back gets a score."""

    waiting: deque[PendingCall] = field(default_factory=deque)
    scores: asyncio.Queue[Score | None] = field(default_factory=asyncio.Queue)  # None: check again
    num_answers: int = 0
    asked_s: float = field(default_factory=now_s)
    abandoned: bool = False  # the caller is gone

    def give_back(self, group_id: int) -> list[ScoringItem]:
        """Forget the answers of a group that wait for a call of their own; return them."""
        alone = [call for call in self.waiting if len(call.work) == 1 and not call.divisible]
        calls = [call for call in alone if call.work[0][0].group_id == group_id]
        for call in calls:
            self.waiting.remove(call)
        self.num_answers -= len(calls)
        if calls:
            self.scores.put_nowait(None)
        return [call.work[0][0] for call in calls]


def request_of(
    work: Work, choice: RewardChoice, functions: Sequence[FunctionInfo]
) -> ScoringRequest:
    """Return the calls that score this work, each with the function of its data source."""
    by_function: dict[int, list[tuple[ScoringItem, Transcript]]] = {}
    for pair in work:
        by_function.setdefault(choice.index_of(pair[1].prompt.data_source), []).append(pair)
    request = ScoringRequest(num_answers=len(work))
    for function, share in by_function.items():
        parts: list[list[tuple[ScoringItem, Transcript]]]
        match functions[function].takes:
            case "answer":
                parts = [[pair] for pair in share]
            case "group":
                parts = [[share[position] for position in group] for group in by_sibling(share)]
            case "batch":
                parts = [share]
        divisible = functions[function].takes == "batch"
        request.waiting += (
            PendingCall(function, part, request, divisible=divisible) for part in parts
        )
    return request

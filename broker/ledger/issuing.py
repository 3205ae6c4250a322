"""Chooses a generator's next work: lapsed groups, then evaluation, then new prompts."""

from collections.abc import Callable
from itertools import islice

from slipstream.broker.ledger.decisions import GroupDecisions
from slipstream.broker.ledger.events import Issued
from slipstream.broker.ledger.groups import Group
from slipstream.wire.messages.trajectory import ItemKind, Prompt
from slipstream.wire.messages.versions import PolicyVersion

_MOST_LAPSED = 64  # a generator whose lanes fit none of them gets other work
_STILL_S = 10.0  # seconds without a grant, answer or reward before spare groups begin


class Issuing:
    """Chooses groups, and issues prompts where there are none."""

    def __init__(
        self,
        decisions: GroupDecisions,
        prompt_at: Callable[[int], Prompt],
        eval_prompt_at: Callable[[int], Prompt],
    ) -> None:
        self._book = decisions.book
        self._decisions = decisions
        self._prompt_at = prompt_at
        self._eval_prompt_at = eval_prompt_at
        self._seen = (0, 0, 0)
        self._still_since_s = 0.0  # when that changed last

    def permits(self, adopted: PolicyVersion, spare: int = 0) -> int:
        """Return the number of groups that a generator running ``adopted`` may still start.

        ``spare`` is the number of groups that replace others which may never finish.
        """
        allowed, controller = self._allowed(adopted, spare), self._book.controller
        if controller is None or not allowed:
            return allowed
        return min(
            allowed,
            controller.throttle.permits(
                self._book.rules.bound,
                learner_step=self._book.free_step,
                adopted_step=adopted.step,
                live=self._book.index.num_live,
                booked=self._book.state.batches,
            ),
        )

    def spares(self, adopted: PolicyVersion, now_s: float) -> int:
        """Return how many spare groups may start for those that the last steps wait for.

        It is 0 unless all groups of these steps have begun and nothing has arrived for a while.
        """
        index, state = self._book.index, self._book.state
        seen = (state.next_group_id, index.num_generated, index.num_scored)
        if seen != self._seen:
            self._seen, self._still_since_s = seen, now_s
        if now_s - self._still_since_s < _STILL_S or (needed := self._needed()) > index.num_live:
            return 0
        lacking = needed - self._book.in_flight()["ready"]
        return max(0, min(lacking, self.permits(adopted, self.most_spare)))

    @property
    def most_spare(self) -> int:
        """Most groups under way that the run may not need."""
        return max(2, self._book.rules.bound.groups_per_step // 4)

    def _needed(self) -> int:
        """Return how many groups the steps without a batch train."""
        state = self._book.state
        booked = sum(step < state.last_step for step in state.batches)
        steps = state.last_step - self._book.step - booked
        return steps * self._book.rules.bound.groups_per_step

    def _allowed(self, adopted: PolicyVersion, spare: int = 0) -> int:
        """Return the permits of a run without a staleness target."""
        rules, state = self._book.rules, self._book.state
        groups_per_step, live = rules.bound.groups_per_step, self._book.index.num_live
        allowed = rules.bound.permits(
            learner_step=self._book.free_step,
            adopted_step=adopted.step,
            live=live,
            booked=state.batches,
        )
        remaining = self._needed() + spare - live
        room = rules.max_in_flight - live
        if state.untrained_bytes > rules.high_water_bytes:
            room = min(room, groups_per_step - live)
        return max(0, min(allowed, remaining, room))

    def num_available(self, adopted: PolicyVersion) -> int:
        """Return how many groups there are for a generator that runs ``adopted``, about."""
        book = self._book
        held_out = sum(eval_round.unissued for eval_round in book.state.eval_rounds.values())
        return self.permits(adopted) + len(book.index.again) + held_out

    def next_group(self, adopted: PolicyVersion, room: int, spare: int = 0) -> Group | None:
        """Return a group of at most ``room`` sequences; None if there is nothing to grant.

        ``spare`` is as in ``permits``.
        """
        book, rules, state = self._book, self._book.rules, self._book.state
        for group in islice(book.index.again.values(), _MOST_LAPSED):
            if group.adopted_step > adopted.step:
                continue
            if len(group.missing) <= room:
                return group
            if group.item == "eval":
                return None  # smaller work would take the lanes that it waits for
        samples, answers = rules.eval_plan.section.samples, book.index.eval_open
        for step, eval_round in state.eval_rounds.items():
            if not eval_round.unissued or adopted.step < step:
                continue
            # Held-out answers to come or to be scored must leave memory for more. One problem at a
            # time is always answered, so that an evaluation comes to its end.
            most = rules.max_in_flight * rules.group_size
            fits = answers + samples <= most and state.untrained_bytes <= rules.high_water_bytes
            if not answers or fits:
                problem = eval_round.next_problem
                prompt = self._eval_prompt_at(problem)
                return (
                    self._issue("eval", prompt, problem, samples, step) if samples <= room else None
                )
        if rules.group_size > room:
            return None
        if self.permits(adopted, spare) == 0:
            if book.controller is not None and self._allowed(adopted):
                book.controller.binds = True
            return None
        for group in book.index.fresh.values():
            return group  # left from before a take-over: its prompt is taken already
        if book.out_of_prompts:
            return None
        return self._issue("train", self._prompt_at(state.cursor), state.cursor, rules.group_size)

    def _issue(
        self, item: ItemKind, prompt: Prompt, cursor: int, size: int, eval_step: int = -1
    ) -> Group:
        group_id = self._book.state.next_group_id
        self._decisions.record(
            Issued(
                group_id=group_id,
                item=item,
                prompt=prompt,
                cursor=cursor,
                size=size,
                eval_step=eval_step,
            )
        )
        return self._book.groups[group_id]

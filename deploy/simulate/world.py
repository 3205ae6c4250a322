"""The event loop of virtual time: the real ledger decides, laws say how long everything takes.

Engines request work as generators do (room for as many sequences as their lanes are free), the
learner requests a batch as learners do (the next one while it trains), a publish reaches engines
after its transfer. What happens at the same time happens in the order in which it was begun.
"""

import heapq
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from slipstream.broker.ledger.admission import NotYet, StalenessBound
from slipstream.broker.ledger.commands import Ledger
from slipstream.broker.ledger.evaluation import EvalPlan
from slipstream.broker.ledger.events import Dropped
from slipstream.broker.ledger.state import LedgerRules
from slipstream.deploy.simulate.engine import Ended, SimulatedEngine
from slipstream.deploy.simulate.outcome import Outcome, StepRecord
from slipstream.deploy.simulate.scenario import Change, Scenario
from slipstream.wire.errors import RefusedError
from slipstream.wire.messages.trajectory import (
    NO_SCORING_LEASE,
    Prompt,
    Score,
    TrajectoryHeader,
    VersionRun,
)
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.settings.sections import EvalSection

_FOR_EVER_S = 1e18
_SEALED_EVERY = 8  # learner steps: a checkpoint lets the ledger forget
_SAMPLED = 100_000  # groups whose time is kept
_PROMPT = Prompt(prompt="simulated")
OnStep = Callable[[StepRecord], None]


@dataclass(slots=True)
class _Batch:
    """What the learner has or is about to train."""

    step: int
    num_tokens: int
    num_generated: int
    num_pairs: float


class World:
    """A run under way."""

    def __init__(self, scenario: Scenario) -> None:
        """Begin at second 0, with a learner and engines that run its weights."""
        self.scenario = scenario
        self.ledger = Ledger(
            rules_of(scenario),
            prompt_at=lambda _position: _PROMPT,
            eval_prompt_at=lambda _position: _PROMPT,
        )
        self.now_s = 0.0
        self._rng = random.Random(scenario.seed)  # noqa: S311 no secret
        self._events: list[tuple[float, int, Callable[..., None], tuple[int, ...]]] = []
        self._order = 0
        self._version = self.ledger.training.take_over(0)
        self._published = 0
        self._training: _Batch | None = None
        self._next: _Batch | None = None
        self._began_s = self._asked_s = 0.0
        self._records: list[StepRecord] = []
        self._leased_at: dict[int, float] = {}
        self._engine_of: dict[int, int] = {}  # group -> engine, while it is leased
        self._group_s: list[float] = []
        self._num_refused = 0
        self._num_engines = scenario.engines  # that run
        self._ended_engines: list[SimulatedEngine] = []  # their figures
        self._busy_before = 0.0
        self._change = Change(at_s=0.0)
        laws = [scenario.engine, scenario.engine.slower(scenario.faults.slow_factor)]
        num_slow = round(scenario.faults.slow_share * scenario.engines)
        self._laws = [laws[number < num_slow] for number in range(scenario.engines)]
        self._engines: list[SimulatedEngine | None] = []
        self._lives = [0] * scenario.engines
        self._stamps = [0] * scenario.engines
        self._pending = [-1] * scenario.engines  # version that an engine drains for
        self._waiting: dict[int, deque[int]] = {}  # version -> engines that were granted nothing
        self._waits_at = [-1] * scenario.engines
        self._runs: dict[int, PolicyVersion] = {}
        for number in range(scenario.engines):
            self._engines.append(self._new_engine(number))
            self._will_fail(number)
        for change_number, change in enumerate(scenario.changes):
            self._at(change.at_s, self._changes, change_number)

    def run(self, on_step: OnStep = lambda _record: None) -> Outcome:
        """Simulate to the end; ``on_step`` is called after each learner step."""
        self._on_step = on_step
        for number, engine in enumerate(self._engines):
            if engine is not None and self._ask(number):
                self._schedule(number, engine)
        self._wake()
        events, pop = self._events, heapq.heappop
        while not self.ledger.book.finished:
            if not events:
                raise RuntimeError(f"nothing happens any more at step {self._version.step}")
            self.now_s, _, act, arguments = pop(events)
            act(*arguments)
        return self._outcome()

    @property
    def engines(self) -> dict[str, SimulatedEngine | None]:
        """The engines by their names; None while one is gone."""
        return {f"generator-{number}": engine for number, engine in enumerate(self._engines)}

    # ---- time ----------------------------------------------------------------

    def _at(self, time_s: float, act: Callable[..., None], *arguments: int) -> None:
        self._order += 1
        heapq.heappush(self._events, (time_s, self._order, act, arguments))

    def _schedule(self, number: int, engine: SimulatedEngine) -> None:
        """Have an engine's next end happen."""
        stamp = self._stamps[number] = self._stamps[number] + 1
        end_s = engine.next_end_s()
        if end_s < _FOR_EVER_S:
            self._at(end_s, self._ends, number, stamp)

    # ---- engines -------------------------------------------------------------

    def _new_engine(self, number: int) -> SimulatedEngine:
        holder = f"generator-{number}@{self._lives[number]}"
        kept = max(64, 2 * self.scenario.max_staleness_steps + 4)
        engine = SimulatedEngine(self._laws[number], holder, self._published, self.now_s, kept=kept)
        self._set_pace(number, engine)
        return engine

    def _set_pace(self, number: int, engine: SimulatedEngine) -> None:
        factor = self._change.engine_factor
        law = self._laws[number]
        engine.set_law(law if factor == 1.0 else law.slower(factor))

    def _ends(self, number: int, stamp: int) -> None:
        """Sequences of an engine end."""
        engine = self._engines[number]
        if stamp != self._stamps[number] or engine is None:
            return
        engine.advance(self.now_s)
        ended = engine.take_ended()
        for one in ended:
            self._submit(engine, one)
        self._go_on(number, engine)
        self._cancel_dropped()

    def _go_on(self, number: int, engine: SimulatedEngine) -> None:
        """Have an engine with fewer sequences take its version if it drains, and work."""
        if self._pending[number] >= 0 and not engine.num_sequences:
            self._adopt(number, engine, self._pending[number])
        self._ask(number)
        self._schedule(number, engine)

    def _submit(self, engine: SimulatedEngine, one: Ended) -> None:
        runs = tuple(VersionRun(first, self._policy(step)) for first, step in one.versions)
        header = TrajectoryHeader(
            group_id=one.group_id,
            sibling=one.sibling,
            lease_id=one.lease_id,
            num_prompt_tokens=one.num_prompt_tokens,
            num_tokens=one.num_tokens,
            version_runs=runs,
            temperature=1.0,
            finish_reason="stop",
        )
        try:
            self.ledger.submit(engine.holder, header)
        except RefusedError:
            self._num_refused += 1
            return
        if self.scenario.score_s:
            after_s = self.now_s + self.scenario.score_s
            self._at(after_s, self._score, one.group_id, one.sibling)
        else:
            self._score(one.group_id, one.sibling)

    def _policy(self, step: int) -> PolicyVersion:
        found = self._runs.get(step)
        if found is None:
            found = self._runs[step] = PolicyVersion(self._version.epoch, step)
        return found

    def _score(self, group_id: int, sibling: int) -> None:
        group = self.ledger.book.groups.get(group_id)
        if group is None:
            return
        # Whether a group is of use is its prompt's doing, not its answers'.
        share = self.scenario.useless_share
        drawn = random.Random(f"{self.scenario.seed} {group_id}").random() if share else 1.0  # noqa: S311
        is_useless = drawn < share
        reward = 0.0 if is_useless else float(sibling % 2)
        self.ledger.score(
            Score(group_id=group_id, sibling=sibling, lease_id=NO_SCORING_LEASE, reward=reward)
        )
        if len(group.scores) < group.size:
            return
        began_s = self._leased_at.pop(group_id, self.now_s)
        self._engine_of.pop(group_id, None)
        if len(self._group_s) < _SAMPLED:
            self._group_s.append(self.now_s - began_s)
        self._deliver()
        if group_id not in self.ledger.book.groups:
            self._wake()  # it was dropped: another prompt may take its place

    def _ask(self, number: int) -> bool:
        """Request work for an engine's free lanes; return whether it got any."""
        engine = self._engines[number]
        if engine is None or self._pending[number] >= 0:
            return False
        scenario = self.scenario
        held = engine.num_sequences + (engine.num_behind if scenario.siblings_together else 0)
        room = scenario.max_sequences - held
        if room < scenario.group_size or not engine.has_room:
            self._waits_at[number] = -1
            return False
        granted = self.ledger.lease(
            engine.holder,
            self._policy(engine.step),
            max_sequences=room,
            now_s=self.now_s,
            num_sharing=self._num_engines,
        )
        for one in granted:
            drawn = scenario.lengths.draw(self._rng, len(one.siblings))
            if (factor := self._change.length_factor) != 1.0:
                drawn = [max(1, round(factor * length)) for length in drawn]
            lengths = dict(zip(one.siblings, drawn, strict=True))
            engine.admit(one.group_id, one.lease_id, scenario.prompt_tokens, lengths)
            self._leased_at.setdefault(one.group_id, self.now_s)
            self._engine_of[one.group_id] = number
            room -= len(lengths)
        if room >= scenario.group_size:
            if self._waits_at[number] != engine.step:
                self._waits_at[number] = engine.step
                self._waiting.setdefault(engine.step, deque()).append(number)
        else:
            self._waits_at[number] = -1
        return bool(granted)

    def _wake(self) -> None:
        """Grant work to engines that wait for it; those that run the same get the same answer."""
        for step in sorted(self._waiting, reverse=True):
            queue = self._waiting[step]
            while queue:
                number = queue[0]
                engine = self._engines[number]
                if engine is None or self._waits_at[number] != step or engine.step != step:
                    queue.popleft()
                    continue
                engine.advance(self.now_s)
                self._waits_at[number] = -1  # it is put at the end again if it wants more
                has_work = self._ask(number)
                queue.popleft()
                if has_work:
                    self._schedule(number, engine)
                elif self._waits_at[number] == step:  # the ledger has nothing for such
                    break
            if not queue:
                del self._waiting[step]

    # ---- faults --------------------------------------------------------------

    def _will_fail(self, number: int) -> None:
        mean_s = self.scenario.faults.engine_mtbf_s
        if mean_s:
            after_s = self.now_s + self._rng.expovariate(1 / mean_s)
            self._at(after_s, self._fails, number, self._lives[number])

    def _fails(self, number: int, life: int) -> None:
        if life != self._lives[number]:
            return
        self._end_engine(number)
        self._at(self.now_s + self.scenario.faults.lease_s, self._lapses, number, life)
        self._at(self.now_s + self.scenario.faults.restart_s, self._comes_back, number)

    def _end_engine(self, number: int) -> None:
        engine = self._engines[number]
        if engine is None:
            return
        engine.advance(self.now_s)
        self._stamps[number] += 1
        self._engines[number] = None
        self._pending[number] = self._waits_at[number] = -1
        self._ended_engines.append(engine)
        self._lives[number] += 1
        self._num_engines -= 1

    def _lapses(self, number: int, life: int) -> None:
        self.ledger.release_all(f"generator-{number}@{life}", "lapsed")
        self._wake()
        self._deliver()

    def _comes_back(self, number: int) -> None:
        engine = self._engines[number] = self._new_engine(number)
        self._num_engines += 1
        self._will_fail(number)
        self._ask(number)
        self._schedule(number, engine)

    def _changes(self, change_number: int) -> None:
        change = self._change = self.scenario.changes[change_number]
        alive = [number for number, engine in enumerate(self._engines) if engine is not None]
        for number in alive[len(alive) - change.lost_engines :]:
            life = self._lives[number]
            self._end_engine(number)
            self._at(self.now_s + self.scenario.faults.lease_s, self._lapses, number, life)
        for number, engine in enumerate(self._engines):
            if engine is not None:
                engine.advance(self.now_s)
                self._set_pace(number, engine)
                self._schedule(number, engine)

    # ---- the learner ---------------------------------------------------------

    def _deliver(self) -> None:
        """Request the learner's next batch, or the one after it."""
        if self._next is not None:
            return
        if self._training is not None and not self.scenario.prefetch:
            return
        step = self._version.step + (self._training is not None)
        if step >= self.ledger.book.state.last_step:
            return
        batch = self.ledger.training.deliver(self._version, step)
        if batch is None or isinstance(batch, NotYet):
            return
        headers = [header for group in batch for header in group.headers.values()]
        self._next = _Batch(
            step=step,
            num_tokens=sum(header.num_tokens for header in headers),
            num_generated=sum(header.num_response_tokens for header in headers),
            num_pairs=float(sum(header.num_tokens**2 for header in headers)),
        )
        if self._training is None:
            self._train()
        self._cancel_dropped()
        self._wake()

    def _train(self) -> None:
        batch, self._next = self._next, None
        if batch is None:
            return
        self._training, self._began_s = batch, self.now_s
        scenario = self.scenario
        seconds = scenario.learner.seconds(batch.num_tokens, batch.num_pairs)
        seconds *= self._change.learner_factor
        if (batch.step + 1) % scenario.publish_every == 0:
            seconds += scenario.publish.stall_s
        self._at(self.now_s + seconds, self._trained)
        self._deliver()

    def _trained(self) -> None:
        batch, self._training = self._training, None
        assert batch is not None  # noqa: S101 it is the end of its training
        self._version = self._version.next()
        training, step = self.ledger.training, self._version.step
        bound = self.ledger.book.bound_in_force  # when these groups were begun, about
        training.commit(self._version, self._figures(batch))
        if step % self.scenario.publish_every == 0:
            self._at(self.now_s + self.scenario.publish.transfer_s, self._publishes, step)
        self._record(batch, bound)
        if step % _SEALED_EVERY == 0:
            training.seal(self._version, step, step)
        self._cancel_dropped()
        self._asked_s = self.now_s
        self._train()
        self._deliver()
        self._wake()

    def _figures(self, batch: _Batch) -> dict[str, float]:
        """Return what the learner reports of a step, as far as a controller wants it."""
        per_lag = self.scenario.kl_per_lag
        if not per_lag:
            return {}
        book = self.ledger.book
        lags = Counter[int]()
        for group_id in book.state.batches[batch.step]:
            for header in book.groups[group_id].headers.values():
                for version, tokens in header.tokens_by_version():
                    lags[batch.step - version.step] += tokens
        squares = sum(lag**2 * tokens for lag, tokens in lags.items())
        return {"staleness/mismatch_kl": per_lag * squares / max(1, lags.total())}

    def _record(self, batch: _Batch, bound: int) -> None:
        state = self.ledger.book.state
        for alive in self._engines:
            if alive is not None:
                alive.advance(self.now_s)
        busy = sum(engine.busy_s for engine in self._all_engines())
        before = self._records[-1].committed_s if self._records else 0.0
        record = StepRecord(
            step=self._version.step,
            asked_s=self._asked_s,
            began_s=self._began_s,
            committed_s=self.now_s,
            num_tokens=batch.num_tokens,
            num_generated=batch.num_generated,
            staleness=dict(state.history[batch.step].staleness),
            in_flight=self.ledger.book.index.num_live,
            bound=bound,
            engines_busy=(busy - self._busy_before)
            / max(1e-12, (self.now_s - before) * len(self._engines)),
        )
        self._busy_before = busy
        self._records.append(record)
        self._on_step(record)

    def _all_engines(self) -> list[SimulatedEngine]:
        """Return the engines that run and those that have ended."""
        return [*self._ended_engines, *(one for one in self._engines if one is not None)]

    # ---- publishes -----------------------------------------------------------

    def _publishes(self, step: int) -> None:
        """A version reaches every engine."""
        self._published = max(self._published, step)
        drains = self.scenario.publish.drains
        for number, engine in enumerate(self._engines):
            if engine is None or engine.step >= step:
                continue
            engine.advance(self.now_s)
            if drains and engine.num_sequences:
                self._pending[number] = step
                continue
            self._adopt(number, engine, step)
            self._schedule(number, engine)
        self._wake()

    def _adopt(self, number: int, engine: SimulatedEngine, step: int) -> None:
        law = self.scenario.publish
        engine.stall(law.pause_s, recomputes=law.recomputes)
        engine.adopt(step)
        self._pending[number] = -1
        self._waits_at[number] = step
        self._waiting.setdefault(step, deque()).append(number)

    # ---- the account ---------------------------------------------------------

    def _cancel_dropped(self) -> None:
        """Take the ledger's events; what was dropped is given up by its engine."""
        events, _ = self.ledger.drain()
        for event in events:
            if isinstance(event, Dropped):
                self._leased_at.pop(event.group_id, None)
                number = self._engine_of.pop(event.group_id, None)
                engine = self._engines[number] if number is not None else None
                if number is not None and engine is not None:
                    engine.advance(self.now_s)
                    engine.cancel(event.group_id)
                    self._go_on(number, engine)

    def _outcome(self) -> Outcome:
        book = self.ledger.book
        for alive in self._engines:
            if alive is not None:
                alive.advance(self.now_s)
        engines = self._all_engines()
        return Outcome(
            steps=tuple(self._records),
            issued=book.state.issued,
            trained=book.state.trained,
            dropped=dict(book.state.dropped),
            in_flight=sum(book.in_flight().values()),
            unaccounted=book.unaccounted(),
            num_refused=self._num_refused,
            restarted_trajectories=book.state.restarted_trajectories,
            num_generated=sum(engine.num_generated for engine in engines),
            num_retractions=sum(engine.num_retractions for engine in engines),
            engine_busy_s=sum(engine.busy_s for engine in engines),
            engine_stalled_s=sum(engine.stalled_s for engine in engines),
            engine_seconds=self.now_s * len(self._engines),
            group_s=tuple(sorted(self._group_s)),
        )


def rules_of(scenario: Scenario) -> LedgerRules:
    """Return the settings that the ledger obeys in a scenario."""
    return LedgerRules(
        bound=StalenessBound(
            scenario.max_staleness_steps,
            scenario.groups_per_step,
            reserves=scenario.staleness_mode == "wait",
        ),
        group_size=scenario.group_size,
        total_steps=scenario.steps,
        max_attempts=scenario.faults.max_attempts,
        max_in_flight=scenario.in_flight,
        drop_zero_variance=scenario.useless_share > 0,
        lease_s=_FOR_EVER_S,  # an engine's end is an event of its own
        eval_plan=EvalPlan(sources=(), section=EvalSection()),
        staleness_target=scenario.target,
    )


def simulate(scenario: Scenario, on_step: OnStep = lambda _record: None) -> Outcome:
    """Return what a run of this scenario does."""
    return World(scenario).run(on_step)

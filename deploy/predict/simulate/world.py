"""The event loop of virtual time: the real ledger decides, laws give all durations.

Engines request work as generators do (as many sequences as they have free lanes), the learner
requests a batch as learners do (the next one while it trains), and a publish reaches engines after
its transfer. Simultaneous events happen in the order in which they were scheduled.
"""

import heapq
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from slipstream.broker.ledger.admission import NotYet, StalenessBound
from slipstream.broker.ledger.commands import Ledger
from slipstream.broker.ledger.evaluation import EvalPlan
from slipstream.broker.ledger.events import Dropped
from slipstream.broker.ledger.state import LedgerRules
from slipstream.deploy.predict.laws.engine_law import EngineLaw
from slipstream.deploy.predict.simulate.engine import Response, SimulatedEngine
from slipstream.deploy.predict.simulate.outcome import SimulatedRun, StepRecord
from slipstream.deploy.predict.simulate.scenario import Change, Scenario
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
_SAMPLED = 100_000  # groups with recorded time
_PROMPT = Prompt(prompt="simulated")
OnStep = Callable[[StepRecord], None]


@dataclass(slots=True, eq=False)
class _Seat:
    """A generator; its engines fail one after the other."""

    name: str
    law: EngineLaw
    engine: SimulatedEngine | None = None  # running engine
    life: int = 0  # number of ended engines
    stamp: int = 0  # stamp of the next valid event
    drains_for: int = -1  # version that the engine drains for
    waits_at: int = -1  # version that was granted too little


@dataclass(slots=True)
class _Group:
    """An open group."""

    since_s: float  # time of the first lease
    is_useless: bool  # all rewards are equal, because of the prompt, not of the answers
    seat: _Seat  # holder of its lease


@dataclass(slots=True)
class _Batch:
    """A batch in training, or the next one."""

    step: int
    num_tokens: int
    num_generated: int
    num_pairs: float


class World:
    """A run in progress."""

    def __init__(self, scenario: Scenario) -> None:
        """Begin at second 0, with a learner and engines with its weights."""
        self.scenario = scenario
        self._on_step: OnStep = lambda _record: None
        self.ledger = Ledger(
            rules_of(scenario),
            prompt_at=lambda _position: _PROMPT,
            eval_prompt_at=lambda _position: _PROMPT,
        )
        self.now_s = 0.0
        self._rng = random.Random(scenario.seed)  # noqa: S311 no secret
        self._events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._order = 0
        self._version = self.ledger.training.take_over(0)
        self._published = 0
        self._training: _Batch | None = None
        self._next: _Batch | None = None
        self._began_s = self._asked_s = 0.0
        self._records: list[StepRecord] = []
        self._under_way: dict[int, _Group] = {}  # groups before their last reward
        self._group_s: list[float] = []
        self._num_refused = 0
        self._num_engines = 0  # running engines
        self._ended_engines: list[SimulatedEngine] = []  # kept for their figures
        self._busy_before = 0.0
        self._change = Change(at_s=0.0)
        self._waiting: dict[int, deque[_Seat]] = {}  # version -> seats that were granted too little
        self._exhausted: set[int] = set()  # versions with nothing left to grant
        laws = [scenario.engine, scenario.engine.slower(scenario.faults.slow_factor)]
        num_slow = round(scenario.faults.slow_share * scenario.engines)
        self._seats = [
            _Seat(f"generator-{number}", laws[number < num_slow])
            for number in range(scenario.engines)
        ]
        for seat in self._seats:
            self._begin(seat)
        for change in scenario.changes:
            self._at(change.at_s, self._changes, change)

    def run(self, on_step: OnStep = lambda _record: None) -> SimulatedRun:
        """Simulate to the end; ``on_step`` is called after each learner step."""
        self._on_step = on_step
        for seat, engine in self._running():
            if self._ask(seat, engine):
                self._schedule(seat, engine)
        self._wake()
        events, pop, book = self._events, heapq.heappop, self.ledger.book
        while not book.finished:
            if not events:
                raise RuntimeError(f"nothing happens any more at step {self._version.step}")
            self.now_s, _, act, arguments = pop(events)
            act(*arguments)
        return self._outcome()

    @property
    def engines(self) -> dict[str, SimulatedEngine | None]:
        """Engines by name; None while one is gone."""
        return {seat.name: seat.engine for seat in self._seats}

    # ---- time ----------------------------------------------------------------

    def _at(self, time_s: float, act: Callable[..., None], *arguments: object) -> None:
        self._order += 1
        heapq.heappush(self._events, (time_s, self._order, act, arguments))

    def _schedule(self, seat: _Seat, engine: SimulatedEngine) -> None:
        """Schedule an engine's next end."""
        seat.stamp += 1
        end_s = engine.next_end_s()
        if end_s < _FOR_EVER_S:
            self._at(end_s, self._ends, seat, seat.stamp)

    # ---- engines -------------------------------------------------------------

    def _begin(self, seat: _Seat) -> SimulatedEngine:
        """Start an engine; it may fail later."""
        kept = max(64, 2 * self.scenario.max_staleness_steps + 4)
        holder = f"{seat.name}@{seat.life}"
        engine = SimulatedEngine(seat.law, holder, self._published, self.now_s, kept=kept)
        seat.engine = engine
        self._set_pace(seat, engine)
        self._num_engines += 1
        if mean_s := self.scenario.faults.engine_mtbf_s:
            after_s = self.now_s + self._rng.expovariate(1 / mean_s)
            self._at(after_s, self._fails, seat, seat.life)
        return engine

    def _running(self) -> Iterator[tuple[_Seat, SimulatedEngine]]:
        for seat in self._seats:
            if seat.engine is not None:
                yield seat, seat.engine

    def _set_pace(self, seat: _Seat, engine: SimulatedEngine) -> None:
        factor = self._change.engine_factor
        engine.set_law(seat.law if factor == 1.0 else seat.law.slower(factor))

    def _ends(self, seat: _Seat, stamp: int) -> None:
        """End sequences of an engine."""
        engine = seat.engine
        if stamp != seat.stamp or engine is None:
            return
        engine.advance(self.now_s)
        for response in engine.take_ended():
            self._submit(engine, response)
        self._go_on(seat, engine)
        self._cancel_dropped()

    def _go_on(self, seat: _Seat, engine: SimulatedEngine) -> None:
        """Let an engine with fewer sequences adopt its version if it drains, and work."""
        if seat.drains_for >= 0 and not engine.num_sequences:
            self._adopt(seat, engine, seat.drains_for)
        self._ask(seat, engine)
        self._schedule(seat, engine)

    def _submit(self, engine: SimulatedEngine, one: Response) -> None:
        epoch = self._version.epoch
        header = TrajectoryHeader(
            group_id=one.group_id,
            sibling=one.sibling,
            lease_id=one.lease_id,
            num_prompt_tokens=one.prompt,
            num_tokens=one.prompt + one.length,
            version_runs=tuple(
                [VersionRun(first, PolicyVersion(epoch, step)) for first, step in one.versions]
            ),
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

    def _score(self, group_id: int, sibling: int) -> None:
        group = self.ledger.book.groups.get(group_id)
        if group is None:
            return
        under_way = self._under_way[group_id]
        reward = 0.0 if under_way.is_useless else float(sibling % 2)
        self.ledger.score(
            Score(group_id=group_id, sibling=sibling, lease_id=NO_SCORING_LEASE, reward=reward)
        )
        if len(group.scores) < group.size:
            return
        del self._under_way[group_id]
        if len(self._group_s) < _SAMPLED:
            self._group_s.append(self.now_s - under_way.since_s)
        self._deliver()
        if group_id not in self.ledger.book.groups:
            self._wake()  # dropped: another prompt may take its place

    def _ask(self, seat: _Seat, engine: SimulatedEngine) -> bool:
        """Request work for an engine's free lanes; return True if it got any."""
        if seat.drains_for >= 0:
            return False
        scenario = self.scenario
        held = engine.num_sequences + (engine.num_behind if scenario.siblings_together else 0)
        room = scenario.max_sequences - held
        if room < scenario.group_size or not engine.has_room:
            seat.waits_at = -1
            return False
        granted = []
        if engine.step not in self._exhausted:  # cleared by a batch, a commit, a lapse or a drop
            granted = self.ledger.lease(
                engine.holder,
                PolicyVersion(self._version.epoch, engine.step),
                max_sequences=room,
                now_s=self.now_s,
                num_sharing=self._num_engines,
            )
        if not granted:
            self._exhausted.add(engine.step)
        for lease in granted:
            drawn = scenario.lengths.draw(self._rng, len(lease.siblings))
            if (factor := self._change.length_factor) != 1.0:
                drawn = [max(1, round(factor * length)) for length in drawn]
            lengths = dict(zip(lease.siblings, drawn, strict=True))
            engine.admit(lease.group_id, lease.lease_id, scenario.prompt_tokens, lengths)
            self._note(lease.group_id, seat)
            room -= len(lengths)
        if room < scenario.group_size:
            seat.waits_at = -1
        elif seat.waits_at != engine.step:
            self._wait(seat, engine)
        return bool(granted)

    def _note(self, group_id: int, seat: _Seat) -> None:
        """Record the engine of a group's lease, and the time of the first lease."""
        if (under_way := self._under_way.get(group_id)) is not None:
            under_way.seat = seat
            return
        scenario, is_useless = self.scenario, False
        if share := scenario.useless_share:
            drawn = random.Random(f"{scenario.seed} {group_id}").random()  # noqa: S311
            is_useless = drawn < share
        self._under_way[group_id] = _Group(self.now_s, is_useless, seat)

    def _wait(self, seat: _Seat, engine: SimulatedEngine) -> None:
        """Let an engine wait for work, behind others with the same version."""
        seat.waits_at = engine.step
        self._waiting.setdefault(engine.step, deque()).append(seat)

    def _wake(self) -> None:
        """Grant work to waiting engines; engines with the same version get the same answer."""
        self._exhausted.clear()
        for step in sorted(self._waiting, reverse=True):
            queue = self._waiting[step]
            while queue:
                seat = queue[0]
                engine = seat.engine
                if engine is None or seat.waits_at != step or engine.step != step:
                    queue.popleft()
                    continue
                engine.advance(self.now_s)
                seat.waits_at = -1  # back to the end if it wants more
                has_work = self._ask(seat, engine)
                queue.popleft()
                if has_work:
                    self._schedule(seat, engine)
                elif seat.waits_at == step:  # the ledger has nothing for this version
                    break
            if not queue:
                del self._waiting[step]

    # ---- faults --------------------------------------------------------------

    def _fails(self, seat: _Seat, life: int) -> None:
        if seat.engine is not None and life == seat.life:
            self._end(seat, seat.engine)
            self._at(self.now_s + self.scenario.faults.restart_s, self._comes_back, seat)

    def _end(self, seat: _Seat, engine: SimulatedEngine) -> None:
        """End an engine; its leases lapse later."""
        engine.advance(self.now_s)
        self._at(self.now_s + self.scenario.faults.lease_s, self._lapses, engine.holder)
        self._ended_engines.append(engine)
        seat.engine = None
        seat.stamp += 1
        seat.life += 1
        seat.drains_for = seat.waits_at = -1
        self._num_engines -= 1

    def _lapses(self, holder: str) -> None:
        self.ledger.release_all(holder, "lapsed")
        self._wake()
        self._deliver()

    def _comes_back(self, seat: _Seat) -> None:
        engine = self._begin(seat)
        self._ask(seat, engine)
        self._schedule(seat, engine)

    def _changes(self, change: Change) -> None:
        self._change = change
        running = list(self._running())
        for seat, engine in running[len(running) - change.lost_engines :]:
            self._end(seat, engine)
        for seat, engine in self._running():
            engine.advance(self.now_s)
            self._set_pace(seat, engine)
            self._schedule(seat, engine)

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
        self._exhausted.clear()
        headers = [header for group in batch for header in group.headers.values()]
        lengths = [header.num_tokens for header in headers]
        num_tokens = sum(lengths)
        self._next = _Batch(
            step=step,
            num_tokens=num_tokens,
            num_generated=num_tokens - len(lengths) * self.scenario.prompt_tokens,
            num_pairs=float(sum([length**2 for length in lengths])),
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
        assert batch is not None  # noqa: S101 end of its training
        self._version = self._version.next()
        training, step = self.ledger.training, self._version.step
        bound = self.ledger.book.bound_in_force  # about that of these groups' begin
        training.commit(self._version, self._figures(batch))
        self._exhausted.clear()
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
        """Return the learner's figures of a step that a controller needs."""
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
            / max(1e-12, (self.now_s - before) * len(self._seats)),
        )
        self._busy_before = busy
        self._records.append(record)
        self._on_step(record)

    def _all_engines(self) -> list[SimulatedEngine]:
        """Return all ended and running engines, at the present time."""
        running = [engine for _, engine in self._running()]
        for engine in running:
            engine.advance(self.now_s)
        return [*self._ended_engines, *running]

    # ---- publishes -----------------------------------------------------------

    def _publishes(self, step: int) -> None:
        """Deliver a version to every engine."""
        self._published = max(self._published, step)
        drains = self.scenario.publish.drains
        for seat, engine in self._running():
            if engine.step >= step:
                continue
            engine.advance(self.now_s)
            if drains and engine.num_sequences:
                seat.drains_for = step
                continue
            self._adopt(seat, engine, step)
            self._schedule(seat, engine)
        self._wake()

    def _adopt(self, seat: _Seat, engine: SimulatedEngine, step: int) -> None:
        law = self.scenario.publish
        engine.stall(law.pause_s, recomputes=law.recomputes)
        engine.adopt(step)
        seat.drains_for = -1
        self._wait(seat, engine)

    # ---- the account ---------------------------------------------------------

    def _cancel_dropped(self) -> None:
        """Take the ledger's events; cancel dropped groups in their engines."""
        events, _ = self.ledger.drain()
        for event in events:
            if isinstance(event, Dropped):
                under_way = self._under_way.pop(event.group_id, None)
                if under_way is not None and (engine := under_way.seat.engine) is not None:
                    engine.advance(self.now_s)
                    engine.cancel(event.group_id)
                    self._go_on(under_way.seat, engine)

    def _outcome(self) -> SimulatedRun:
        book = self.ledger.book
        engines = self._all_engines()
        return SimulatedRun(
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
            engine_seconds=self.now_s * len(self._seats),
            group_s=tuple(sorted(self._group_s)),
        )


def rules_of(scenario: Scenario) -> LedgerRules:
    """Return the ledger's rules in a scenario."""
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
        lease_s=_FOR_EVER_S,  # an engine's end is a separate event
        eval_plan=EvalPlan(sources=(), section=EvalSection()),
        staleness_target=scenario.target,
    )


def simulate(scenario: Scenario) -> SimulatedRun:
    """Return the outcome of a run of this scenario."""
    return World(scenario).run()

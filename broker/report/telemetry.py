"""Joins the roles' reports about themselves with the ledger into the state of the run."""

import logging
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping

from msgspec.structs import replace

from slipstream.broker.ledger.book import Book
from slipstream.broker.ledger.leases import name_of
from slipstream.broker.ledger.scoring_queue import ScoringQueue
from slipstream.broker.ledger.survivorship import survivorship_of
from slipstream.broker.report.bounds import MAX_CHARS, MAX_NAMES, by_phase
from slipstream.broker.report.publishes import PublishHistory, bounded_members
from slipstream.broker.report.role_record import RoleRecord
from slipstream.broker.report.staleness_report import throttle_of
from slipstream.broker.report.step_watch import StepWatch
from slipstream.broker.report.summary import means_of
from slipstream.wire.messages.broker import MANY, Hello, RoleReport
from slipstream.wire.messages.status import RoleStatus, RunStatus, StepPoint
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.messages.weightbus import MemberState, PublishRecord
from slipstream.wire.process.phases import WAIT, busy_share
from slipstream.wire.process.usage import ProcessUsage, use_of
from slipstream.wire.settings.sections import RunSection

_log = logging.getLogger(__name__)
_KEPT_STEPS = 2_000
_MAX_NOTICES = 100_000  # notices of newly ready groups; one a second at most
_GONE_S = 3_600.0


class Telemetry:
    """Everything about the run that is not the ledger's."""

    def __init__(
        self,
        run: RunSection,
        *,
        now: Callable[[], float] = time.monotonic,
        cpu_seconds: Callable[[], float] = time.process_time,
    ) -> None:
        self._run = run
        self._now = now
        self._cpu_seconds = cpu_seconds
        self._cpu_at_start_s = cpu_seconds()
        self._usage = ProcessUsage()
        self._started_s = now()
        self._training_since_s: float | None = None
        self._roles: dict[str, RoleRecord] = {}
        self._ended_tokens: Counter[str] = Counter()  # tokens of earlier incarnations, by role
        self._steps: deque[StepPoint] = deque(maxlen=_KEPT_STEPS)
        self._publishes = PublishHistory()
        self._members: list[MemberState] = []
        self._num_quarantines = 0
        # Groups that were ready at some time, in all, and when that was noticed.
        self._ready_seen: deque[tuple[int, float]] = deque(maxlen=_MAX_NOTICES)
        self._step_watch = StepWatch()
        self._told_slow = False
        self.versions: dict[str, str] = {}
        self.rejected: Counter[str] = Counter()  # malformed or refused messages by reason
        self.waiting_for = ""
        self.store_trouble: Callable[[], str] = lambda: ""  # goes before it
        self.outcome = "running"
        self.data: dict[str, int] = {}

    def hello(self, hello: Hello) -> None:
        """A role connected, for the first time or again."""
        if hello.role in {"observer", "operator"}:
            return  # they come and go, unreported
        if (before := self._roles.get(hello.name)) is not None:
            self._ended_tokens[before.hello.role] += int(before.tokens)
        now = self._now()
        # A name may hold a pid: roles that have been silent for long are no longer shown.
        # Of a learner only one is shown, and it may be silent in a long step.
        for name, record in list(self._roles.items()):
            if record.hello.role in MANY and now - record.last_message_s > _GONE_S:
                del self._roles[name]
                self._ended_tokens[record.hello.role] += int(record.tokens)
        known = replace(hello, packages={}, held=())
        self._roles[hello.name] = RoleRecord(known, now, now)
        for package, version in hello.packages.items():
            if package in self.versions or len(self.versions) < MAX_NAMES:
                self.versions[package[:MAX_CHARS]] = version[:MAX_CHARS]

    def left(self, name: str) -> None:
        """Note that a role leaves."""
        if (record := self._roles.get(name)) is not None:
            record.has_left = True

    def forget(self, name: str) -> None:
        """A connection has another name from now on."""
        if (record := self._roles.pop(name, None)) is not None:
            self._ended_tokens[record.hello.role] += int(record.tokens)

    def received_from(self, name: str) -> None:
        """A role sent anything at all."""
        if (record := self._roles.get(name)) is not None:
            record.last_message_s = self._now()

    def report(self, name: str, report: RoleReport) -> None:
        """A role's cumulative report."""
        if (record := self._roles.get(name)) is not None:
            if record.tokens_before is None:  # a broker that took over started with nothing
                known = record.hello.reconnects
                record.tokens_before = report.counters.get("tokens", 0.0) if known else 0.0
            record.report = RoleReport(
                phase_seconds=by_phase(report.phase_seconds),
                counters=by_phase(report.counters),
                adopted=report.adopted,
                gauges=by_phase(report.gauges),
                rewritten=report.rewritten,
            )

    def went_back(self, step: int) -> None:
        """A learner took over at an earlier step: later steps are discarded."""
        self._steps = deque((p for p in self._steps if p.step <= step), maxlen=_KEPT_STEPS)

    def training_began(self) -> None:
        """A learner took over: from here on throughput counts."""
        if self._training_since_s is None:
            self._training_since_s = self._now()

    def step(self, step: int, metrics: dict[str, float]) -> StepPoint:
        """A learner step was committed."""
        point = StepPoint(step=step, at_s=self._now() - self._started_s, metrics=metrics)
        self._steps.append(point)
        return point

    def published(self, record: PublishRecord) -> None:
        """Some members were brought to a version, or left out of it."""
        self._publishes.add(record)

    def quarantined(self, name: str, version: PolicyVersion, reason: str) -> None:
        """A generator's engine does not compute a version."""
        self._num_quarantines += 1
        self._publishes.add(
            PublishRecord(
                version=version, at_s=time.time(), adopted_by={}, quarantined={name: reason}
            )
        )

    def members(self, members: list[MemberState]) -> None:
        """The relay's report of each engine's version."""
        self._members = bounded_members(members)

    def notice(self, book: Book) -> None:
        """Start clocks, of newly ready groups and of the learner's step. Call it every second."""
        self._age_of_oldest_ready(book)
        now = self._now()
        state = book.state
        groups = state.batches.get(book.step, ()) if book.step in state.in_hand else ()
        self._step_watch.look(book.version, groups, now)
        slow = self._step_watch.slow(now)
        if slow is not None and not self._told_slow:
            _log.warning("%s", slow.text)
        self._told_slow = slow is not None

    def _age_of_oldest_ready(self, book: Book) -> float | None:
        """Seconds since the notice that found the oldest ready group; None without one."""
        seen, now = self._ready_seen, self._now()
        if not seen or seen[-1][0] < book.index.num_ever_ready:
            seen.append((book.index.num_ever_ready, now))
        oldest = book.index.oldest_ready
        while len(seen) > 1 and (oldest is None or seen[0][0] <= oldest):
            seen.popleft()
        return None if oldest is None else now - seen[0][1]

    def status(self, book: Book, scoring: ScoringQueue) -> RunStatus:
        """Return the state of the run."""
        now = self._now()
        rules, state = book.rules, book.state
        leases = Counter({name_of(holder): len(held) for holder, held in book.by_holder.items()})
        leases.update({name_of(h): scoring.leases_of(h) for h in scoring.holders()})
        under_way, ready = book.index.lags(book.step)
        roles = [
            self._own_status(now),
            *(record.status(now, leases[name]) for name, record in sorted(self._roles.items())),
        ]
        # A helper of another process, which reports for it, has no phases of its own.
        busy = means_of({role.role: role.busy} for role in roles if role.phase_seconds)
        rss_bytes = use_of(os.getpid()).memory_bytes
        return RunStatus(
            run_name=self._run.name,
            outcome=self.outcome,
            finished=book.over,
            stop_reason=state.stop_reason,
            elapsed_s=now - self._started_s,
            steps=book.step,
            total_steps=state.last_step,
            max_staleness_steps=rules.bound.max_staleness_steps,
            group_size=rules.group_size,
            groups_per_step=rules.bound.groups_per_step,
            issued=state.issued,
            trained=state.trained,
            sealed=state.sealed,
            requeued=state.requeued,
            dropped={str(reason): count for reason, count in state.dropped.items()},
            in_flight=book.in_flight(),
            unaccounted=book.unaccounted(),
            trajectories=book.trajectories(),
            staleness_histogram=_by_lag(state.staleness),
            survivorship=survivorship_of(
                state.lengths, state.cancelled, drops=not rules.bound.reserves
            ),
            queue=self._queue(book, scoring),
            waiting_for=self.store_trouble() or self.waiting_for,
            eval=state.eval_points,
            steps_history=list(self._steps),
            throttle=throttle_of(book.controller),
            slow_step=self._step_watch.slow(self._now()),
            publishes=self._publishes.adopted,
            publishes_while_generating=self._publishes.while_generating,
            publish_history=self._publishes.records,
            members=self._members,
            quarantines=self._num_quarantines,
            tokens_per_second=self._tokens_per_second(now),
            busy=dict(sorted(busy.items())),
            roles=roles,
            data=self.data,
            versions=dict(sorted(self.versions.items())),
            queue_age_s=self._age_of_oldest_ready(book),
            lags_in_flight=_by_lag(under_way),
            lags_in_queue=_by_lag(ready),
            memory={"store_bytes": state.untrained_bytes, "rss_bytes": rss_bytes},
        )

    def _queue(self, book: Book, scoring: ScoringQueue) -> dict[str, int]:
        """Return the counts of everything that waits, and of refused messages."""
        state, in_flight = book.state, book.in_flight()
        return {
            "ready_groups": in_flight["ready"],
            "leased_groups": in_flight["leased"],
            "waiting_for_reward": scoring.num_waiting,
            "being_scored": scoring.num_leased,
            "given_back_by_scorers": scoring.num_given_back,
            "eval_unscored": book.index.eval_unscored,
            "eval_rounds": len(state.eval_rounds),
            "lapsed_leases": state.ended_leases["lapsed"],
            "restarted_trajectories": state.restarted_trajectories,
            "dead_letters": len(state.dead_letters),
            "other_reward_parts": book.part_names.num_others,
            "rejected_messages": self.rejected.total(),
            **{f"rejected_{reason}": count for reason, count in sorted(self.rejected.items())},
        }

    def _tokens_per_second(self, now: float) -> dict[str, float]:
        since = self._training_since_s
        if since is None or now <= since:
            return {}
        tokens = self._ended_tokens.copy()
        for record in self._roles.values():
            if "tokens" in record.report.counters:
                tokens[record.hello.role] += int(record.tokens)
        return {role: count / (now - since) for role, count in sorted(tokens.items())}

    def _own_status(self, now: float) -> RoleStatus:
        """Return the status of the broker itself: one event loop, busy when on a core."""
        age = max(now - self._started_s, 1e-9)
        cpu = min(self._cpu_seconds() - self._cpu_at_start_s, age)
        phases = {"serve": cpu, WAIT: age - cpu}
        used = self._usage.gauges()
        return RoleStatus(
            name="broker",
            role="broker",
            age_s=age,
            silent_s=0.0,
            busy=busy_share(phases),
            phase_seconds=phases,
            tokens_per_second=0.0,
            cpu_cores=used.get("cpu_cores"),
            memory_bytes=used.get("memory_bytes"),
        )


def with_newest_steps(status: RunStatus, newest_steps: int) -> RunStatus:
    """Return a status with the newest learner steps only; -1 is all of them."""
    if newest_steps < 0:
        return status
    first = max(0, len(status.steps_history) - newest_steps)
    return replace(status, steps_history=status.steps_history[first:])


def _by_lag(counts: Mapping[int, int]) -> dict[str, int]:
    return {str(lag): count for lag, count in sorted(counts.items())}

"""A run as spans and marks on a time line, and as trace events that Perfetto and Chrome draw. Pure.

The trace event format has complete events (``X``) on lanes, counters (``C``), instants (``i``) and
names (``M``). Lanes of the learner and of the generators come from the trail, publishes from the
summary, curves of how busy each process was from the page's history.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from slipstream.broker.history.columns import HistoryColumns
from slipstream.broker.ledger.events import (
    Dropped,
    Generated,
    Issued,
    Leased,
    LeaseEnded,
    LedgerEvent,
    Requeued,
    Sealed,
    TakenOver,
    Trained,
    Unbound,
)
from slipstream.broker.ledger.leases import name_of
from slipstream.wire.messages.trajectory import TrajectoryHeader
from slipstream.wire.messages.weightbus import PUBLISH_PHASES, PublishRecord
from slipstream.wire.process.phases import PHASE_TIME, WAIT

_PROMPT_CHARS = 80
_MOST_TURNS = 64  # turns of a trajectory with listed tokens
_COUNT_EVERY_S = 0.5  # shortest time between two counters
_LEARNER, _BUS, _BROKER = "learner", "weight bus", "broker"
_FIRST = {_LEARNER: 0, _BUS: 1, _BROKER: 2}  # generators come next
_PHASES = ("commit", "export", "checkpoint", WAIT, "fetch", "pack", "proximal", "train")
Json: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TimelineSpan:
    """Activity with a duration."""

    process: str
    lane: str
    name: str
    start_s: float  # unix time
    end_s: float
    args: Json = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Mark:
    """Event at a moment, or counts at that moment."""

    process: str
    name: str
    at_s: float
    counts: Json | None = None


# ---- from the trail ----------------------------------------------------------


@dataclass(slots=True)
class _Lease:
    """A lease that has not ended."""

    group_id: int
    process: str
    lane: int
    start_s: float
    args: Json
    tokens: int = 0


@dataclass(slots=True)
class _Item:
    """A group with missing siblings."""

    prompt: str
    missing: set[int]
    lease_id: int = -1


class TrailReader:
    """Turns events in their order into spans; keeps no more than the newest."""

    def __init__(self, *, max_spans: int) -> None:
        self.spans: deque[TimelineSpan] = deque(maxlen=max_spans)
        self.marks: deque[Mark] = deque(maxlen=max_spans)
        self.num_cut = 0
        self._now_s = 0.0
        self._items: dict[int, _Item] = {}
        self._leases: dict[int, _Lease] = {}
        self._lanes: dict[str, set[int]] = {}  # process -> taken lanes
        self._free_s: float | None = None  # time when the learner finished its last step
        self._counted_s = 0.0

    def add(self, at_s: float, event: LedgerEvent) -> None:
        """Process the next event; time never goes back, even if the clock does."""
        self._now_s = max(self._now_s, at_s)
        match event:
            case Issued() | Requeued():
                missing = set(range(event.size))
                self._items[event.group_id] = _Item(event.prompt.text[:_PROMPT_CHARS], missing)
            case Leased():
                self._begin(event)
            case Generated(header=header):
                if (item := self._items.get(header.group_id)) is not None:
                    item.missing.discard(header.sibling)
                    if (lease := self._leases.get(item.lease_id)) is not None:
                        self._add_trajectory(lease, header)
                    if not item.missing:
                        self._end(item.lease_id, "complete")
                        del self._items[header.group_id]
            case LeaseEnded(lease_id=lease_id, reason=reason):
                self._end(lease_id, reason)
            case Dropped(group_id=group_id, reason=reason):
                if (item := self._items.pop(group_id, None)) is not None:
                    self._end(item.lease_id, f"dropped: {reason}")
            case _:
                self._record_learner(event)
        if self._now_s - self._counted_s >= _COUNT_EVERY_S:
            self._counted_s = self._now_s
            if counts := {name: len(taken) for name, taken in sorted(self._lanes.items())}:
                self.marks.append(Mark(_BROKER, "leases", self._now_s, counts))

    def _record_learner(self, event: LedgerEvent) -> None:
        match event:
            case TakenOver(version=version):
                self._mark(_LEARNER, f"took over as {version.label}")
                self._free_s = self._now_s
            case Unbound(step=step):
                self._mark(_LEARNER, f"the batch of step {step} was taken apart")
            case Trained(version=version, metrics=metrics):
                start_s = self._free_s if self._free_s is not None else self._now_s
                args = {"version": version.label, **metrics}
                name = f"step {version.step - 1}"
                self._keep(TimelineSpan(_LEARNER, "step", name, start_s, self._now_s, args))
                for span in phase_spans(start_s, self._now_s, metrics):
                    self._keep(span)
                self._free_s = self._now_s
            case Sealed(step=step):
                self._mark(_LEARNER, f"a checkpoint holds step {step}")
            case _:
                pass  # scores, evaluations, letters have no lane

    def close(self) -> None:
        """End open spans at the last event."""
        for lease_id in list(self._leases):
            self._end(lease_id, "still held")

    def _begin(self, event: Leased) -> None:
        process = name_of(event.holder)
        taken = self._lanes.setdefault(process, set())
        lane = next(number for number in range(len(taken) + 1) if number not in taken)
        taken.add(lane)
        args: Json = {"lease": event.lease_id, "adopted_step": event.adopted_step}
        if (item := self._items.get(event.group_id)) is not None:
            item.lease_id = event.lease_id
            args |= {"prompt": item.prompt, "siblings": len(item.missing)}
        lease = _Lease(event.group_id, process, lane, self._now_s, args)
        self._leases[event.lease_id] = lease

    def _end(self, lease_id: int, why: str) -> None:
        if (lease := self._leases.pop(lease_id, None)) is None:
            return
        self._lanes[lease.process].discard(lease.lane)
        args = {**lease.args, "tokens": lease.tokens, "ended": why}
        name, lane = f"g{lease.group_id}", f"lease {lease.lane:03d}"
        self._keep(TimelineSpan(lease.process, lane, name, lease.start_s, self._now_s, args))

    def _add_trajectory(self, lease: _Lease, header: TrajectoryHeader) -> None:
        """Count a finished sibling; several turns become a span within the lease's span."""
        lease.tokens += header.num_response_tokens
        lease.args["version"] = header.oldest_version.label
        if not header.turns:
            return
        turns, branches = len(header.turns), 1 + len(header.branches)
        lease.args["turns"] = lease.args.get("turns", 0) + turns
        args = {
            "turns": turns,
            "branches": branches,
            "tokens_by_turn": [turn.num_tokens for turn in header.turns[:_MOST_TURNS]],
            "context_tokens": header.num_tokens - header.num_response_tokens,
            "versions": list(dict.fromkeys(v.label for v, _ in header.tokens_by_version())),
            "ended": header.finish_reason,
        }
        name = f"g{header.group_id}/{header.sibling}: {turns} turns"
        lane = f"lease {lease.lane:03d}"
        self._keep(TimelineSpan(lease.process, lane, name, lease.start_s, self._now_s, args))

    def _keep(self, span: TimelineSpan) -> None:
        self.num_cut += len(self.spans) == self.spans.maxlen
        self.spans.append(span)

    def _mark(self, process: str, name: str) -> None:
        self.marks.append(Mark(process, name, self._now_s))


def phase_spans(
    start_s: float, end_s: float, metrics: Mapping[str, float]
) -> Iterator[TimelineSpan]:
    """Yield the learner's phases between two commits, a lane per phase.

    The learner reports its time in each phase, and is always in one phase. Phases that alternate
    within a step, such as minibatches, are drawn as one span each, in the order of their start.
    """
    told = {
        name.removeprefix(PHASE_TIME): seconds
        for name, seconds in metrics.items()
        if name.startswith(PHASE_TIME) and seconds > 0
    }
    order = [*_PHASES, *sorted(told.keys() - set(_PHASES))]
    for name in order:
        if name in told and start_s < end_s:
            until_s = min(start_s + told[name], end_s)
            yield TimelineSpan(_LEARNER, name, name, start_s, until_s)
            start_s = until_s


# ---- from the summary --------------------------------------------------------


def publish_spans(records: Iterable[PublishRecord]) -> Iterator[TimelineSpan]:
    """Yield each publish with its phases, and the arrivals at each generator.

    Overlapping publishes get separate lanes.
    """
    busy_until: dict[str, list[float]] = {}

    def lane_of(process: str, start_s: float, end_s: float) -> str:
        ends = busy_until.setdefault(process, [])
        free = (number for number, until_s in enumerate(ends) if until_s <= start_s)
        number = next(free, len(ends))
        ends[number:] = [end_s, *ends[number + 1 :]]
        return f"publish {number}" if process == _BUS else f"weights {number}"

    for record in sorted(records, key=lambda one: one.at_s):
        phases = [name for name in PUBLISH_PHASES if name in record.phase_seconds]
        start_s = record.at_s
        end_s = start_s + sum(record.phase_seconds[name] for name in phases)
        lane, label = lane_of(_BUS, start_s, end_s), record.version.label
        args: Json = {"bytes": record.num_bytes, "digest": record.digest, "failed": record.failed}
        yield TimelineSpan(_BUS, lane, label, start_s, end_s, args)
        for name in phases:
            until_s = min(start_s + record.phase_seconds[name], end_s)
            yield TimelineSpan(_BUS, lane, name, start_s, until_s)
            start_s = until_s
        for member, seconds in sorted(record.adopted_by.items()):
            until_s = record.at_s + seconds
            args = {"transport": record.transports.get(member, "")}
            lane = lane_of(member, record.at_s, until_s)
            yield TimelineSpan(member, lane, label, record.at_s, until_s, args)


# ---- from the history of the page --------------------------------------------

_CURVES = {
    "busy": "busy",
    "acted": "environments answer, engine idle",  # share of the time of each generator
    "queue": "queues",
    "tokens": "tokens per second",
}
_ACTING = "acting"  # trajectories, of all generators


def history_marks(history: HistoryColumns) -> Iterator[Mark]:
    """Yield counters of each process's activity over time, and of queues."""
    for prefix, title in _CURVES.items():
        named = {
            name.partition(":")[2]: column
            for name, column in sorted(history.time.series.items())
            if name.startswith(f"{prefix}:")
        }
        for row, at_s in enumerate(history.time.at_s):
            values = {name: column[row] for name, column in named.items()}
            known = {name: value for name, value in values.items() if value is not None}
            if known:
                yield Mark(_BROKER, title, history.began_s + at_s, known)
    for at_s, count in zip(history.time.at_s, history.time.series.get(_ACTING, ()), strict=False):
        if count is not None:
            counts = {"trajectories": count}
            yield Mark(_BROKER, "in environments", history.began_s + at_s, counts)


# ---- the file ----------------------------------------------------------------


def trace_events(spans: Sequence[TimelineSpan], marks: Sequence[Mark]) -> Iterator[Json]:
    """Yield the events of the file; times are microseconds since the first of them."""
    zero_s = min(span.start_s for span in spans)
    processes = {span.process for span in spans} | {mark.process for mark in marks}
    by_name = sorted(processes, key=lambda name: (_FIRST.get(name, len(_FIRST)), name))
    pids = {name: number for number, name in enumerate(by_name, start=1)}

    def lane_order(lane: tuple[str, str]) -> tuple[str, bool, int, str]:
        # The many leases of a generator come below its other lanes, phases in their order.
        process, name = lane
        place = _PHASES.index(name) if process == _LEARNER and name in _PHASES else -1
        return process, name.startswith("lease"), place, name

    lanes = sorted({(span.process, span.lane) for span in spans}, key=lane_order)
    tids = {pair: number for number, pair in enumerate(lanes, start=1)}
    for name, pid in pids.items():
        yield _named("process_name", pid, 0, name=name)
        yield _named("process_sort_index", pid, 0, sort_index=pid)
    for (process, lane), tid in tids.items():
        yield _named("thread_name", pids[process], tid, name=lane)
        yield _named("thread_sort_index", pids[process], tid, sort_index=tid)
    for span in spans:
        start_us = _microseconds(span.start_s - zero_s)
        yield {
            "ph": "X",
            "name": span.name,
            "cat": span.lane.partition(" ")[0],
            "pid": pids[span.process],
            "tid": tids[span.process, span.lane],
            "ts": start_us,
            "dur": _microseconds(span.end_s - zero_s) - start_us,
            "args": span.args,
        }
    for mark in marks:
        if mark.at_s < zero_s:
            continue  # its spans were cut
        at_us = _microseconds(mark.at_s - zero_s)
        event: Json = {"name": mark.name, "pid": pids[mark.process], "tid": 0, "ts": at_us}
        if mark.counts is None:
            yield {**event, "ph": "i", "s": "p"}
        else:
            yield {**event, "ph": "C", "args": mark.counts}


def _named(what: str, pid: int, tid: int, **args: Any) -> Json:  # noqa: ANN401 text or a number
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)

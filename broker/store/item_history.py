"""The life of one item, put together from the trail of events."""

from collections.abc import Iterable
from pathlib import Path

import msgspec

from slipstream.broker.ledger.events import (
    Delivered,
    Dropped,
    Evicted,
    Generated,
    Issued,
    Leased,
    LeaseEnded,
    LedgerEvent,
    Requeued,
    Scored,
    ScoringFailed,
    Sealed,
    TakenOver,
    Trained,
    Unbound,
    decode_event,
)
from slipstream.broker.ledger.leases import name_of
from slipstream.broker.store.event_log import read_segments, read_trail, segments_in

_PROMPT_CHARS = 4_000


class Moment(msgspec.Struct, frozen=True):
    """Something happened to the item."""

    at_s: float  # unix time
    what: str


class ItemTrace(msgspec.Struct, kw_only=True):
    """All that the trail knows of one item."""

    group_id: int
    position: int
    prompt: str
    outcome: str = "on its way"
    life: list[Moment] = []
    others: list[int] = []  # groups of the same prompt


def trace_item(trail: Iterable[tuple[int, float, bytes]], wanted: str) -> ItemTrace | None:
    """Return the newest item that fits, or None.

    Args:
        trail: (number, unix time, event) in order.
        wanted: a position in the data (``17``), a group (``g17``), or a piece of the prompt.
    """
    follower = _Follower(wanted)
    for _, at_s, data in trail:
        follower.apply(at_s, decode_event(data))
    return follower.newest


def trace_group(folder: Path, group_id: int) -> ItemTrace | None:
    """Return a group, or None; reads only the events since it was issued."""
    segments = segments_in(folder)
    for place in range(len(segments) - 1, -1, -1):
        events = (decode_event(data) for _, _, data in read_segments([segments[place]]))
        issued = (event.group_id for event in events if isinstance(event, Issued | Requeued))
        first = next(issued, None)
        if first is not None and first <= group_id:
            return trace_item(read_segments(segments[place:]), f"g{group_id}")
    return None  # the rest of the trail starts after it was issued


def groups_at(folder: Path, position: int) -> frozenset[int]:
    """Return the groups that were issued for training from a position in the data."""
    found = set()
    for _, _, data in read_trail(folder):
        match decode_event(data):
            case Issued(item="train", cursor=cursor, group_id=group_id) if cursor == position:
                found.add(group_id)
            case Requeued(position=there, group_id=group_id) if there == position:
                found.add(group_id)
            case _:
                pass
    return frozenset(found)


class _Follower:
    """Reads events in order and keeps the ones of matching items."""

    def __init__(self, wanted: str) -> None:
        self._wanted = wanted
        self._items: dict[int, ItemTrace] = {}
        self._of_lease: dict[int, int] = {}  # lease -> group
        self._bound: dict[int, int] = {}  # group -> learner step whose batch it is in
        self._trained: set[int] = set()  # groups whose step is committed and not sealed
        self._gone: set[int] = set()  # groups whose payload is kept no longer
        self.newest: ItemTrace | None = None

    def _fits(self, event: Issued) -> bool:
        wanted = self._wanted
        if wanted.isdecimal():
            return event.item == "train" and event.cursor == int(wanted)
        if wanted[:1] == "g" and wanted[1:].isdecimal():
            return event.group_id == int(wanted[1:])
        return wanted in event.prompt.text

    def apply(self, at_s: float, event: LedgerEvent) -> None:
        """Apply the next event."""
        match event:
            case Issued():
                if self._fits(event):
                    evaluation = f"the evaluation of step {event.eval_step}"
                    purpose = "training" if event.item == "train" else evaluation
                    self._begin(at_s, event, event.cursor, f"issued for {purpose}")
            case Requeued(group_id=group_id, of=old):
                if (item := self._items.pop(old, None)) is not None:
                    item.group_id = group_id
                    self._items[group_id] = item
                    self._note(at_s, group_id, f"to be answered again, as g{group_id}")
                elif self._wanted == f"g{group_id}":
                    self._begin(at_s, event, event.position, f"the prompt of g{old} again")
            case Leased(lease_id=lease_id, group_id=group_id, holder=holder):
                self._of_lease[lease_id] = group_id
                running = f"which runs step {event.adopted_step}"
                self._note(at_s, group_id, f"leased to {name_of(holder)}, {running}")
            case LeaseEnded(lease_id=lease_id, reason=reason):
                self._note(at_s, self._of_lease.pop(lease_id, -1), f"lease ended: {reason}")
            case Generated(header=header):
                versions = ", ".join(
                    f"{count} tokens by {version.label}"
                    for version, count in header.tokens_by_version()
                )
                self._note(
                    at_s,
                    header.group_id,
                    f"sibling {header.sibling}: {versions} ({header.finish_reason})",
                )
            case Scored(score=score):
                by = f" by {score.function}" if score.function else ""
                self._note(
                    at_s, score.group_id, f"sibling {score.sibling}: reward {score.reward:g}{by}"
                )
            case ScoringFailed(group_id=group_id, sibling=sibling, reason=reason):
                self._note(at_s, group_id, f"sibling {sibling}: no reward ({reason})")
            case Dropped(group_id=group_id, reason=reason):
                self._note(at_s, group_id, f"dropped: {reason}", outcome=f"dropped ({reason})")
            case _:
                self._hear_learner(at_s, event)

    def _hear_learner(self, at_s: float, event: LedgerEvent) -> None:
        match event:
            case Delivered(step=step, group_ids=group_ids):
                for group_id in self._items.keys() & set(group_ids):
                    self._bound[group_id] = step
                    self._note(at_s, group_id, f"in the batch of step {step}")
            case Unbound(step=step):
                for group_id in self._in_step(step):
                    del self._bound[group_id]
                    self._note(at_s, group_id, f"the batch of step {step} was taken apart")
            case Trained(version=version):
                for group_id in self._in_step(version.step - 1):
                    self._trained.add(group_id)
                    done = f"trained by the step that made {version.label}"
                    self._note(at_s, group_id, done, outcome=done)
            case TakenOver(version=version, checkpoint=checkpoint):
                source = f" ({checkpoint})" if checkpoint else ""
                for group_id in [g for g, s in self._bound.items() if s >= version.step]:
                    self._trained.discard(group_id)
                    again = f"a learner went back to step {version.step}{source}"
                    self._note(at_s, group_id, again, outcome="on its way")
                    if group_id in self._gone:
                        del self._bound[group_id]
            case _:
                self._hear_keeping(at_s, event)

    def _hear_keeping(self, at_s: float, event: LedgerEvent) -> None:
        match event:
            case Evicted(step=step):
                for group_id in self._in_step(step):
                    self._gone.add(group_id)
                    self._note(at_s, group_id, "its payload is kept no longer (replay budget)")
            case Sealed(step=step):
                for group_id in [g for g in self._trained if self._bound[g] < step]:
                    self._trained.discard(group_id)
                    self._gone.add(group_id)
                    self._note(at_s, group_id, f"sealed by the checkpoint of step {step}")
            case _:
                pass  # evaluations and the end of the run

    def _in_step(self, step: int) -> list[int]:
        return [group_id for group_id, bound in self._bound.items() if bound == step]

    def _begin(self, at_s: float, event: Issued | Requeued, position: int, what: str) -> None:
        others = [item.group_id for item in self._items.values() if item.position == position]
        item = ItemTrace(
            group_id=event.group_id,
            position=position,
            prompt=event.prompt.text[:_PROMPT_CHARS],
            life=[],
            others=others,
        )
        self._items[event.group_id] = self.newest = item
        self._note(at_s, event.group_id, what)

    def _note(self, at_s: float, group_id: int, what: str, *, outcome: str = "") -> None:
        if (item := self._items.get(group_id)) is not None:
            item.life.append(Moment(at_s, what))
            item.outcome = outcome or item.outcome

"""Outcomes of published versions, as the relay reported them."""

from collections import deque
from collections.abc import Sequence
from itertools import islice

from msgspec.structs import replace

from slipstream.broker.report.bounds import (
    MAX_CHARS,
    MAX_REASON_CHARS,
    by_phase,
    figures,
    moment,
    texts,
)
from slipstream.wire.messages.weightbus import MemberState, PublishRecord, merged

MAX_PUBLISHES = 200
MAX_MEMBERS = 4_096  # members of a publish, and at a time
MAX_KEPT_MEMBERS = 20_000  # members of all publishes together


class PublishHistory:
    """The newest publishes, and how many there ever were."""

    def __init__(self, max_members: int = MAX_MEMBERS) -> None:
        self._max_members = max_members
        self._records: deque[PublishRecord] = deque()
        self._forgotten = 0
        self._forgotten_while_generating = 0

    @property
    def records(self) -> list[PublishRecord]:
        """Newest publishes, the oldest first."""
        return list(self._records)

    @property
    def adopted(self) -> int:
        """Number of versions that at least one engine adopted."""
        return self._forgotten + sum(map(_adopted, self._records))

    @property
    def while_generating(self) -> int:
        """Number of these adopted while an engine was generating."""
        return self._forgotten_while_generating + sum(map(_while_generating, self._records))

    def add(self, record: PublishRecord) -> None:
        """Some members were brought to a version, or left out of it."""
        for index in reversed(range(len(self._records))):
            if self._records[index].version == record.version:
                self._records[index] = self._bounded(merged((self._records[index], record)))
                break
        else:
            self._records.append(self._bounded(record))
        kept = newest(self._records, most=MAX_PUBLISHES, most_members=MAX_KEPT_MEMBERS)
        while len(self._records) > len(kept):
            oldest = self._records.popleft()
            self._forgotten += _adopted(oldest)
            self._forgotten_while_generating += _while_generating(oldest)

    def _bounded(self, record: PublishRecord) -> PublishRecord:
        """Return a record without more members, or longer texts, than there can be."""
        return replace(
            record,
            at_s=moment(record.at_s),
            adopted_by=figures(record.adopted_by, most=self._max_members),
            failed=texts(record.failed, most=self._max_members),
            num_in_flight=figures(record.num_in_flight, most=self._max_members),
            digest=record.digest[:MAX_CHARS],
            engine_digests=texts(record.engine_digests, most=self._max_members),
            phase_seconds=by_phase(record.phase_seconds),
            num_bytes=figures({"": record.num_bytes}).get("", 0),
            fetched_bytes=figures(record.fetched_bytes, most=self._max_members),
            transports={
                name[:MAX_CHARS]: how
                for name, how in islice(record.transports.items(), self._max_members)
            },
            quarantined=texts(record.quarantined, most=self._max_members),
        )


def newest(
    records: Sequence[PublishRecord], *, most: int, most_members: int
) -> Sequence[PublishRecord]:
    """Return the last records, with at most so many members in all, but at least one record."""
    kept: deque[PublishRecord] = deque()
    for record in islice(reversed(records), most):
        named = (
            record.transports,
            record.adopted_by,
            record.failed,
            record.engine_digests,
            record.quarantined,
        )
        most_members -= max(len(members) for members in (*named, record.num_in_flight))
        if kept and most_members < 0:
            break
        kept.appendleft(record)
    return kept


def bounded_members(members: Sequence[MemberState]) -> list[MemberState]:
    """Return no more members, and no longer texts, than there can be."""
    return [
        replace(
            member,
            name=member.name[:MAX_CHARS],
            since_s=moment(member.since_s),
            reason=member.reason[:MAX_REASON_CHARS],
        )
        for member in members[:MAX_MEMBERS]
    ]


def _adopted(record: PublishRecord) -> bool:
    return bool(record.adopted_by)


def _while_generating(record: PublishRecord) -> bool:
    return bool(record.adopted_by) and any(record.num_in_flight.values())

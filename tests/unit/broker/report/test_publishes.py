"""What is kept of publishes: joined by version, bounded, and never counted less."""

import json
import math

import msgspec
import pytest

from slipstream.broker.report.bounds import figures, moment, texts
from slipstream.broker.report.publishes import (
    MAX_KEPT_MEMBERS,
    MAX_MEMBERS,
    MAX_PUBLISHES,
    PublishHistory,
    newest,
)
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.messages.weightbus import PublishRecord


def record(step: int, *names: str, **fields: object) -> PublishRecord:
    return PublishRecord(
        version=PolicyVersion(1, step),
        at_s=float(step),
        adopted_by=dict.fromkeys(names, 0.1),
        transports=dict.fromkeys(names, "tcp"),
        **fields,  # type: ignore[arg-type]
    )


def history(*records: PublishRecord, max_members: int = MAX_MEMBERS) -> PublishHistory:
    kept = PublishHistory(max_members)
    for one in records:
        kept.add(one)
    return kept


def steps(kept: PublishHistory) -> list[int]:
    return [one.version.step for one in kept.records]


def test_members_of_one_version_share_a_record_even_when_they_come_late():
    kept = history(
        record(0, "a", engine_digests={"a": "d"}, num_bytes=16),
        record(1, "a"),
        record(0, "b", engine_digests={"b": "d"}, num_bytes=16),
    )
    assert steps(kept) == [0, 1]
    first = kept.records[0]
    assert first.adopted_by.keys() == first.transports.keys() == {"a", "b"}
    assert first.engine_digests == {"a": "d", "b": "d"}
    assert (first.at_s, first.num_bytes, kept.adopted) == (0.0, 16, 2)


def test_a_member_that_was_left_out_and_then_served_alone_adopted_by_the_second_way():
    together = PublishRecord(
        version=PolicyVersion(1, 3),
        at_s=0.0,
        adopted_by={},
        failed={"a": "gone", "b": "late"},
        transports={"a": "collective", "b": "collective"},
    )
    kept = history(together, record(3, "a"))
    (only,) = kept.records
    assert only.failed == {"b": "late"}
    assert only.transports == {"a": "tcp", "b": "collective"}


def test_a_phase_lasts_as_long_as_for_the_slowest():
    kept = history(
        record(3, "a", phase_seconds={"offer": 0.5, "transfer": 1.0}),
        record(3, "b", phase_seconds={"offer": 0.25, "receive": 2.0}),
    )
    assert kept.records[0].phase_seconds == {"offer": 0.5, "transfer": 1.0, "receive": 2.0}


def test_a_version_counts_once_somebody_adopted_it_also_when_it_is_forgotten():
    kept = history(
        *(record(step, "a", num_in_flight={"a": step % 2}) for step in range(MAX_PUBLISHES)),
        record(MAX_PUBLISHES),
        *(record(MAX_PUBLISHES + step, "a") for step in range(1, 11)),
    )
    assert steps(kept) == list(range(11, MAX_PUBLISHES + 11))
    assert kept.adopted == MAX_PUBLISHES + 10
    assert kept.while_generating == MAX_PUBLISHES // 2


def test_fewer_publishes_of_a_large_fleet_are_kept():
    fleet = [f"generator-{i}" for i in range(MAX_MEMBERS)]
    kept = history(*(record(step, *fleet) for step in range(9)))
    assert steps(kept) == [5, 6, 7, 8]
    assert sum(len(one.adopted_by) for one in kept.records) <= MAX_KEPT_MEMBERS
    assert kept.adopted == 9


def test_the_newest_one_is_kept_however_large_it_is():
    large = [record(0, "a", "b", "c"), record(1, "a", "b", "c")]
    assert list(newest(large, most=9, most_members=2)) == large[1:]
    assert list(newest(large, most=9, most_members=6)) == large
    assert list(newest(large, most=1, most_members=6)) == large[1:]
    assert list(newest([], most=9, most_members=6)) == []


WRONG = {"transfer": -1.0, "[/x]": 1.0, "a\x1b": 1.0, "Load": 1.0}  # figures, names


def test_publish_record_of_a_relay_is_bounded_and_serializable():
    names = [f"{i}" + "n" * 999 for i in range(2 * MAX_MEMBERS)]
    hostile = PublishRecord(
        version=PolicyVersion(1, 1),
        at_s=math.nan,
        adopted_by=dict.fromkeys(names, 0.1) | {"nan": math.nan, "inf": math.inf},
        failed=dict.fromkeys(names, "w" * 9_999),
        num_in_flight=dict.fromkeys(names, 2**63),
        engine_digests=dict.fromkeys(names, "d" * 9_999),
        phase_seconds=dict.fromkeys(names, 0.1) | {f"p{i}": 1.0 for i in range(999)} | WRONG,
        num_bytes=-5,
        transports=dict.fromkeys(names, "disk"),
    )
    (kept,) = history(hostile).records
    assert (kept.at_s, kept.num_bytes, kept.num_in_flight) == (0.0, 0, {})
    named = (kept.adopted_by, kept.failed, kept.engine_digests, kept.transports)
    assert {len(one) for one in named} == {MAX_MEMBERS}
    assert {len(name) for one in named for name in one} == {100}
    assert {len(text) for text in (*kept.failed.values(), *kept.engine_digests.values())} == {500}
    assert len(kept.phase_seconds) == 256
    assert not kept.phase_seconds.keys() & {*WRONG, *names}
    json.dumps(msgspec.to_builtins(kept), allow_nan=False)


def test_many_records_of_one_version_take_no_more_room_than_one():
    kept = history(*(record(1, f"generator-{i}") for i in range(9)), max_members=4)
    assert len(kept.records[0].adopted_by) == 4


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, -1.0, 1e16])
def test_what_is_no_figure_is_passed_over(wrong: float):
    assert figures({"a": 1.0, "b": wrong}) == {"a": 1.0}
    assert moment(wrong) == 0.0


def test_texts_and_times_are_kept_as_they_are_where_they_can_be_read():
    assert texts({"a": "why", "b": "not"}, most=1) == {"a": "why"}
    assert moment(1.7e9) == 1.7e9

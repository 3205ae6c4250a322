"""Records of publishes on their way to the broker."""

import asyncio

from slipstream.weightbus.net.traffic import Traffic
from slipstream.weightbus.relay import reports
from slipstream.weightbus.relay.reports import BrokerReports
from slipstream.wire.messages.codec import decode_command, encode, encode_manifest
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.messages.weightbus import EncodedReceive, PublishRecord, ReceiveVersion, merged
from slipstream.wire.settings.sections import RunSection
from tests.support.wire_samples import MANIFEST


def record(step: int, name: str, *, why: str = "") -> PublishRecord:
    return PublishRecord(
        version=PolicyVersion(1, step),
        at_s=float(step),
        adopted_by={} if why else {name: 1.0},
        failed={name: why} if why else {},
        num_in_flight={name: 2},
        digest="" if why else "d",
        engine_digests={name: "e"},
        phase_seconds={"receive": 1.0 if why else 3.0},
        num_bytes=7,
        transports={name: "tcp"},
    )


def kept(*records: PublishRecord) -> BrokerReports:
    made = BrokerReports(RunSection(), Traffic())

    async def keep() -> None:
        for one in records:
            await made.keep(one)

    asyncio.run(keep())
    return made


def test_records_of_one_version_are_one():
    joined = merged([record(1, "a", why="late"), record(1, "b"), record(1, "a")])
    assert joined == PublishRecord(
        version=PolicyVersion(1, 1),
        at_s=1.0,
        adopted_by={"a": 1.0, "b": 1.0},
        num_in_flight={"a": 2, "b": 2},
        digest="d",
        engine_digests={"a": "e", "b": "e"},
        phase_seconds={"receive": 3.0},
        num_bytes=7,
        transports={"a": "tcp", "b": "tcp"},
    )


def test_a_thousand_members_are_one_record_and_an_older_version_another():
    found = kept(record(0, "a"), *(record(1, f"g{index}") for index in range(1_000)))
    assert [len(one) for one in found._records] == [1, 1_000]
    assert len(merged(found._records[1]).adopted_by) == 1_000


def test_retries_without_a_broker_take_bounded_memory():
    found = kept(*(record(1, "a", why=str(index)) for index in range(3_000)))
    (of_version,) = found._records
    assert len(of_version) <= reports._MAX_RECORDS + 1
    assert merged(of_version).failed == {"a": "2999"}
    versions = kept(*(record(step, "a") for step in range(1_200)))
    assert len(versions._records) == reports._MAX_RECORDS
    assert versions._num_lost_records == 200


def test_a_receive_that_is_encoded_for_all_members_is_a_receive():
    plain = ReceiveVersion(command_id=4, manifest=MANIFEST, path="/weights/v2.5", is_checked=True)
    encoded = EncodedReceive(
        command_id=4, manifest=encode_manifest(MANIFEST), path="/weights/v2.5", is_checked=True
    )
    assert encode(encoded) == encode(plain)
    assert decode_command(encode(encoded)) == plain

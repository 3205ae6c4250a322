"""Bytes that an installed version of this wire revision sends are read, and written, as ever."""

from typing import get_args

import msgspec
import pytest

from slipstream.wire.errors import ProtocolError
from slipstream.wire.messages import broker, followers, part_relays, relay, weightbus
from slipstream.wire.messages.broker import WIRE_REVISION
from slipstream.wire.messages.codec import decode_answer, decode_request, encode
from tests.golden.make_wire import FOLDER, READABLE, TODAY, golden_files, readable
from tests.support.wire_samples import (
    AGENT_MESSAGES,
    ANSWERS,
    COMMANDS,
    DECODERS,
    FAMILIES,
    HEAD_COMMANDS,
    PART_REPORTS,
    RELAY_ANSWERS,
    RELAY_REQUESTS,
    REQUESTS,
    TO_FOLLOWER,
    TO_LEADER,
)

CHANGED = (
    "the wire format is not what it was: if that is meant, raise WIRE_REVISION in "
    "wire/messages/broker.py, run `python -m tests.golden.make_wire`, and note in CHANGELOG.md "
    "under Wire what changed; "
    "docs/wire.md states what may change without a new revision"
)
SAMPLES = [(family, name) for family, samples in FAMILIES.items() for name in samples]
CONTROL = [(family, name) for family, name in SAMPLES if family not in {"payload", "transcript"}]


def golden(family: str, name: str) -> bytes:
    path = TODAY / f"{family}.{name}.msgpack"
    assert path.exists(), f"{path.name} is missing: run `python -m tests.golden.make_wire`"
    return path.read_bytes()


def test_there_is_a_folder_for_todays_revision_and_no_file_in_it_is_left_over():
    assert TODAY.is_dir(), f"run `python -m tests.golden.make_wire`; {CHANGED}"
    expected = {*golden_files(), READABLE}
    assert {path.name for path in TODAY.iterdir()} == expected, CHANGED
    assert (TODAY / READABLE).read_text() == readable(), CHANGED


def test_the_bytes_of_no_other_revision_are_kept():
    revisions = [int(path.name.removeprefix("revision-")) for path in FOLDER.glob("revision-*")]
    assert revisions == [WIRE_REVISION], "nothing reads the bytes of another revision"


@pytest.mark.parametrize(("family", "name"), SAMPLES)
def test_golden_bytes_are_read_as_what_was_sent(family: str, name: str):
    got = DECODERS[family](golden(family, name))
    assert msgspec.to_builtins(got) == msgspec.to_builtins(FAMILIES[family][name]), CHANGED
    assert type(got) is type(FAMILIES[family][name]), CHANGED


@pytest.mark.parametrize(("family", "name"), SAMPLES)
def test_what_is_sent_today_is_golden(family: str, name: str):
    assert encode(FAMILIES[family][name]) == golden(family, name), CHANGED


def test_every_kind_of_message_has_golden_bytes():
    for union, samples in [
        (broker.Request, REQUESTS),
        (broker.Answer, ANSWERS),
        (weightbus.Command, COMMANDS),
        (weightbus.AgentMessage, AGENT_MESSAGES),
        (relay.RelayRequest, RELAY_REQUESTS),
        (relay.RelayAnswer, RELAY_ANSWERS),
        (part_relays.PartReport, PART_REPORTS),
        (part_relays.HeadCommand, HEAD_COMMANDS),
        (followers.ToLeader, TO_LEADER),
        (followers.ToFollower, TO_FOLLOWER),
    ]:
        assert {type(sample) for sample in samples} == set(get_args(union))


OPTIONAL = [
    (family, name, field)
    for family, name in CONTROL
    for field in msgspec.structs.fields(FAMILIES[family][name])
    if not field.required and field.default is not msgspec.UNSET  # not sent where it is unset
]


def test_a_message_of_before_a_field_was_added_has_its_default():
    for family, name, field in OPTIONAL:
        default = (
            field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
        )
        raw = msgspec.msgpack.decode(golden(family, name), strict=False)
        del raw[field.encode_name]
        sample = FAMILIES[family][name]
        expected = msgspec.structs.replace(sample, **{field.name: default})
        assert DECODERS[family](msgspec.msgpack.encode(raw)) == expected


@pytest.mark.parametrize(("family", "name"), CONTROL)
def test_a_field_of_a_newer_version_is_passed_over(family: str, name: str):
    raw = msgspec.msgpack.decode(golden(family, name)) | {"a_field_of_tomorrow": {"x": [1, None]}}
    assert DECODERS[family](msgspec.msgpack.encode(raw)) == FAMILIES[family][name]


@pytest.mark.parametrize(("family", "name"), CONTROL)
def test_a_required_field_is_required(family: str, name: str):
    raw = msgspec.msgpack.decode(golden(family, name))
    for field in msgspec.structs.fields(FAMILIES[family][name]):
        if field.required:
            less = {key: value for key, value in raw.items() if key != field.encode_name}
            with pytest.raises(ProtocolError, match=f"`{field.encode_name}`"):
                DECODERS[family](msgspec.msgpack.encode(less))


@pytest.mark.parametrize(("family", "name"), CONTROL)
def test_a_message_of_one_family_is_none_of_another(family: str, name: str):
    for other, decode in DECODERS.items():
        if other != family:
            with pytest.raises(ProtocolError, match="not a valid"):
                decode(golden(family, name))


@pytest.mark.parametrize("kind", ["gossip", "", "HELLO", "hello ", 7, None])
def test_an_unknown_kind_is_a_protocol_error(kind: object):
    raw = msgspec.msgpack.decode(golden("request", "hello")) | {"kind": kind}
    with pytest.raises(ProtocolError, match="not a valid request"):
        decode_request(msgspec.msgpack.encode(raw))


@pytest.mark.parametrize("field", ["code", "reason"])
def test_a_refusal_code_of_tomorrow_is_a_new_revision(field: str):
    """An older client could not read it; a new reason is only a text."""
    raw = msgspec.msgpack.decode(golden("answer", "refusal")) | {field: "moody"}
    if field == "code":
        with pytest.raises(ProtocolError, match="code"):
            decode_answer(msgspec.msgpack.encode(raw))
    else:
        assert decode_answer(msgspec.msgpack.encode(raw)).reason == "moody"

"""What the codec refuses at the boundary; that every message survives it: test_golden.py."""

import msgspec
import pytest

from slipstream.wire.errors import ProtocolError
from slipstream.wire.messages import broker, codec
from slipstream.wire.messages.trajectory import TrajectoryPayload
from tests.support.wire_samples import BUCKET_ANSWERS, HEADER, PAYLOAD, array


def test_an_answer_with_a_bucket_is_read_from_a_view():
    for answer in BUCKET_ANSWERS:
        assert codec.decode_bucket_answer(memoryview(codec.encode(answer))) == answer


def test_a_payload_survives_the_wire_and_shares_the_memory_of_its_frame():
    frame = codec.encode(PAYLOAD)
    got = codec.decode_payload(frame)
    assert got.token_ids.data.tobytes() == bytes(range(12))
    assert got.loss_mask.data.tobytes() == b"\0\1\1"
    assert got.behavior_logprobs.data.tobytes() == bytes(range(12, 24))
    for one in (got.token_ids, got.loss_mask, got.behavior_logprobs):
        assert one.data.obj is frame


def test_a_payload_is_decoded_from_a_view_of_a_larger_buffer():
    frame = codec.encode(
        TrajectoryPayload(
            token_ids=array(b"\7\0\0\0", "int32", 1),
            loss_mask=array(b"\1", "bool", 1),
            behavior_logprobs=array(bytes(4), "float32", 1),
        )
    )
    received = bytearray(b"head" + frame)
    got = codec.decode_payload(memoryview(received)[4:])
    received[4 + frame.index(b"\7\0\0\0")] = 9
    assert got.token_ids.data.tobytes() == b"\x09\0\0\0"


def test_an_unknown_kind_is_named():
    for decode, what in [
        (codec.decode_request, "request"),
        (codec.decode_answer, "answer of the broker"),
        (codec.decode_command, "weight bus command"),
        (codec.decode_agent_message, "weight bus message"),
        (codec.decode_fetch, "request for a bucket"),
        (codec.decode_bucket_answer, "answer with a bucket"),
        (codec.decode_relay_request, "request to the relay"),
        (codec.decode_relay_answer, "answer of the relay"),
        (codec.decode_part_report, "report of a part relay"),
        (codec.decode_head_command, "command of the head relay"),
    ]:
        with pytest.raises(ProtocolError, match=f"not a valid {what}: .*gossip"):
            decode(msgspec.msgpack.encode({"kind": "gossip"}))


def test_garbage_is_a_protocol_error():
    for frame in [
        b"",
        b"\xc1",
        b"not msgpack at all",
        b"\x80",
        b"\x93\1\2\3",
        b"\xff" * 64,
        codec.encode(broker.Hello(role="learner", name="x"))[:-3],
        codec.encode(broker.GetStatus()) + b"\0",
        b"\x81\xa4kind\xa4\xff\xfe\xff\xfe",
    ]:
        for decode in (codec.decode_request, codec.decode_payload, codec.decode_transcript):
            with pytest.raises(ProtocolError, match="not a valid"):
                decode(frame)


def test_a_header_that_contradicts_itself_is_refused_by_the_decoder():
    request = msgspec.to_builtins(broker.SubmitTrajectory(header=HEADER))
    request["header"]["num_tokens"] = 5
    with pytest.raises(ProtocolError, match=r"the response is \[3, 5\)"):
        codec.decode_request(msgspec.msgpack.encode(request))


def test_a_message_with_the_wrong_number_of_frames_is_refused():
    codec.expect_frames([b"a", b"b"], 2, "SubmitTrajectory")
    with pytest.raises(ProtocolError, match="SubmitTrajectory needs 2 attached frames, got 1"):
        codec.expect_frames([b"a"], 2, "SubmitTrajectory")


def test_a_deeply_nested_frame_is_a_protocol_error():
    frame = b"\x82\xa4kind\xa9getstatus\xa1x" + b"\x91" * 100_000 + b"\x01"
    with pytest.raises(ProtocolError):
        codec.decode_request(frame)
